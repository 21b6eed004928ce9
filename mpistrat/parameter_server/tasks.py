"""Tasks of a job with parameter servers: which rank plays which, and the communicator that they share.

Invariant: every rank of the job takes part in `join_cluster`; what is wrong is raised on all of them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count

from mpistrat.cluster import ClusterSpec, check_role
from mpistrat.cluster_resolver import ClusterResolver
from mpistrat.errors import InvalidArgumentError, LaunchError
from mpistrat.groups.rendezvous import rendezvous
from mpistrat.launch import abort
from mpistrat.lazy import MPI
from mpistrat.settings import MAX_MESSAGE_BYTES, Snapshot

CHIEF, WORKER, PS, EVALUATOR = JOBS = "chief", "worker", "ps", "evaluator"

_numbers = count()


@dataclass(frozen=True)
class TaskGroup:
    """The chief, the workers and the servers of a job, and what they talk through."""

    comm: MPI.Comm | None  # of these ranks alone, in the order of the ranks of the job; an evaluator has none
    chief: int  # ranks in `comm`, in the order of their task ids
    workers: tuple[int, ...]
    servers: tuple[int, ...]
    names: tuple[str, ...]  # what errors call each rank: its task, rank and node
    job_rank: int  # that of this rank
    number: int  # counts the groups of this process; equal on all ranks
    settings: Snapshot


def check_tasks(cluster: ClusterSpec) -> None:
    """Check that a cluster can train with parameter servers."""
    if find_spec("cloudpickle") is None:
        advice = "pip install '.[parameter-server]' in the checkout"
        raise LaunchError(f"parameter servers send functions by cloudpickle, which is not installed: {advice}")
    found = ", ".join(f"{cluster.num_tasks(job)} {job}" for job in cluster.jobs) or "no tasks"
    if not set(cluster.jobs) <= set(JOBS):
        raise InvalidArgumentError(f"parameter servers know the jobs {', '.join(JOBS)}; this cluster has {found}")
    counts = {job: cluster.num_tasks(job) if job in cluster.jobs else 0 for job in JOBS}
    if counts[CHIEF] != 1 or counts[WORKER] < 1 or counts[PS] < 1:
        raise InvalidArgumentError(
            f"training with parameter servers needs one chief, and at least one worker and one ps; this cluster has {found}. "
            "Start at least three ranks, for example `mpistrat run -n 3 train.py` with "
            "mpistrat.cluster_resolver.MPIClusterResolver(chief=1, ps=1)"
        )


def task_of(resolver: object) -> tuple[ClusterSpec, str | None, int | None]:
    """Return the cluster of a resolver, and which task of it this rank is."""
    if not isinstance(resolver, ClusterResolver):
        example = "MPIClusterResolver(chief=1, ps=1)"
        raise InvalidArgumentError(f"cluster_resolver must be a ClusterResolver, such as {example}; got {resolver!r}")
    return resolver.cluster_spec(), resolver.task_type, resolver.task_id


def join_cluster(cluster: ClusterSpec, task_type: str | None, task_id: int | None) -> TaskGroup:
    """Return the tasks of the job. A collective call of all its ranks, evaluators included; what is wrong all of them raise."""
    settings = Snapshot()

    def check() -> None:
        if settings.error is not None:
            raise settings.error
        check_tasks(cluster)
        check_role(cluster, task_type, task_id)

    with rendezvous("joining the cluster of parameter servers") as job:
        limit = f"{MAX_MESSAGE_BYTES.name}={settings[MAX_MESSAGE_BYTES]}"  # both ends of a message are cut alike
        job.agree(f"joining the parameter servers of {cluster!r}, {limit}", check)
        played: list[tuple[str, int]] = job.comm.allgather((task_type, task_id))
        _check_played(cluster, played)
        if abort.survives_losses(os.environ):
            abort.end_together(job.comm)
        is_outside = task_type == EVALUATOR
        comm = job.comm.Split(MPI.UNDEFINED if is_outside else 0, job.rank)
        nodes = [job.world.nodes[job.world.place(rank).node_index].name for rank in range(len(played))]
        job_rank = job.rank
    inside = [rank for rank, (kind, _) in enumerate(played) if kind != EVALUATOR]
    ranks = {played[rank]: number for number, rank in enumerate(inside)}
    chief, workers, servers = ([ranks[kind, index] for index in cluster.task_indices(kind)] for kind in (CHIEF, WORKER, PS))
    return TaskGroup(
        comm=None if is_outside else comm,
        chief=chief[0],
        workers=tuple(workers),
        servers=tuple(servers),
        names=tuple("{} {} (rank {} on {})".format(*played[rank], rank, nodes[rank]) for rank in inside),
        job_rank=job_rank,
        number=next(_numbers),
        settings=settings,
    )


def _check_played(cluster: ClusterSpec, played: list[tuple[str, int]]) -> None:
    times = {(job, index): played.count((job, index)) for job in cluster.jobs for index in cluster.task_indices(job)}
    wrong = [f"{job} {index} is played by {number} ranks" for (job, index), number in times.items() if number != 1]
    if wrong:
        found = f"in this job of {len(played)} ranks {', '.join(wrong)}"
        error = LaunchError(f"each task is played by one rank, but {found}. Start all as one job, with mpistrat run or srun")
        error.raised_everywhere = True
        raise error
