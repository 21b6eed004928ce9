"""MPIClusterResolver: the cluster formed by the ranks of MPI."""

from __future__ import annotations

from collections.abc import Mapping

from mpistrat.cluster.ranks import RankResolver
from mpistrat.errors import InvalidArgumentError, LaunchError
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
    chief, ps, evaluator : int
        Instead of `jobs`: the number of tasks of each, assigned in this order; the other ranks are workers, between the last ps
        and the evaluator.

    Raises
    ------
    InvalidArgumentError
        If `port_base` or a number of tasks is invalid, or both `jobs` and numbers of tasks are passed.
    LaunchError
        If the jobs have more or fewer tasks than there are ranks.
    AgreementError
        If ranks passed different arguments.
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        rpc_layer: str | None = None,
        *,
        chief: int = 0,
        ps: int = 0,
        evaluator: int = 0,
    ) -> None:
        others = {"chief": chief, "ps": ps, "evaluator": evaluator}
        named = "".join(f", {job}={count!r}" for job, count in others.items() if count)
        call = f"MPIClusterResolver(jobs={jobs!r}, port_base={port_base!r}, rpc_layer={rpc_layer!r}{named})"
        with rendezvous("MPIClusterResolver") as job:

            def resolve() -> None:
                dealt = _with_workers(jobs, others, job.world.size) if named else jobs
                RankResolver.__init__(self, job.world, job.rank, dealt, port_base, rpc_layer)

            job.agree(call, resolve)


def _with_workers(jobs: Mapping[str, int] | None, others: Mapping[str, int], size: int) -> dict[str, int]:
    """Return the number of tasks of each job, with all other ranks as workers."""
    if jobs is not None:
        raise InvalidArgumentError(f"pass either jobs or chief, ps and evaluator; got jobs={jobs!r} and {dict(others)!r}")
    workers = size - sum(others.values())
    if workers < 1:
        asked = ", ".join(f"{count} {job}" for job, count in others.items() if count)
        raise LaunchError(
            f"{asked} and at least one worker are {sum(others.values()) + 1} ranks, but {size} were launched: start at least "
            f"as many, for example with `mpistrat run -n {sum(others.values()) + 1}`"
        )
    return {"chief": others["chief"], "ps": others["ps"], "worker": workers, "evaluator": others["evaluator"]}
