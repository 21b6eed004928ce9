"""OneDeviceStrategy: one replica, whatever else is running."""

from __future__ import annotations

from mpistrat.cross_device.collectives import LocalCollectives
from mpistrat.errors import InvalidArgumentError
from mpistrat.strategy.base import Strategy
from mpistrat.strategy.extended import StrategyExtended

__all__ = ["OneDeviceStrategy"]


class OneDeviceStrategy(Strategy):
    """Runs everything on this rank alone; starts no MPI and ignores other ranks.

    Code for several replicas runs under it unchanged, which makes it the strategy to debug with.

    Parameters
    ----------
    device : str
        The device of the replica: ``/cpu:0``.

    Raises
    ------
    InvalidArgumentError
        If there is no such device.
    """

    def __init__(self, device: str = "/cpu:0") -> None:
        if not isinstance(device, str) or device.lower().lstrip("/").removeprefix("device:") not in ("cpu", "cpu:0"):
            raise InvalidArgumentError(f"device {device!r} cannot be had; accepted are /cpu:0, CPU:0 and cpu")
        super().__init__(StrategyExtended(LocalCollectives()))
