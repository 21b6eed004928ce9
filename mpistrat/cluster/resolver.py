"""ClusterResolver: the cluster, and which of its tasks this process is; SimpleClusterResolver is given both."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from mpistrat.cluster.spec import ClusterSpec

__all__ = ["ClusterResolver", "SimpleClusterResolver", "url"]


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
    """

    task_type: str | None = None
    task_id: int | None = None
    rpc_layer: str | None = None

    @abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Return a new ClusterSpec; it is empty if there is no cluster."""

    @property
    def environment(self) -> str:
        """The environment that the cluster runs in, such as ``google``; an empty string here."""
        return ""

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
    task_type : str, optional
        The job of this process.
    task_id : int, optional
        The index of this process in its job.
    environment : str
        The environment that the cluster runs in.
    num_accelerators : dict, optional
        Kind of accelerator -> number that each task has.
    rpc_layer : str, optional
        The protocol that `master` puts before an address.

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
        self._spec = ClusterSpec(cluster_spec)
        self._master = master
        self._environment = environment
        self._num_accelerators = dict(num_accelerators or {})

    def cluster_spec(self) -> ClusterSpec:
        """Return a copy of the cluster."""
        return ClusterSpec(self._spec)

    @property
    def environment(self) -> str:
        """The environment that the cluster runs in."""
        return self._environment

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of a task; if none is asked for, the `master` that the resolver was created with.

        Raises
        ------
        InvalidArgumentError
            If the cluster has no such task.
        """
        if task_type is not None and task_id is not None:
            return super().master(task_type, task_id, rpc_layer)
        return url(self._master, self.rpc_layer if rpc_layer is None else rpc_layer)

    def num_accelerators(self, task_type: str | None = None, task_id: int | None = None) -> dict[str, int]:
        """Return the numbers that the resolver was created with, whatever the task."""
        return dict(self._num_accelerators)


def url(address: str, rpc_layer: str | None) -> str:
    """Return an address, with the protocol before it if there is one."""
    return f"{rpc_layer}://{address}" if rpc_layer and address else address
