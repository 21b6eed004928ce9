"""The tasks of synchronous training: which task each rank is, and which rank is the chief."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpistrat.cluster.resolver import ClusterResolver
from mpistrat.cluster.roles import check_role, is_chief
from mpistrat.cluster.spec import ClusterSpec
from mpistrat.errors import InvalidArgumentError, LaunchError

__all__ = ["Role", "chief_rank", "training_role"]

_TRAINING = ("chief", "master", "worker")


@dataclass(frozen=True)
class Role:
    """The task of one rank in a cluster; None if the cluster is empty."""

    spec: ClusterSpec
    task_type: str | None = None
    task_id: int | None = None


def training_role(resolver: ClusterResolver) -> Role:
    """Return the task that a resolver gives this rank.

    Raises
    ------
    InvalidArgumentError
        If there is a cluster, and the resolver names no task of it for this process, or one that does not train.
    """
    spec = ClusterSpec(resolver.cluster_spec())
    name = type(resolver).__name__
    if not spec:
        return Role(spec)
    if resolver.task_type is None or resolver.task_id is None:
        raise InvalidArgumentError(
            f"{name} gives a cluster with the jobs {', '.join(spec.jobs)}, but not which task of it this process is: task_type "
            f"is {resolver.task_type!r} and task_id {resolver.task_id!r}; both are needed, as in task_type='worker', task_id=0"
        )
    check_role(spec, resolver.task_type, resolver.task_id)
    if resolver.task_type not in _TRAINING or "evaluator" in spec.jobs:
        raise InvalidArgumentError(
            f"{name} says that this process is {resolver.task_type} {resolver.task_id} of a cluster with the jobs "
            f"{', '.join(spec.jobs)}: only chief and workers train together; start an evaluator as a job of its own"
        )
    return Role(spec, resolver.task_type, resolver.task_id)


def chief_rank(roles: Sequence[Role]) -> int:
    """Return the lowest rank whose task is the chief; rank 0 if there is no cluster, or no such task in it.

    Parameters
    ----------
    roles : sequence of Role
        The task of each rank, in one cluster. Several ranks may have the same task, which is then a node.

    Raises
    ------
    LaunchError
        On every rank, if a task that trains has no rank.
    """
    spec = roles[0].spec
    if not spec:
        return 0
    played = {(role.task_type, role.task_id) for role in roles}
    tasks = [(job, index) for job in _TRAINING if job in spec.jobs for index in spec.task_indices(job)]
    missing = [f"{job} {index}" for job, index in tasks if (job, index) not in played]
    if missing:
        found = ", ".join(f"{job} {index}" for job, index in tasks if (job, index) in played)
        error = LaunchError(
            f"the cluster has {len(tasks)} tasks that train, but this job of {len(roles)} ranks has only {found}; no rank is "
            f"{', '.join(missing)}. The ranks come from MPI: start all tasks as one job, with mpistrat run, mpiexec or "
            "srun, or leave out of the cluster (TF_CONFIG, or the resolver's) the tasks that are not started"
        )
        error.raised_everywhere = True
        raise error
    return next((rank for rank, role in enumerate(roles) if is_chief(spec, role.task_type, role.task_id)), 0)
