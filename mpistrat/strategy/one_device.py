"""OneDeviceStrategy: one replica, whatever else is running."""

from __future__ import annotations

from mpistrat.cross_device.local import LocalCollectives
from mpistrat.device.binding import own_device
from mpistrat.strategy.base import Strategy
from mpistrat.strategy.extended import StrategyExtended
from mpistrat.topology.devices import ranks_of

__all__ = ["OneDeviceStrategy"]


class OneDeviceStrategy(Strategy):
    """Runs everything on this rank alone; starts no MPI and ignores other ranks.

    Code for several replicas runs under it unchanged, which makes it the strategy to debug with.

    Parameters
    ----------
    device : str, optional
        The device of the replica, which is the one that this process computes on: ``/cpu:0``, or ``/gpu:0``.

    Raises
    ------
    InvalidArgumentError
        If there is no such device.
    """

    def __init__(self, device: str | None = None) -> None:
        collectives = LocalCollectives()
        ranks_of(own_device() if device is None else device, collectives.world)
        super().__init__(StrategyExtended(collectives))
