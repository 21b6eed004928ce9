"""OneDeviceStrategy: one replica, independent of other ranks."""

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
    """Runs everything on this rank alone; does not start MPI, and ignores other ranks.

    Code for several replicas runs under it unchanged, which is useful for debugging.

    Parameters
    ----------
    device : str, optional
        The device that this process computes on: ``/cpu:0`` or ``/gpu:0``; by default what MPISTRAT_DEVICE says: a GPU if there
        is one.

    Raises
    ------
    InvalidArgumentError
        If the device does not exist, or the process already computes on another one.
    LaunchError
        If MPISTRAT_DEVICE is gpu, and there is no usable GPU.
    """

    def __init__(self, device: str | None = None) -> None:
        communicator = LocalCommunicator()
        if device is None or parse_device(device).kind == "GPU":
            _bind()
        ranks_of(own_device() if device is None else device, communicator.world)
        super().__init__(StrategyExtended(communicator))


def _bind() -> None:
    """Bind a GPU to this process, as starting MPI does; a GPU that is already bound is kept."""
    bind_device(detect())
    bound = what_is_bound()
    if bound is not None and bound.problem:
        raise LaunchError(f"{bound.problem}. Set MPISTRAT_DEVICE=cpu to compute in host memory")
