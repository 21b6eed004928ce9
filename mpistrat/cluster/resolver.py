"""ClusterResolver: the cluster, and which of its tasks this process is; as given, of several clusters, or in TF_CONFIG."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from mpistrat.cluster.spec import ClusterSpec
from mpistrat.errors import InvalidArgumentError

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
        return ClusterSpec(_part(_read(), "cluster"))

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
    if value is None:
        return None
    try:
        number = int(value)
        if isinstance(value, float) and value != number:
            raise ValueError("a fraction")
        return number
    except (TypeError, ValueError, OverflowError):
        raise InvalidArgumentError(f"the task index must be a number; got {value!r}; TF_CONFIG is as in {_EXAMPLE}") from None


def url(address: str, rpc_layer: str | None) -> str:
    """Return an address, with the protocol before it if there is one."""
    return f"{rpc_layer}://{address}" if rpc_layer and address else address
