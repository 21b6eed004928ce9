"""MultiWorkerMirroredStrategy: synchronous replicas on all ranks of the job."""

from __future__ import annotations

from typing import Any

from mpistrat.cross_device.hierarchical import HierarchicalAllReduce
from mpistrat.cross_device.options import CommunicationOptions
from mpistrat.errors import InvalidArgumentError
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.launch import bootstrap
from mpistrat.strategy.base import Strategy
from mpistrat.strategy.extended import StrategyExtended
from mpistrat.topology.discover import discover

__all__ = ["MultiWorkerMirroredStrategy"]


class MultiWorkerMirroredStrategy(Strategy):
    """Keeps a copy of each variable on every rank of the job, all equal; reduces within nodes, then between them.

    Making one is a collective call of all ranks of the job. A job of one rank is a job of one replica.

    Parameters
    ----------
    cluster_resolver : object, optional
        Supplies the roles of the tasks; which ranks there are is known from MPI.
    communication_options : CommunicationOptions, optional
        How to communicate where a call does not say.

    Raises
    ------
    InvalidArgumentError
        If the options are no CommunicationOptions.
    """

    def __init__(self, cluster_resolver: Any = None, communication_options: CommunicationOptions | None = None) -> None:
        if not isinstance(communication_options, (CommunicationOptions, type(None))):
            raise InvalidArgumentError(
                f"communication_options must be CommunicationOptions or None; got {type(communication_options).__name__}"
            )
        self._cluster_resolver = cluster_resolver
        comm = bootstrap.start()
        hierarchy = Hierarchy(comm, discover(comm))
        super().__init__(StrategyExtended(HierarchicalAllReduce(hierarchy, communication_options)))

    @property
    def cluster_resolver(self) -> Any:
        """Where the roles of the tasks come from, as it was passed."""
        return self._cluster_resolver
