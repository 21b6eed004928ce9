"""Which rank plays which task; the chief's ParameterServerStrategy, the Server of each other rank, and where variables go."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from itertools import count, pairwise
from typing import Any, NamedTuple, NoReturn

import numpy as np

from mpistrat import ending, settings
from mpistrat.arrays import Array, part_bounds
from mpistrat.cluster import ClusterSpec, check_role
from mpistrat.cluster_resolver import ClusterResolver, MPIClusterResolver, TFConfigClusterResolver, url
from mpistrat.communicator.local import LocalCommunicator
from mpistrat.errors import CollectiveError, InvalidArgumentError, LaunchError
from mpistrat.groups.rendezvous import rendezvous
from mpistrat.launch import abort
from mpistrat.lazy import MPI
from mpistrat.parameter_server.client import Client, current_client
from mpistrat.parameter_server.coordinator import ClusterCoordinator
from mpistrat.parameter_server.dispatcher import Dispatcher
from mpistrat.parameter_server.functions import parameters_of
from mpistrat.parameter_server.messages import Channel
from mpistrat.parameter_server.server import VariableServer, Worker
from mpistrat.parameter_server.variables import ServerVariable, ShardedVariable
from mpistrat.state.changes import VariableSynchronization, checked_aggregation, checked_synchronization
from mpistrat.state.variables import initial_array
from mpistrat.strategy.extended import StrategyExtended
from mpistrat.strategy.strategy import Strategy

# how long an error of the chief waits for functions that workers run, before it is raised
_PATIENCE_AFTER_AN_ERROR_SECONDS = 1.0
PLACEMENTS = ("even_bytes", "round_robin")
CHIEF, WORKER, PS, EVALUATOR = JOBS = "chief", "worker", "ps", "evaluator"
_numbers = count()


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


def join_cluster(cluster: ClusterSpec, task_type: str | None, task_id: int | None) -> Channel | None:
    """Return what tasks talk through; None for an evaluator. All ranks of the job call it; what is wrong all raise."""
    given = settings.Snapshot()

    def check() -> None:
        if given.error is not None:
            raise given.error
        check_tasks(cluster)
        check_role(cluster, task_type, task_id)

    with rendezvous("joining the cluster of parameter servers") as job:
        limit = f"{settings.MAX_MESSAGE_BYTES.name}={given[settings.MAX_MESSAGE_BYTES]}"  # both ends of a message are cut alike
        job.agree(f"joining the parameter servers of {cluster!r}, {limit}", check)
        played: list[tuple[str, int]] = job.comm.allgather((task_type, task_id))
        _check_played(cluster, played)
        if abort.survives_losses(os.environ):
            abort.end_together(job.comm)
        comm = job.comm.Split(MPI.UNDEFINED if task_type == EVALUATOR else 0, job.rank)
        nodes = [job.world.place(rank).node.name for rank in range(len(played))]
    number = next(_numbers)
    if task_type == EVALUATOR:
        return None
    inside = [rank for rank, (kind, _) in enumerate(played) if kind != EVALUATOR]
    ranks = {played[rank]: place for place, rank in enumerate(inside)}
    chief, workers, servers = ([ranks[kind, index] for index in cluster.task_indices(kind)] for kind in (CHIEF, WORKER, PS))
    names = ["{} {} (rank {} on {})".format(*played[rank], rank, nodes[rank]) for rank in inside]
    return Channel(comm, chief[0], workers, servers, names, number, given)


def _check_played(cluster: ClusterSpec, played: list[tuple[str, int]]) -> None:
    times = {(job, index): played.count((job, index)) for job in cluster.jobs for index in cluster.task_indices(job)}
    wrong = [f"{job} {index} is played by {number} ranks" for (job, index), number in times.items() if number != 1]
    if wrong:
        found = f"in this job of {len(played)} ranks {', '.join(wrong)}"
        error = LaunchError(f"each task is played by one rank, but {found}. Start all as one job, with mpistrat run or srun")
        error.raised_everywhere = True
        raise error


def _refused(method: str) -> Any:
    """Return a method that refuses: the chief computes nothing."""

    def refuse(self: object, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: the chief computes nothing. What a worker runs may use it; `ClusterCoordinator` makes per-worker datasets."""
        raise NotImplementedError(
            f"strategy.{method} was called on the chief, which computes nothing itself: workers do, independently of each "
            f"other.\n    incorrect:  strategy.{method}(…)\n"
            "    correct:    coordinator.schedule(step, args=(…)), with a ClusterCoordinator(strategy); what step calls may "
            f"use strategy.{method}"
        )

    return refuse


class ParameterServerStrategy(Strategy):
    """Keeps variables on servers, where workers read and change them without waiting for each other.

    Making one on the chief, and a `mpistrat.Server` on each other rank, is a collective call of all ranks of the job. A
    `ClusterCoordinator` schedules functions on the workers. The servers end by `close`, or when the program of the chief does.

    Parameters
    ----------
    cluster_resolver : ClusterResolver
        Which rank plays which task: one chief, at least one worker and one ps.
    variable_partitioner : callable, optional
        ``partitioner(shape=…, dtype=…)`` returns into how many shards a variable is split along each axis: see
        `mpistrat.experimental.partitioners`. By default no variable is split.
    placement : str
        ``even_bytes``: each goes to the server with the fewest bytes; ``round_robin``: to each in turn, as in TensorFlow.

    Raises
    ------
    InvalidArgumentError
        If `cluster_resolver` is not a ClusterResolver, or this rank is not its chief; `variable_partitioner` cannot be called;
        there is no such `placement`. On every rank, if the cluster has not the tasks that it needs.
    LaunchError
        On every rank, if a task is played by no rank or by several. If cloudpickle is not installed.
    AgreementError
        On every rank, if ranks read different clusters or limits of messages; on the others where one is refused.
    """

    coordinator: ClusterCoordinator

    def __init__(
        self,
        cluster_resolver: ClusterResolver,
        variable_partitioner: Callable[..., Sequence[int]] | None = None,
        *,
        placement: str = PLACEMENTS[0],
    ) -> None:
        cluster, task_type, task_id = task_of(cluster_resolver)
        if task_type is not None and task_type != CHIEF and cluster:
            raise InvalidArgumentError(
                f"the chief makes the strategy, but this rank is {task_type} {task_id}.\n"
                f"    incorrect:  strategy = {type(self).__name__}(resolver), on every rank\n"
                f"    correct:    {type(self).__name__}.main(fn, resolver), on every rank; or on this one "
                "mpistrat.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id).join()"
            )
        if variable_partitioner is not None and not callable(variable_partitioner):
            raise InvalidArgumentError(f"variable_partitioner must be a partitioner or None; got {variable_partitioner!r}")
        if placement not in PLACEMENTS:
            raise InvalidArgumentError(f"placement must be one of {', '.join(PLACEMENTS)}; got {placement!r}")
        self._cluster_resolver = cluster_resolver
        channel = join_cluster(cluster, task_type, task_id)
        assert channel is not None, "the chief has one"
        self.client = Client(channel)
        self.dispatcher = Dispatcher(self.client)
        self.client.strategy = self
        super().__init__(ParameterServerExtended(self.client, variable_partitioner, placement))
        ending.at(ending.Stage.FINISH, self._end)

    @classmethod
    def main(
        cls,
        fn: Callable[[ClusterCoordinator], Any],
        cluster_resolver: ClusterResolver | None = None,
        variable_partitioner: Callable[..., Sequence[int]] | None = None,
        *,
        placement: str = PLACEMENTS[0],
    ) -> Any:
        """Call ``fn(coordinator)`` on the chief, and serve on all other ranks. Not in TensorFlow.

        A collective call of all ranks of the job; an evaluator returns at once. On the chief what `fn` returned is returned, or
        its error raised, which does not wait for functions that still run: where it ends the program, it ends the job.

        Parameters
        ----------
        fn : callable
            The program of the chief; ``coordinator.strategy`` is the strategy, which is closed when it returns or raises.
        cluster_resolver : ClusterResolver, optional
            Which rank plays which task; by default ``TF_CONFIG`` where that is set, else rank 0 is the chief, rank 1
            the ps, and the others are workers.
        variable_partitioner, placement : callable, str
            As for `ParameterServerStrategy`.
        """
        has_config = os.environ.get("TF_CONFIG", "").strip()
        resolver = cluster_resolver
        if resolver is None:
            resolver = TFConfigClusterResolver() if has_config else MPIClusterResolver(chief=1, ps=1)
        cluster, task_type, task_id = task_of(resolver)
        if task_type not in (CHIEF, None) and cluster:
            Server(cluster, task_type, task_id).join()
            return None
        strategy = cls(resolver, variable_partitioner, placement=placement)
        try:
            result = fn(ClusterCoordinator(strategy))
        except BaseException:
            strategy._close(_PATIENCE_AFTER_AN_ERROR_SECONDS)
            raise
        strategy.close()
        return result

    def close(self) -> None:
        """End the servers and workers, once they have done what they are doing; what has not begun is cancelled.

        Not a collective call: `Server.join` returns on the other ranks. Closing again does nothing. An error in a change that
        this rank has asked a server for, and that has not been raised yet, is raised.
        """
        try:
            if not self.dispatcher.is_closed:
                with suppress(CollectiveError):  # the call that has lost a server, or was given up, has raised it
                    self.client.flush()
        finally:
            self._close()

    def _close(self, patience: float = math.inf) -> None:
        """Close, unless functions run for so many seconds; then the end of the program closes, or ends the job."""
        self.dispatcher.stop(patience)
        if self.dispatcher.is_closed:
            ending.forget(ending.Stage.FINISH, self._end)

    run = _refused("run")
    reduce = _refused("reduce")
    gather = _refused("gather")
    experimental_distribute_dataset = _refused("experimental_distribute_dataset")
    distribute_datasets_from_function = _refused("distribute_datasets_from_function")

    def __reduce__(self) -> tuple[Any, ...]:
        """Stand, in a function that is sent to a worker, for the strategy of that worker."""
        return _strategy_here, (self.client.channel.number,)

    def __repr__(self) -> str:
        channel = self.client.channel
        return f"{type(self).__name__}({len(channel.workers)} workers, {len(channel.servers)} servers)"

    def _end(self) -> None:
        """Close where the program ends; but not where it ends the job by itself, with an error."""
        if not (abort.ending_code() and settings.ABORT.read_or_default()):
            self.close()


class ShardInfo(NamedTuple):
    """The shape of a shard of a variable, and where it begins there, for a function that returns initial values."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]


class ParameterServerExtended(StrategyExtended):
    """How a task uses the servers: the chief makes variables, and it and the workers change them."""

    def __init__(
        self, client: Client, partitioner: Callable[..., Sequence[int]] | None = None, placement: str = PLACEMENTS[0]
    ) -> None:
        channel = client.channel
        super().__init__(
            LocalCommunicator(),
            worker_devices=[f"/job:worker/task:{index}" for index in range(len(channel.workers))],
            parameter_devices=[f"/job:ps/task:{index}" for index in range(len(channel.servers))],
            is_chief=channel.rank == channel.chief,
        )
        self._client, self._partitioner, self._placement = client, partitioner, placement
        self._num_placed = 0
        self._beside: int | None = None

    @property
    def server_bytes(self) -> tuple[int, ...]:
        """How many bytes of variables each server keeps. Not in TensorFlow."""
        found = [0] * len(self._client.channel.servers)
        for ref in list(self._client.refs.values()):
            found[ref.server] += ref.nbytes
        return tuple(found)

    def create_variable(
        self,
        initial_value: Any = None,
        trainable: bool | None = None,
        name: str | None = None,
        dtype: Any = None,
        constraint: Callable[[Any], Any] | None = None,
        synchronization: VariableSynchronization | None = VariableSynchronization.AUTO,
        aggregation: Any = None,
        shape: Sequence[int] | None = None,
    ) -> ServerVariable:
        """Return a new variable, kept by servers: what ``mpistrat.Variable`` does in the scope of the strategy, on the chief.

        Its arguments are those of `mpistrat.Variable`. There must be an initial value, and `synchronization` is AUTO or
        ON_WRITE; `constraint` and `aggregation` are without effect, as an update is that of one worker.

        Parameters
        ----------
        initial_value : array_like or callable
            A function with a parameter `shard_info`, or with `partition_shape` and `partition_offset`, is called for each
            shard, if `shape` and `dtype` are given: so a table may be larger than the memory of the chief.
        """
        name, channel = str(name or "Variable"), self._client.channel
        if channel.rank != channel.chief:
            raise RuntimeError(
                f"{name} was made in a function that {channel.name} runs: make variables on the chief, in "
                "strategy.scope(), and use them in the function"
            )
        if initial_value is None:
            raise InvalidArgumentError(f"{name} needs an initial_value: a parameter server strategy places it by its size")
        checked_aggregation(aggregation)
        if checked_synchronization(synchronization) is VariableSynchronization.ON_READ:
            raise NotImplementedError(f"{name}: there is one copy of it, on a server, and none of each replica: use ON_WRITE")
        is_trainable = True if trainable is None else bool(trainable)
        extents, kind, rows = _initial(initial_value, dtype, shape, name)
        num_shards, num_rows = 1, extents[0] if extents else 0
        if self._partitioner is not None and self._beside is None and extents:
            num_shards = check_partition(self._partitioner(shape=extents, dtype=kind), extents)
        if num_shards == 1:
            return self._place(name, rows(0, num_rows), is_trainable)
        bounds = enumerate(pairwise(part_bounds(num_rows, num_shards)))
        return ShardedVariable([self._place(f"{name}/part_{part}", rows(*own), is_trainable) for part, own in bounds], name)

    def _place(self, name: str, array: Array, trainable: bool) -> ServerVariable:
        current_client(self._client.channel.number)  # raises where the strategy was closed: its servers have ended
        self._client.strategy.dispatcher.pump()  # which frees what was dropped
        counted = self.server_bytes  # once: variables may be dropped at any moment
        server = self._num_placed % len(counted) if self._placement == "round_robin" else counted.index(min(counted))
        array = np.asarray(array, order="C")
        ref = self._client.create(server if self._beside is None else self._beside, name, array)
        self._num_placed += 1
        return ServerVariable(name, ref, array.shape, array.dtype, trainable)

    def update(
        self,
        var: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call ``fn(variable, *args, **kwargs)`` on the server where the variable lives; only the arguments are sent.

        `fn` gets a `StoredVariable`: it changes its ``value``, and keeps state of an optimiser in its ``slot(name)``. While it
        runs, nothing else uses the variable. It is sent once, with what it refers to. For a sharded variable it is called
        for each shard: with its rows of arguments that have the shape of the variable, and of IndexedSlices. Its error is
        raised; without `group` a list of what it returned for each shard is returned.
        """
        if not isinstance(var, ServerVariable):
            raise TypeError(f"extended.update of a parameter server strategy changes variables on servers; got {var!r}")
        results = var.update_where_it_lives(fn, args, kwargs or {}, not group)
        return None if group else results

    def variable_created_in_scope(self, v: Any) -> bool:
        """Return whether a variable was made under this strategy."""
        return isinstance(v, ServerVariable) and v.group == self._client.channel.number

    def read_var(self, v: Any) -> Any:
        """Return the array of a variable, as it is now."""
        return v.read()

    @contextmanager
    def colocate_vars_with(self, colocate_with_variable: Any) -> Iterator[None]:
        """Place the variables that are made inside with another one, on the server of its first shard, and whole."""
        if not self.variable_created_in_scope(colocate_with_variable):
            raise InvalidArgumentError(f"colocate_vars_with takes a variable of this strategy; got {colocate_with_variable!r}")
        outer, self._beside = self._beside, colocate_with_variable.server
        try:
            yield
        finally:
            self._beside = outer


def check_partition(shards: object, shape: Sequence[int]) -> int:
    """Return the number of shards along axis 0, after checking what a partitioner has returned."""
    counts = list(shards) if isinstance(shards, Sequence) and not isinstance(shards, str) else []
    if len(counts) != len(shape) or counts[0] < 1 or any(count != 1 for count in counts[1:]):
        raise InvalidArgumentError(
            f"the variable_partitioner returned {shards!r} for shape {tuple(shape)}; accepted is a list with the number of "
            f"shards of axis 0, at least 1, and 1 for each other axis, for example {[2, *[1] * (len(shape) - 1)]}"
        )
    return min(int(counts[0]), max(1, shape[0]))


def _initial(
    value: Any, dtype: Any, shape: Sequence[int] | None, name: str
) -> tuple[tuple[int, ...], np.dtype[Any], Callable[[int, int], Array]]:
    """Return the shape and dtype of an initial value, and what returns some of its rows."""
    parameters = set(parameters_of(value)) if shape and callable(value) else set()
    takes_info, takes_partition = "shard_info" in parameters, {"partition_shape", "partition_offset"} <= parameters
    if not shape or not (takes_info or (takes_partition and dtype is not None)):
        array = initial_array(value, dtype, shape, name)
        return array.shape, array.dtype, lambda start, stop: array[start:stop] if array.ndim else array
    extents, kind = tuple(shape), np.dtype(dtype or np.float32)

    def rows(start: int, stop: int) -> Array:
        shard = ShardInfo((stop - start, *extents[1:]), (start, *[0] * (len(extents) - 1)))
        given = {"shard_info": shard} if takes_info else {"partition_shape": shard.shape, "partition_offset": shard.offset}
        return initial_array(value(**given), kind, shard.shape, name)

    return extents, kind, rows


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
        given: Any = server_or_cluster_def
        if not isinstance(given, (ClusterSpec, Mapping)):
            accepted = "a ClusterSpec, a dict from job to addresses, or a server_def"
            raise TypeError(f"server_or_cluster_def must be {accepted}; got {given!r}")
        if not (isinstance(given, Mapping) and set(given) == {"cluster", "job_name", "task_index", "protocol"}):
            given = {"cluster": given, "job_name": None, "task_index": None, "protocol": "mpi"}
        self._cluster = ClusterSpec(given["cluster"])
        job_name = given["job_name"] if job_name is None else job_name
        self._job, self._index = _inferred(self._cluster, job_name, given["task_index"] if task_index is None else task_index)
        self._protocol = protocol or given["protocol"]
        self._channel: Channel | None = None
        self._is_started = False
        if start:
            self.start()

    @property
    def server_def(self) -> dict[str, Any]:
        """What another server can be made from: cluster, job, index and protocol."""
        task = {"job_name": self._job, "task_index": self._index, "protocol": self._protocol}
        return {"cluster": self._cluster.as_dict(), **task}

    @property
    def target(self) -> str:
        """The address of this task, with its protocol. Messages go by MPI, which does not need it."""
        return url(self._cluster.task_address(self._job, self._index), self._protocol)

    def start(self) -> None:
        """Connect to the other tasks, unless that has been done. A collective call of all ranks of the job, the first time."""
        if not self._is_started:
            self._channel = join_cluster(self._cluster, self._job, self._index)
            self._is_started = True

    def join(self) -> None:
        """Serve until the chief closes the strategy or its program ends; for an evaluator, and from then on, return at once.

        Raises
        ------
        RuntimeError
            If the server was not started.
        UnavailableError
            If the chief is lost, where the job survives the loss of ranks.
        """
        if not self._is_started:
            raise RuntimeError("the server was made with start=False: call start() on all ranks before join()")
        channel, self._channel = self._channel, None
        if channel is None:
            return
        if self._job == PS:
            VariableServer(channel).serve()
        else:
            client = Client(channel)
            client.strategy = Strategy(ParameterServerExtended(client))
            try:
                Worker(client).serve()
            finally:
                client.close()
        channel.close()

    def __repr__(self) -> str:
        return f"Server({self._job} {self._index})"


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


def _strategy_here(group: int) -> Any:
    return current_client(group).strategy
