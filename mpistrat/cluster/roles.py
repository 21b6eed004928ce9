"""Roles: the types of tasks, which task is the chief, and which tasks the ranks of synchronous training play.

=============  =======================================================
``chief``      trains, and writes checkpoints and summaries; at most one
``master``     the same, as TensorFlow 1 called it
``worker``     trains; worker 0 is the chief if there is no chief
``ps``         holds variables
``evaluator``  evaluates while the others train; at most one, and never in the cluster spec of the training
=============  =======================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from mpistrat.cluster.resolver import ClusterResolver
from mpistrat.cluster.spec import ClusterSpec, Tasks
from mpistrat.errors import InvalidArgumentError, LaunchError

Cluster: TypeAlias = ClusterSpec | Mapping[str, Tasks]

_TYPES = ("chief", "master", "worker", "ps", "evaluator")
_CHIEFS = ("chief", "master")
_TRAINING = ("chief", "master", "worker")


def check_role(cluster: Cluster, task_type: str | None, task_id: int | None) -> ClusterSpec:
    """Return the cluster, after checking that it has a task, and no more than one chief and evaluator."""
    spec = ClusterSpec(cluster)
    if task_type not in _TYPES:
        raise InvalidArgumentError(f"task type {task_type!r} is unknown; accepted are {', '.join(_TYPES)}")
    for group in (_CHIEFS, ("evaluator",)):
        count = sum(spec.num_tasks(job) for job in group if job in spec.jobs)
        if count > 1:
            raise InvalidArgumentError(f"a cluster has at most one {group[0]}; {spec!r} has {count}")
    if task_type == "evaluator" and task_type not in spec.jobs:
        return spec
    if task_type not in spec.jobs:
        raise InvalidArgumentError(
            f"task type {task_type!r} is not a job of the cluster, which has {', '.join(spec.jobs) or 'none'}"
        )
    known = spec.task_indices(task_type)
    if task_id not in known:
        tasks = ", ".join(map(str, known))
        raise InvalidArgumentError(f"task id {task_id!r} is not in job {task_type!r}, whose tasks are {tasks}")
    return spec


def is_chief(cluster: Cluster, task_type: str | None, task_id: int | None) -> bool:
    """Return whether a task is the chief, worker 0 of a cluster without chief, or the evaluator."""
    spec = check_role(cluster, task_type, task_id)
    if task_type in (*_CHIEFS, "evaluator"):
        return True
    return task_type == "worker" and task_id == 0 and not any(spec.num_tasks(job) for job in _CHIEFS if job in spec.jobs)


@dataclass(frozen=True)
class Role:
    """The task of one rank in a cluster; None if the cluster is empty."""

    spec: ClusterSpec
    task_type: str | None = None
    task_id: int | None = None


def training_role(resolver: ClusterResolver) -> Role:
    """Return the task that a resolver gives this rank; if there is a cluster, it must be one of it that trains."""
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

    `roles` are those of all ranks, in one cluster. Several may have the same task, which is then a node; a task that trains and
    has no rank is a LaunchError on every rank.
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
