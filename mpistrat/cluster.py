"""ClusterSpec: the jobs of a cluster, and the address of each task in them. The name of a job says which role its tasks have.

=============  =======================================================
``chief``      trains, and writes checkpoints and summaries; at most one
``master``     the same, as TensorFlow 1 called it
``worker``     trains; worker 0 is the chief if there is no chief
``ps``         holds variables
``evaluator``  evaluates while the others train; at most one, and never in the cluster spec of the training
=============  =======================================================
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, TypeAlias

from mpistrat.errors import InvalidArgumentError

Tasks: TypeAlias = Sequence[str] | Mapping[int, str]
"""The addresses of a job's tasks: a list, or task index -> address if some tasks are missing."""
Cluster: TypeAlias = "ClusterSpec | Mapping[str, Tasks]"

_TYPES = ("chief", "master", "worker", "ps", "evaluator")
_CHIEFS = ("chief", "master")
TRAINING = (*_CHIEFS, "worker")


class ClusterSpec:
    """The jobs of a cluster, and the addresses of their tasks.

    Parameters
    ----------
    cluster : dict or ClusterSpec
        Job name -> addresses of its tasks: a list, or task index -> address if some tasks are missing. Another ClusterSpec is
        copied.

    Raises
    ------
    TypeError
        If it is neither, a job's name or an address is not a string, or tasks are in neither a list nor a dict.
    InvalidArgumentError
        If a task index is negative.

    Examples
    --------
    >>> cluster = ClusterSpec({"chief": ["a:8888"], "worker": {0: "b:8888", 2: "c:8888"}})
    >>> cluster.job_tasks("worker")
    ['b:8888', None, 'c:8888']
    """

    def __init__(self, cluster: Cluster) -> None:
        given = cluster.as_dict() if isinstance(cluster, ClusterSpec) else cluster
        if not isinstance(given, Mapping):
            raise TypeError(f"cluster must be a dict from job name to addresses, or a ClusterSpec; got {type(given).__name__}")
        self._jobs = {_checked_job(job): dict(sorted(_indexed(job, tasks))) for job, tasks in given.items()}

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs, in the order they were given."""
        return list(self._jobs)

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Return a new dict, job name -> addresses: a list, or if tasks are missing task index -> address."""
        jobs = self._jobs.items()
        return {job: list(tasks.values()) if list(tasks) == [*range(len(tasks))] else dict(tasks) for job, tasks in jobs}

    def num_tasks(self, job_name: str) -> int:
        """Return the number of tasks of a job."""
        return len(self._tasks(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Return the indices of the tasks of a job, in increasing order."""
        return list(self._tasks(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Return the address of a task."""
        tasks = self._tasks(job_name)
        if task_index not in tasks:
            found = ", ".join(map(str, tasks)) or "none"
            raise InvalidArgumentError(f"job {job_name!r} has no task {task_index!r}; its tasks are {found}")
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Return the addresses of a job by task index, None for tasks that are missing."""
        tasks = self._tasks(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __eq__(self, other: object) -> bool:
        return self._jobs == other._jobs if isinstance(other, ClusterSpec) else NotImplemented

    __hash__: ClassVar[None]  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"ClusterSpec({self.as_dict()!r})"

    def _tasks(self, job_name: str) -> dict[int, str]:
        if job_name not in self._jobs:
            raise InvalidArgumentError(f"there is no job {job_name!r}; the jobs are {', '.join(self._jobs) or 'none'}")
        return self._jobs[job_name]


def _checked_job(job: object) -> str:
    if not isinstance(job, str):
        raise TypeError(f"the name of a job must be a string; got {job!r}")
    return job


def _indexed(job: str, tasks: object) -> Iterable[tuple[int, str]]:
    """Return index and address of each task of a job."""
    if isinstance(tasks, Mapping):
        pairs = [(_checked_index(job, index), address) for index, address in tasks.items()]
    elif isinstance(tasks, (list, tuple)):
        pairs = list(enumerate(tasks))
    else:
        raise TypeError(f"the tasks of job {job!r} must be a list of addresses, or a dict from index to address; got {tasks!r}")
    for index, address in pairs:
        if not isinstance(address, str):
            raise TypeError(f"the address of task {index} of job {job!r} must be a string such as 'host:8888'; got {address!r}")
    return pairs


def _checked_index(job: str, index: object) -> int:
    # JSON, which TF_CONFIG is, has strings for keys
    try:
        number = int(index) if isinstance(index, str) else operator.index(index)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise TypeError(f"a task index of job {job!r} must be an integer; got {index!r}") from None
    if number < 0:
        raise InvalidArgumentError(f"a task index of job {job!r} must be 0 or greater; got {number}")
    return number


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
