"""OneDeviceStrategy: one replica, whatever else is running."""

from __future__ import annotations

from mpistrat.cross_device.local import LocalCollectives
from mpistrat.strategy.base import Strategy
from mpistrat.strategy.extended import StrategyExtended
from mpistrat.topology.devices import OWN_DEVICE, ranks_of

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

    def __init__(self, device: str = OWN_DEVICE) -> None:
        collectives = LocalCollectives()
        ranks_of(device, collectives.world)
        super().__init__(StrategyExtended(collectives, worker_devices=(OWN_DEVICE,)))
