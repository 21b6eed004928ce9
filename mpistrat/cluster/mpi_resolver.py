"""MPIClusterResolver: the cluster formed by the ranks of MPI."""

from __future__ import annotations

from collections.abc import Mapping

from mpistrat.cluster.ranks import RankResolver
from mpistrat.groups.rendezvous import rendezvous

__all__ = ["MPIClusterResolver"]


class MPIClusterResolver(RankResolver):
    """Makes each rank a task, in rank order; the host of a task is the processor name that MPI reports.

    Creating one is a collective call of all ranks of the job.

    Parameters
    ----------
    jobs : dict, optional
        Job name -> number of tasks, assigned to the ranks in this order; by default all ranks are workers.
    port_base : int
        The port of the first rank of a host; the next ranks get the next ports.
    rpc_layer : str, optional
        The protocol that `master` puts before an address.

    Raises
    ------
    InvalidArgumentError
        If `port_base` or a number of tasks is invalid.
    LaunchError
        If the jobs have more or fewer tasks than there are ranks.
    AgreementError
        If ranks passed different arguments.
    """

    def __init__(self, jobs: Mapping[str, int] | None = None, port_base: int = 8888, rpc_layer: str | None = None) -> None:
        call = f"MPIClusterResolver(jobs={jobs!r}, port_base={port_base!r}, rpc_layer={rpc_layer!r})"
        with rendezvous("MPIClusterResolver") as job:
            job.agree(call, lambda: RankResolver.__init__(self, job.world, job.rank, jobs, port_base, rpc_layer))
