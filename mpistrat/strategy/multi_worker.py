"""MultiWorkerMirroredStrategy: synchronous replicas on all ranks of the job."""

from __future__ import annotations

from mpistrat.cross_device.options import CommunicationOptions
from mpistrat.errors import InvalidArgumentError
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.launch import bootstrap
from mpistrat.strategy.agreed import agreed_collectives
from mpistrat.strategy.base import Strategy
from mpistrat.strategy.extended import StrategyExtended
from mpistrat.topology.discover import discover

__all__ = ["MultiWorkerMirroredStrategy"]


class MultiWorkerMirroredStrategy(Strategy):
    """Keeps a copy of each variable on every rank of the job, all equal; reduces within nodes, then between them.

    Making one is a collective call of all ranks of the job. A job of one rank is a job of one replica.

    Parameters
    ----------
    cluster_resolver : None
        Not supported yet: which ranks there are is known from MPI.
    communication_options : CommunicationOptions, optional
        How to communicate where a call does not say.
    num_packs : int, optional
        Cut the elements of a batch into so many equal packs; 0 reduces each array by itself. None (the default) packs by
        the options' `bytes_per_pack`.

    Raises
    ------
    InvalidArgumentError
        If a cluster resolver is passed, the options are no CommunicationOptions, or `num_packs` is negative.
    AgreementError
        If ranks passed different options.
    """

    def __init__(
        self,
        cluster_resolver: None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        num_packs: int | None = None,
    ) -> None:
        if cluster_resolver is not None:
            raise InvalidArgumentError(
                f"cluster_resolver must be None, got {type(cluster_resolver).__name__}: cluster resolvers are not supported "
                "yet, the ranks come from MPI.\n"
                "    incorrect:  mpistrat.MultiWorkerMirroredStrategy(options)\n"
                "    correct:    mpistrat.MultiWorkerMirroredStrategy(communication_options=options)"
            )
        comm = bootstrap.start()
        hierarchy = Hierarchy(comm, discover(comm))
        ops = agreed_collectives("MultiWorkerMirroredStrategy", hierarchy, communication_options, num_packs)
        super().__init__(StrategyExtended(ops))
