"""TensorFlow's ``tf.distribute.cluster_resolver``: the tasks of a cluster, and which of them each process is.

A resolver is told that, joins several others, reads TF_CONFIG, or asks MPI.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from mpistrat.cluster import TRAINING, ClusterSpec, check_role, is_chief
from mpistrat.errors import InvalidArgumentError, LaunchError
from mpistrat.groups.rendezvous import rendezvous
from mpistrat.topology.world import World

__all__ = [
    "ClusterResolver",
    "MPIClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "UnionResolver",
]

_EXAMPLE = '{"cluster": {"worker": ["a:8888", "b:8888"]}, "task": {"type": "worker", "index": 0}}'


class ClusterResolver(ABC):
    """Describes a cluster: its tasks, their addresses, and which task this process is.

    A strategy takes roles from it, such as which rank is the chief; the ranks themselves come from MPI.

    Attributes
    ----------
    task_type : str or None
        The job of this process: ``worker``, ``chief``, …; None if unknown.
    task_id : int or None
        The index of this process in its job; None if unknown.
    rpc_layer : str or None
        The protocol that `master` puts before an address: ``grpc``.
    environment : str
        The environment that the cluster runs in, such as ``google``.
    """

    task_type: str | None = None
    task_id: int | None = None
    rpc_layer: str | None = None
    environment: str = ""

    @abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Return a new ClusterSpec; it is empty if there is no cluster."""

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of a task, by default of this process's; an empty string if there is no cluster or task.

        Raises
        ------
        InvalidArgumentError
            If the cluster has no such task.
        """
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        spec = self.cluster_spec()
        if not spec or task_type is None or task_id is None:
            return ""
        return url(spec.task_address(task_type, task_id), self.rpc_layer if rpc_layer is None else rpc_layer)

    def num_accelerators(self, task_type: str | None = None, task_id: int | None = None) -> dict[str, int]:
        """Return the number of accelerators of each kind that a task has; CPUs are not counted."""
        return {}


def url(address: str, rpc_layer: str | None) -> str:
    """Return an address, with the protocol before it if there is one."""
    return f"{rpc_layer}://{address}" if rpc_layer and address else address


class SimpleClusterResolver(ClusterResolver):
    """Returns the values that it was created with.

    Parameters
    ----------
    cluster_spec : ClusterSpec
        The cluster.
    master : str
        What `master` returns if no task is asked for.
    task_type, task_id, environment, rpc_layer : str, int, str, str
        The attributes, see `ClusterResolver`.
    num_accelerators : dict, optional
        Kind of accelerator -> number that each task has.

    Raises
    ------
    TypeError
        If `cluster_spec` is not a ClusterSpec, or `master` not a string.
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        if not isinstance(cluster_spec, ClusterSpec):
            raise TypeError(
                f"cluster_spec must be a ClusterSpec, such as ClusterSpec({{…}}); got {type(cluster_spec).__name__}"
            )
        if not isinstance(master, str):
            raise TypeError(f"master must be a string; got {type(master).__name__}")
        self.task_type, self.task_id, self.rpc_layer = task_type, task_id, rpc_layer
        self.environment = environment
        self._spec = ClusterSpec(cluster_spec)
        self._master = master
        self._num_accelerators = dict(num_accelerators or {})

    def cluster_spec(self) -> ClusterSpec:
        """Return a copy of the cluster."""
        return ClusterSpec(self._spec)

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of a task; if none is asked for, the `master` that the resolver was created with."""
        if task_type is not None and task_id is not None:
            return super().master(task_type, task_id, rpc_layer)
        return url(self._master, self.rpc_layer if rpc_layer is None else rpc_layer)

    def num_accelerators(self, task_type: str | None = None, task_id: int | None = None) -> dict[str, int]:
        """Return the numbers that the resolver was created with, whatever the task."""
        return dict(self._num_accelerators)


class UnionResolver(ClusterResolver):
    """Joins the clusters of several resolvers; everything else comes from the first one.

    If several resolvers have a job of the same name, its lists of addresses are concatenated; if one of them gives a dict, each
    task index may occur only once.

    Parameters
    ----------
    *resolvers : ClusterResolver
        At least one.
    rpc_layer, task_type, task_id : str, str, int
        Instead of those of the first resolver.

    Raises
    ------
    InvalidArgumentError
        If there is no resolver.
    TypeError
        If one is not a ClusterResolver.
    """

    def __init__(
        self,
        *resolvers: ClusterResolver,
        rpc_layer: str | None = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        if not resolvers:
            raise InvalidArgumentError("UnionResolver needs at least one ClusterResolver; got none")
        for resolver in resolvers:
            if not isinstance(resolver, ClusterResolver):
                raise TypeError(f"UnionResolver joins ClusterResolvers; got {type(resolver).__name__}")
        self._resolvers, first = resolvers, resolvers[0]
        self.environment, self.rpc_layer = first.environment, first.rpc_layer if rpc_layer is None else rpc_layer
        self.task_type = first.task_type if task_type is None else task_type
        self.task_id = first.task_id if task_id is None else task_id

    def cluster_spec(self) -> ClusterSpec:
        """Return a new ClusterSpec with the jobs of all resolvers; a KeyError if two give the same task of a job."""
        specs = [resolver.cluster_spec() for resolver in self._resolvers]
        jobs = dict.fromkeys(job for spec in specs for job in spec.jobs)
        return ClusterSpec({job: _joined(job, [spec.as_dict()[job] for spec in specs if job in spec.jobs]) for job in jobs})

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of a task of any cluster; if none is asked for, the `master` of the first resolver."""
        if task_type is not None and task_id is not None:
            return super().master(task_type, task_id, rpc_layer)
        return self._resolvers[0].master(rpc_layer=self.rpc_layer if rpc_layer is None else rpc_layer)

    def num_accelerators(self, task_type: str | None = None, task_id: int | None = None) -> dict[str, int]:
        """Return the accelerators that the first resolver gives."""
        return self._resolvers[0].num_accelerators(task_type, task_id)


def _joined(job: str, parts: list[list[str] | dict[int, str]]) -> list[str] | dict[int, str]:
    """Return the tasks of a job that is in several clusters."""
    lists = [part for part in parts if isinstance(part, list)]
    if len(lists) == len(parts):
        return [address for part in lists for address in part]
    tasks: dict[int, str] = {}
    for part in parts:
        for index, address in part.items() if isinstance(part, dict) else enumerate(part):
            if index in tasks:
                raise KeyError(f"task {index} of job {job!r} is both {tasks[index]} and {address}")
            tasks[index] = address
    return tasks


class TFConfigClusterResolver(ClusterResolver):
    """Reads the cluster, and which task this process is, from ``TF_CONFIG``; if that is not set, the cluster is empty.

    Parameters
    ----------
    task_type, task_id, rpc_layer, environment : str, int, str, str
        Instead of what ``TF_CONFIG`` says.

    Raises
    ------
    InvalidArgumentError
        If ``TF_CONFIG`` is not valid JSON, or has another structure.
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        config = _read()
        task = _part(config, "task")
        self.task_type = _text(task.get("type")) if task_type is None else task_type
        self.task_id = _index(task.get("index") if task_id is None else task_id)
        self.rpc_layer = _text(config.get("rpc_layer")) if rpc_layer is None else rpc_layer
        self.environment = str(config.get("environment", "")) if environment is None else environment

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster in the present value of ``TF_CONFIG``."""
        try:
            return ClusterSpec(_part(_read(), "cluster"))
        except TypeError as error:
            raise InvalidArgumentError(f"'cluster' of TF_CONFIG: {error}; accepted is {_EXAMPLE}") from None

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the ``session_master`` of ``TF_CONFIG``, or the address of a task; empty if the cluster has only one."""
        session_master = _read().get("session_master")
        if session_master is not None:
            return str(session_master)
        spec = self.cluster_spec()
        if sum(spec.num_tasks(job) for job in spec.jobs) < 2:
            return ""
        return super().master(task_type, task_id, rpc_layer)


def _read() -> dict[str, Any]:
    text = os.environ.get("TF_CONFIG", "").strip() or "{}"
    try:
        config = json.loads(text)
    except ValueError as error:
        raise InvalidArgumentError(f"TF_CONFIG={text!r} is not valid JSON ({error}); accepted is {_EXAMPLE}") from None
    if not isinstance(config, dict):
        raise InvalidArgumentError(f"TF_CONFIG={text!r} is not a JSON object; accepted is {_EXAMPLE}")
    return config


def _part(config: dict[str, Any], key: str) -> dict[str, Any]:
    part = config.get(key) or {}
    if not isinstance(part, dict):
        raise InvalidArgumentError(f"{key!r} of TF_CONFIG must be an object; got {part!r}; accepted is {_EXAMPLE}")
    return part


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _index(value: Any) -> int | None:
    try:
        return None if value is None else int(str(value))
    except ValueError:
        raise InvalidArgumentError(f"the task index must be a number; got {value!r}; TF_CONFIG is as in {_EXAMPLE}") from None


class MPIClusterResolver(ClusterResolver):
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
        call = f"{type(self).__name__}(jobs={jobs!r}, port_base={port_base!r}, rpc_layer={rpc_layer!r}{named})"
        with rendezvous(type(self).__name__) as job:

            def resolve() -> tuple[ClusterSpec, list[tuple[str, int]]]:
                dealt = _with_workers(jobs, others, job.world.size) if named else jobs
                return tasks_of_ranks(job.world, dealt, port_base)

            self._spec, roles = job.agree(call, resolve)
            self.task_type, self.task_id = roles[job.rank]
        self.rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Return a copy of the cluster."""
        return ClusterSpec(self._spec)

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Return the job of this process, and its index there."""
        return self.task_type, self.task_id


class SlurmClusterResolver(MPIClusterResolver):
    """Makes each rank a task, as `MPIClusterResolver` does: MPI tells which task SLURM runs on which node.

    Creating one is a collective call of all ranks of the job. SLURM's binding of CPUs and GPUs is not changed.

    Parameters
    ----------
    jobs, port_base, rpc_layer : dict, int, str
        As for `MPIClusterResolver`.
    gpus_per_node : int, optional
        GPUs of each node; by default the number that SLURM gives, or else the length of ``CUDA_VISIBLE_DEVICES``.
    gpus_per_task : int, optional
        GPUs of each task; by default the GPUs of a node divided by its tasks.
    tasks_per_node, auto_set_gpu : object
        Accepted as in TensorFlow, without effect: MPI counts the tasks, and ``CUDA_VISIBLE_DEVICES`` is never written.

    Raises
    ------
    LaunchError
        If the tasks of a node need more GPUs than it has; and what `MPIClusterResolver` raises.
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str = "grpc",
    ) -> None:
        super().__init__(jobs, port_base, rpc_layer)
        call = f"SlurmClusterResolver(gpus_per_node={gpus_per_node!r}, gpus_per_task={gpus_per_task!r})"
        with rendezvous("SlurmClusterResolver") as job:
            most_on_a_node = max(job.world.local_sizes)
            self._gpus_per_task = job.agree(call, lambda: gpus_of_task(most_on_a_node, gpus_per_node, gpus_per_task))

    def num_accelerators(self, task_type: str | None = None, task_id: int | None = None) -> dict[str, int]:
        """Return the number of GPUs of each task; empty if there are none."""
        return {"GPU": self._gpus_per_task} if self._gpus_per_task else {}


def tasks_of_ranks(world: World, jobs: Mapping[str, int] | None, port_base: int) -> tuple[ClusterSpec, list[tuple[str, int]]]:
    """Return the cluster of the ranks of a world, and the task of each; an address is a rank's host and a port of its own."""
    counts, num_ports = {"worker": world.size} if jobs is None else dict(jobs), max(world.local_sizes)
    for job, count in counts.items():
        if not isinstance(count, int) or count < 0:
            raise InvalidArgumentError(f"jobs gives {count!r} tasks to {job!r}; a number of tasks is 0 or greater")
    if not isinstance(port_base, int) or not 0 < port_base <= 65536 - num_ports:
        raise InvalidArgumentError(
            f"port_base must be the first of {num_ports} ports, 1 to {65536 - num_ports}; got {port_base!r}"
        )
    if sum(counts.values()) != world.size:
        asked = ", ".join(f"{count} of {job}" for job, count in counts.items())
        raise LaunchError(
            f"jobs asks for {sum(counts.values())} tasks ({asked}), but {world.size} were launched; start as many as the "
            "jobs have, or leave jobs out: all are workers then"
        )
    places = map(world.place, range(world.size))
    addresses = (f"{node.name}:{port_base + local_rank}" for node, local_rank in places)
    spec = ClusterSpec({job: [next(addresses) for _ in range(count)] for job, count in counts.items() if count})
    return spec, [(job, index) for job, count in counts.items() for index in range(count)]


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


def gpus_of_task(num_tasks: int, per_node: int | None, per_task: int | None) -> int:
    """Return the number of GPUs of each task; a node has at most `num_tasks` tasks."""
    for name, number in (("gpus_per_node", per_node), ("gpus_per_task", per_task)):
        if number is not None and (not isinstance(number, int) or number < 0):
            raise InvalidArgumentError(f"{name} must be 0 or a positive number; got {number!r}")
    count, visible = os.environ.get("SLURM_GPUS_ON_NODE", ""), os.environ.get("CUDA_VISIBLE_DEVICES", "")
    # CUDA takes devices up to the first one that does not exist: -1, for example, or what SLURM sets for a task without any
    devices = takewhile(lambda name: name and name not in ("-1", "NoDevFiles"), map(str.strip, visible.split(",")))
    found = int(count) if count.isdecimal() else len([*devices])
    present = found if per_node is None else per_node
    wanted = present // num_tasks if per_task is None else per_task
    if wanted * num_tasks > present:
        raise LaunchError(
            f"{num_tasks} tasks on a node with {wanted} GPUs each need {wanted * num_tasks}, but the node has {present}; ask "
            "SLURM for more (--gpus-per-node), start fewer tasks, or pass a smaller gpus_per_task"
        )
    return wanted


def training_role(resolver: ClusterResolver) -> tuple[ClusterSpec, tuple[str | None, int | None]]:
    """Return a resolver's cluster, and the task that it gives this rank; if there is a cluster, it must be one that trains."""
    spec, name = ClusterSpec(resolver.cluster_spec()), type(resolver).__name__
    if not spec:
        return spec, (None, None)
    if resolver.task_type is None or resolver.task_id is None:
        raise InvalidArgumentError(
            f"{name} gives a cluster with the jobs {', '.join(spec.jobs)}, but not which task of it this process is: task_type "
            f"is {resolver.task_type!r} and task_id {resolver.task_id!r}; both are needed, as in task_type='worker', task_id=0"
        )
    check_role(spec, resolver.task_type, resolver.task_id)
    if resolver.task_type not in TRAINING or "evaluator" in spec.jobs:
        raise InvalidArgumentError(
            f"{name} says that this process is {resolver.task_type} {resolver.task_id} of a cluster with the jobs "
            f"{', '.join(spec.jobs)}: only chief and workers train together; start an evaluator as a job of its own"
        )
    return spec, (resolver.task_type, resolver.task_id)


def chief_rank(spec: ClusterSpec, played: Sequence[tuple[str | None, int | None]]) -> int:
    """Return the lowest rank whose task is the chief, of all ranks' tasks; rank 0 if there is no cluster, or no such task."""
    if not spec:
        return 0
    there, tasks = {*played}, [(job, index) for job in TRAINING if job in spec.jobs for index in spec.task_indices(job)]
    missing = [f"{job} {index}" for job, index in tasks if (job, index) not in there]
    if missing:
        found = ", ".join(f"{job} {index}" for job, index in tasks if (job, index) in there)
        error = LaunchError(
            f"the cluster has {len(tasks)} tasks that train, but this job of {len(played)} ranks has only {found}; no rank is "
            f"{', '.join(missing)}. The ranks come from MPI: start all tasks as one job, with mpistrat run, mpiexec or "
            "srun, or leave out of the cluster (TF_CONFIG, or the resolver's) the tasks that are not started"
        )
        error.raised_everywhere = True
        raise error
    return next((rank for rank, task in enumerate(played) if is_chief(spec, *task)), 0)
