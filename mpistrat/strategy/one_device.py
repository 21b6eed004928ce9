"""Strategies of one replica: OneDeviceStrategy, and the default strategy, which is current outside all scopes."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

from mpistrat import settings
from mpistrat.communicator.local import LocalCommunicator
from mpistrat.context.stack import EXAMPLES, Mode, register_default
from mpistrat.device.binding import own_device
from mpistrat.errors import LaunchError
from mpistrat.launch.environment import LauncherView, detect
from mpistrat.launch.gpu_binding import bind_device, what_is_bound
from mpistrat.strategy.extended import StrategyExtended
from mpistrat.strategy.replica_context import ReplicaContext
from mpistrat.strategy.strategy import Strategy
from mpistrat.topology.world import parse_device, ranks_of


class OneDeviceStrategy(Strategy):
    """Runs everything on this rank alone; does not start MPI, and ignores other ranks.

    Code for several replicas runs under it unchanged, which is useful for debugging.

    Parameters
    ----------
    device : str, optional
        The device that this process computes on: ``/cpu:0`` or ``/gpu:0``; by default what MPISTRAT_DEVICE says: a GPU if there
        is one.
    """

    def __init__(self, device: str | None = None) -> None:
        communicator = LocalCommunicator()
        if device is None or parse_device(device).kind == "GPU":
            bind_device(detect())  # as starting MPI does; a GPU that is already bound is kept
            bound = what_is_bound()
            if bound is not None and bound.problem:
                raise LaunchError(f"{bound.problem}. Set MPISTRAT_DEVICE=cpu to compute in host memory")
        ranks_of(own_device() if device is None else device, communicator.world)
        super().__init__(StrategyExtended(communicator))


_WITHOUT_COMMUNICATION = ("merge_call", "update")
_PACKAGE = str(Path(__file__).parents[1])


class DefaultReplicaContext(ReplicaContext):
    """The replica context of the default strategy, whose collectives return the value of this rank, as in TensorFlow.

    In a job of several ranks that is rarely intended: the first collective warns, and with MPISTRAT_STRICT every one raises.
    """

    _has_checked_peers = False

    def _require_current(self, method: str) -> None:
        super()._require_current(method)
        if self._has_checked_peers or method in _WITHOUT_COMMUNICATION:
            return
        view = detect()  # does not start MPI
        text = _text(method, view) if view is not None and view.has_peers else ""
        if text and settings.STRICT.read():
            raise RuntimeError(text)
        self._has_checked_peers = True
        if text:
            warnings.warn(text, UserWarning, stacklevel=_levels_to_user())


@register_default
def _default_mode() -> Mode:
    strategy = Strategy(StrategyExtended(LocalCommunicator()))
    strategy.replica_context = DefaultReplicaContext(strategy)
    return strategy.replica_context.mode


def _text(method: str, view: LauncherView) -> str:
    line = EXAMPLES[f"ctx.{method}"][0].partition("ctx.")[2]
    job = f"{view.size} ranks" if view.size else "several ranks"
    return (
        f"rank {view.rank}: ReplicaContext.{method} was called outside strategy.run, in a job of {job}. There it reduces "
        "nothing, as in TensorFlow: each rank gets its own value back.\n"
        f"    incorrect:  mpistrat.get_replica_context().{line}\n"
        f"    correct:    strategy.run(lambda: mpistrat.get_replica_context().{line}), of a strategy such as "
        "mpistrat.MultiWorkerMirroredStrategy()"
    )


def _levels_to_user() -> int:
    """Return the stacklevel at which the caller's warning names the innermost line outside this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    return level
