"""ClusterResolver: who is in the cluster and which task this process is; and the resolver that is told so."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from mpistrat.cluster.spec import ClusterSpec

__all__ = ["ClusterResolver", "SimpleClusterResolver", "url"]


class ClusterResolver(ABC):
    """Says which tasks there are, where, and which of them this process is.

    A strategy takes roles from it, such as who is the chief; which ranks there are it knows from MPI.

    Attributes
    ----------
    task_type : str or None
        The job of this process: ``worker``, ``chief``, …; None where that is not known.
    task_id : int or None
        The index of this process in its job.
    rpc_layer : str or None
        What `master` puts before an address: ``grpc``.
    """

    task_type: str | None = None
    task_id: int | None = None
    rpc_layer: str | None = None

    @abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster, anew at each call; it is empty where there is none."""

    @property
    def environment(self) -> str:
        """The kind of place the cluster runs in, such as ``google``; here the empty text."""
        return ""

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of a task, of this process's by default; the empty text where there is no such cluster.

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
        """Return how many devices of each kind a task has, CPUs not counted."""
        return {}


class SimpleClusterResolver(ClusterResolver):
    """Hands on what it is told.

    Parameters
    ----------
    cluster_spec : ClusterSpec
        The cluster.
    master : str
        What `master` returns where no task is asked for.
    task_type : str, optional
        The job of this process.
    task_id : int, optional
        The index of this process in its job.
    environment : str
        The kind of place the cluster runs in.
    num_accelerators : dict, optional
        From kind of device to how many each task has.
    rpc_layer : str, optional
        What `master` puts before an address.

    Raises
    ------
    TypeError
        If `cluster_spec` is not a ClusterSpec, or `master` no string.
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
        """The kind of place the cluster runs in."""
        return self._environment

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of a task; what the resolver was told where none is asked for.

        Raises
        ------
        InvalidArgumentError
            If the cluster has no such task.
        """
        if task_type is not None and task_id is not None:
            return super().master(task_type, task_id, rpc_layer)
        return url(self._master, self.rpc_layer if rpc_layer is None else rpc_layer)

    def num_accelerators(self, task_type: str | None = None, task_id: int | None = None) -> dict[str, int]:
        """Return how many devices of each kind the resolver was told that a task has."""
        return dict(self._num_accelerators)


def url(address: str, rpc_layer: str | None) -> str:
    """Return an address with its protocol before it, where there are both."""
    return f"{rpc_layer}://{address}" if rpc_layer and address else address
