"""MPIClusterResolver: the cluster that MPI's ranks are."""

from __future__ import annotations

from collections.abc import Mapping

from mpistrat.cluster.ranks import RankResolver
from mpistrat.groups.rendezvous import rendezvous

__all__ = ["MPIClusterResolver"]


class MPIClusterResolver(RankResolver):
    """Makes each rank a task, in the order of ranks; hosts are those that the ranks say they are on.

    Making one is a collective call of all ranks of the job.

    Parameters
    ----------
    jobs : dict, optional
        From the name of a job to its number of tasks, dealt to the ranks in this order; all are workers by default.
    port_base : int
        The port of the first rank of a host; the others follow.
    rpc_layer : str, optional
        What `master` puts before an address.

    Raises
    ------
    InvalidArgumentError
        If `port_base`, or a number of tasks, is not a number that can be had.
    LaunchError
        If the jobs have more or fewer tasks than there are ranks.
    AgreementError
        If ranks passed different arguments.
    """

    def __init__(self, jobs: Mapping[str, int] | None = None, port_base: int = 8888, rpc_layer: str | None = None) -> None:
        call = f"MPIClusterResolver(jobs={jobs!r}, port_base={port_base!r}, rpc_layer={rpc_layer!r})"
        with rendezvous("MPIClusterResolver") as job:
            job.agree(call, lambda: RankResolver.__init__(self, job.world, job.rank, jobs, port_base, rpc_layer))
