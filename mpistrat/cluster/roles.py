"""Roles: the types of tasks, which task is the chief, and how the tasks that train are numbered.

=============  =======================================================
``chief``      trains, and writes checkpoints and summaries; at most one
``master``     the same, as TensorFlow 1 called it
``worker``     trains; worker 0 is the chief if there is no chief
``ps``         holds variables
``evaluator``  evaluates while the others train; at most one, and never in the cluster spec of the training
=============  =======================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from mpistrat.cluster.spec import ClusterSpec, Tasks
from mpistrat.errors import InvalidArgumentError

__all__ = ["check_role", "id_in_cluster", "is_chief", "worker_count"]

Cluster: TypeAlias = ClusterSpec | Mapping[str, Tasks]

_TYPES = ("chief", "master", "worker", "ps", "evaluator")
_CHIEFS = ("chief", "master")


def check_role(cluster: Cluster, task_type: str | None, task_id: int | None) -> ClusterSpec:
    """Return the cluster, after checking that it has a task.

    Raises
    ------
    InvalidArgumentError
        If the type is not a type of task or the cluster has no such task, or more than one chief or evaluator.
    """
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
    """Return whether a task is the chief, worker 0 of a cluster without chief, or the evaluator.

    Raises
    ------
    InvalidArgumentError
        As `check_role`.
    """
    spec = check_role(cluster, task_type, task_id)
    if task_type in (*_CHIEFS, "evaluator"):
        return True
    return task_type == "worker" and task_id == 0 and not _num_chiefs(spec)


def id_in_cluster(cluster: Cluster, task_type: str | None, task_id: int | None) -> int:
    """Return the number of a task among those that train: the chief, then the workers; an evaluator has number 0.

    Raises
    ------
    InvalidArgumentError
        As `check_role`, and for a ``ps``, which does not train.
    """
    spec = check_role(cluster, task_type, task_id)
    if task_type == "ps":
        raise InvalidArgumentError("a ps has no id among the tasks that train; chief, worker and evaluator have one")
    if task_type != "worker":
        return 0
    assert task_id is not None, "check_role has found the task"
    return _num_chiefs(spec) + spec.task_indices("worker").index(task_id)


def worker_count(cluster: Cluster, task_type: str | None) -> int:
    """Return the number of tasks that train together with one of this type: chief and workers, or the evaluator alone.

    Raises
    ------
    InvalidArgumentError
        For a ``ps``, which does not train, and if the type is unknown.
    """
    spec = ClusterSpec(cluster)
    if task_type not in _TYPES or task_type == "ps":
        raise InvalidArgumentError(f"worker_count counts chief, worker and evaluator; got task type {task_type!r}")
    if task_type == "evaluator":
        return 1
    return _num_chiefs(spec) + (spec.num_tasks("worker") if "worker" in spec.jobs else 0)


def _num_chiefs(spec: ClusterSpec) -> int:
    return sum(spec.num_tasks(job) for job in _CHIEFS if job in spec.jobs)
