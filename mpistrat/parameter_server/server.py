"""Server: what a worker or a ps runs until the job is done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpistrat.cluster.resolver import url
from mpistrat.cluster.spec import ClusterSpec
from mpistrat.errors import InvalidArgumentError
from mpistrat.parameter_server.client import Client, install
from mpistrat.parameter_server.frames import Channel
from mpistrat.parameter_server.server_extended import ParameterServerExtended
from mpistrat.parameter_server.tasks import CHIEF, PS, WORKER, TaskGroup, join_cluster
from mpistrat.parameter_server.termination import names_the_killed
from mpistrat.parameter_server.variable_server import VariableServer
from mpistrat.parameter_server.worker import Worker
from mpistrat.strategy.strategy import Strategy

__all__ = ["Server"]


class Server:
    """Makes this rank a worker or a ps of a job with parameter servers; `join` is its program.

    Parameters
    ----------
    server_or_cluster_def : ClusterSpec or dict
        The tasks of the job; or what `server_def` of another server returns.
    job_name : str, optional
        The job of this rank; it may be left out where the cluster has but one job, or `server_or_cluster_def` says it.
    task_index : int, optional
        Its index there; it may be left out where the job has but one task, or likewise.
    protocol : str, optional
        What `target` puts before the address.
    config : object, optional
        Without effect; accepted because programs for TensorFlow pass it.
    start : bool
        Whether to `start` at once, which is a collective call of all ranks of the job.

    Raises
    ------
    TypeError
        If `server_or_cluster_def` is neither.
    InvalidArgumentError
        If the job or the index is not known, or it is the chief, which makes a `ParameterServerStrategy` instead. From `start`
        on every rank, if the tasks are not those that such a job has.
    LaunchError
        From `start` on every rank, if a task is played by no rank or by several.
    """

    def __init__(
        self,
        server_or_cluster_def: Any,
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str | None = None,
        config: Any = None,
        start: bool = True,
    ) -> None:
        given = server_or_cluster_def
        if isinstance(given, Mapping) and set(given) == {"cluster", "job_name", "task_index", "protocol"}:
            job_name = given["job_name"] if job_name is None else job_name
            task_index = given["task_index"] if task_index is None else task_index
            protocol, given = protocol or given["protocol"], given["cluster"]
        if not isinstance(given, (ClusterSpec, Mapping)):
            raise TypeError(
                f"server_or_cluster_def must be a ClusterSpec, a dict from job to addresses, or a server_def; got {given!r}"
            )
        self._cluster = ClusterSpec(given)
        self._job, self._index = _inferred(self._cluster, job_name, task_index)
        self._protocol = protocol or "mpi"
        self._group: TaskGroup | None = None
        if start:
            self.start()

    @property
    def server_def(self) -> dict[str, Any]:
        """What another server can be made from: cluster, job, index and protocol."""
        return {
            "cluster": self._cluster.as_dict(),
            "job_name": self._job,
            "task_index": self._index,
            "protocol": self._protocol,
        }

    @property
    def target(self) -> str:
        """The address of this task, with its protocol. Messages go by MPI, which does not need it."""
        return url(self._cluster.task_address(self._job, self._index), self._protocol)

    def start(self) -> None:
        """Connect to the other tasks, unless that has been done. A collective call of all ranks of the job, the first time."""
        if self._group is None:
            self._group = join_cluster(self._cluster, self._job, self._index)

    def join(self) -> None:
        """Serve until the chief closes the strategy or its program ends; for an evaluator, return at once.

        Raises
        ------
        RuntimeError
            If the server was not started.
        UnavailableError
            If the chief is lost, where the job survives the loss of ranks.
        """
        if self._group is None:
            raise RuntimeError("the server was made with start=False: call start() on all ranks before join()")
        if self._group.comm is None:
            return
        channel = Channel(self._group)
        with names_the_killed(self._group):
            if self._job == PS:
                VariableServer(channel).serve()
            else:
                _work(channel)

    def __repr__(self) -> str:
        return f"Server({self._job} {self._index})"


def _work(channel: Channel) -> None:
    client = Client(channel)
    client.strategy = Strategy(ParameterServerExtended(client))
    install(client)
    try:
        Worker(client, client.strategy).serve()
    finally:
        install(None)
        client.close()


def _inferred(cluster: ClusterSpec, job: str | None, index: int | None) -> tuple[str, int]:
    if job is None:
        if len(cluster.jobs) != 1:
            raise InvalidArgumentError(f"job_name is needed, for the cluster has the jobs {', '.join(cluster.jobs) or 'none'}")
        job = cluster.jobs[0]
    if job == CHIEF:
        raise InvalidArgumentError(
            "the chief is not a server: it makes a ParameterServerStrategy.\n"
            '    incorrect:  mpistrat.Server(resolver.cluster_spec(), job_name="chief").join()\n'
            f'    correct:    if resolver.task_type in ("{WORKER}", "{PS}"): mpistrat.Server(…).join()'
        )
    if index is None:
        known = cluster.task_indices(job)
        if len(known) != 1:
            raise InvalidArgumentError(f"task_index is needed, for job {job!r} has the tasks {', '.join(map(str, known))}")
        index = known[0]
    return job, index
