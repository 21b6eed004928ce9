"""OneDeviceStrategy: one replica, whatever else is running."""

from __future__ import annotations

from mpistrat.communicator.local import LocalCommunicator
from mpistrat.device.binding import own_device
from mpistrat.errors import LaunchError
from mpistrat.launch.environment import detect
from mpistrat.launch.gpu_binding import bind_device, what_is_bound
from mpistrat.strategy.extended import StrategyExtended
from mpistrat.strategy.strategy import Strategy
from mpistrat.topology.devices import parse_device, ranks_of

__all__ = ["OneDeviceStrategy"]


class OneDeviceStrategy(Strategy):
    """Runs everything on this rank alone; starts no MPI and ignores other ranks.

    Code for several replicas runs under it unchanged, which makes it the strategy to debug with.

    Parameters
    ----------
    device : str, optional
        The device of the replica, which is the one that this process computes on: ``/cpu:0``, or ``/gpu:0``; by default a
        GPU where there is one. MPISTRAT_DEVICE decides for programs that do not.

    Raises
    ------
    InvalidArgumentError
        If there is no such device, or the process computes on another one already.
    LaunchError
        If MPISTRAT_DEVICE asks for a GPU that cannot be had.
    """

    def __init__(self, device: str | None = None) -> None:
        communicator = LocalCommunicator()
        if device is None or parse_device(device).kind == "GPU":
            _bind()
        ranks_of(own_device() if device is None else device, communicator.world)
        super().__init__(StrategyExtended(communicator))


def _bind() -> None:
    """Bind the GPU of this process, as strategies do that start MPI; what was bound before stays."""
    bind_device(detect())
    bound = what_is_bound()
    if bound is not None and bound.problem:
        raise LaunchError(f"{bound.problem}. Set MPISTRAT_DEVICE=cpu to compute in host memory")
