"""ParameterServerStrategy: the chief of a job whose variables are on servers, and whose workers change them asynchronously."""

from __future__ import annotations

import atexit
import math
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NoReturn

from mpistrat import settings
from mpistrat.cluster.mpi_resolver import MPIClusterResolver
from mpistrat.cluster.resolver import ClusterResolver
from mpistrat.cluster.tf_config import TFConfigClusterResolver
from mpistrat.errors import InvalidArgumentError
from mpistrat.launch import abort, exit_code
from mpistrat.parameter_server.client import Client, here, install
from mpistrat.parameter_server.coordination import ClusterCoordinator
from mpistrat.parameter_server.dispatcher import Dispatcher
from mpistrat.parameter_server.frames import Channel
from mpistrat.parameter_server.server import Server
from mpistrat.parameter_server.server_extended import PLACEMENTS, ParameterServerExtended
from mpistrat.parameter_server.tasks import CHIEF, join_cluster, task_of
from mpistrat.parameter_server.termination import names_the_killed
from mpistrat.strategy.strategy import Strategy

__all__ = ["ParameterServerStrategy"]

# how long an error of the chief waits for functions that workers run, before it is raised
_PATIENCE_AFTER_AN_ERROR_SECONDS = 1.0


class ParameterServerStrategy(Strategy):
    """Keeps variables on servers, where workers read and change them without waiting for each other.

    Making one on the chief, and a `mpistrat.Server` on each other rank, is a collective call of all ranks of the job. A
    `ClusterCoordinator` schedules functions on the workers. The servers end when `close` is called, or the program of the chief
    ends.

    Parameters
    ----------
    cluster_resolver : ClusterResolver
        Which rank plays which task: one chief, at least one worker and one ps.
    variable_partitioner : callable, optional
        ``partitioner(shape, dtype, axis=0)`` returns into how many shards a variable is split along each axis: see
        `mpistrat.experimental.partitioners`. By default no variable is split.
    placement : str
        ``even_bytes``: each variable or shard goes to the server with the fewest bytes; ``round_robin``: to each in turn, as in
        TensorFlow.
    max_staleness : int, optional
        How many updates a worker's read of a whole variable may lack. An update is one assignment, addition, subtraction,
        scatter update or call of ``extended.update``, by any rank; it counts, for each shard, from when the server has made
        it. A read that begins when the server has made n updates returns n - max_staleness of them or more; those which
        the worker itself has made are no exception, unless this is 0. Where a worker has a copy that is new enough, the
        array is not sent again; the worker keeps a copy of what it reads. A worker on the node of the server reads the
        array where it lies, which lacks nothing; so do reads of some of the rows, and the chief. By default, as in
        TensorFlow, each read asks the server, and returns what it has then. `ClusterCoordinator.staleness_report` tells
        how many updates the reads have lacked. Not in TensorFlow.

    Raises
    ------
    InvalidArgumentError
        If `cluster_resolver` is not a ClusterResolver, or this rank is not its chief; `variable_partitioner` cannot be called;
        there is no such `placement`; `max_staleness` is negative. On every rank, if the cluster has not the tasks that it
        needs.
    LaunchError
        On every rank, if a task is played by no rank or by several.
    AgreementError
        On every rank, if ranks read different clusters; on the others where one is refused.
    """

    coordinator: ClusterCoordinator

    def __init__(
        self,
        cluster_resolver: ClusterResolver,
        variable_partitioner: Callable[..., Sequence[int]] | None = None,
        *,
        placement: str = PLACEMENTS[0],
        max_staleness: int | None = None,
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
        if max_staleness is not None and max_staleness < 0:
            raise InvalidArgumentError(f"max_staleness must be at least 0, or None for no bound; got {max_staleness!r}")
        self._cluster_resolver, self.max_staleness = cluster_resolver, max_staleness
        self.client = Client(Channel(join_cluster(cluster, task_type, task_id)))
        self.dispatcher = Dispatcher(self.client)
        self.client.strategy = self
        install(self.client)
        super().__init__(ParameterServerExtended(self.client, variable_partitioner, placement, max_staleness))
        self._until_closed = ExitStack()
        self._until_closed.enter_context(names_the_killed(self.client.channel.group))
        atexit.register(self._end)
        abort.before_end(self.dispatcher.dismiss)

    @classmethod
    def main(
        cls,
        fn: Callable[[ClusterCoordinator], Any],
        cluster_resolver: ClusterResolver | None = None,
        variable_partitioner: Callable[..., Sequence[int]] | None = None,
        *,
        placement: str = PLACEMENTS[0],
        max_staleness: int | None = None,
    ) -> Any:
        """Call ``fn(coordinator)`` on the chief, and serve on all other ranks. Not in TensorFlow.

        A collective call of all ranks of the job; an evaluator returns at once.

        Parameters
        ----------
        fn : callable
            The program of the chief; ``coordinator.strategy`` is the strategy, which is closed when it returns or raises.
            An error does not wait for functions that still run: where it ends the program, it ends the job.
        cluster_resolver : ClusterResolver, optional
            Which rank plays which task; by default ``TF_CONFIG`` where that is set, else rank 0 is the chief, rank 1
            the ps, and the others are workers.
        variable_partitioner, placement, max_staleness : callable, str, int
            As for `ParameterServerStrategy`.

        Returns
        -------
        object
            On the chief what `fn` returned, None elsewhere.

        Raises
        ------
        Exception
            On the chief the error of `fn`; elsewhere as `ParameterServerStrategy` and `mpistrat.Server`.
        """
        resolver = _default_resolver() if cluster_resolver is None else cluster_resolver
        cluster, task_type, task_id = task_of(resolver)
        if task_type not in (CHIEF, None) and cluster:
            Server(cluster, task_type, task_id).join()
            return None
        strategy = cls(resolver, variable_partitioner, placement=placement, max_staleness=max_staleness)
        try:
            result = fn(ClusterCoordinator(strategy))
        except BaseException:
            strategy._close(_PATIENCE_AFTER_AN_ERROR_SECONDS)
            raise
        strategy.close()
        return result

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """Where the roles of the ranks come from."""
        return self._cluster_resolver

    def close(self) -> None:
        """End the servers and workers, once they have done what they are doing; what has not begun is cancelled.

        Not a collective call: `Server.join` returns on the other ranks. Closing again does nothing.
        """
        self._close()

    def _close(self, patience: float = math.inf) -> None:
        """Close, unless functions run for so many seconds; then the end of the program closes, or ends the job."""
        was_open = not self.dispatcher.is_closed
        self.dispatcher.stop(patience)
        if was_open and self.dispatcher.is_closed:
            install(None)
            self._until_closed.close()
            atexit.unregister(self._end)

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: the chief computes nothing. In a scheduled function ``strategy.run`` calls the function on that worker.

        Raises
        ------
        NotImplementedError
            Always.
        """
        raise _needs_schedule("run")

    def reduce(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse, as `run`."""
        raise _needs_schedule("reduce")

    def gather(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse, as `run`."""
        raise _needs_schedule("gather")

    def experimental_distribute_dataset(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse, as `run`; `ClusterCoordinator.create_per_worker_dataset` makes datasets on the workers."""
        raise _needs_schedule("experimental_distribute_dataset")

    def distribute_datasets_from_function(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse, as `experimental_distribute_dataset`."""
        raise _needs_schedule("distribute_datasets_from_function")

    def __reduce__(self) -> tuple[Any, ...]:
        """Stand, in a function that is sent to a worker, for the strategy of that worker."""
        return _strategy_here, (self.client.channel.group.number,)

    def __repr__(self) -> str:
        group = self.client.channel.group
        return f"{type(self).__name__}({len(group.workers)} workers, {len(group.servers)} servers)"

    def _end(self) -> None:
        """Close where the program ends; but not where it ends the job by itself, with an error."""
        if exit_code.ending_code() and settings.ABORT.read():
            self.dispatcher.dismiss()
        else:
            self.close()


def _needs_schedule(method: str) -> NotImplementedError:
    return NotImplementedError(
        f"strategy.{method} was called on the chief, which computes nothing itself: workers do, independently of each other.\n"
        f"    incorrect:  strategy.{method}(…)\n"
        f"    correct:    coordinator.schedule(step, args=(…)), with a ClusterCoordinator(strategy); what step calls may use "
        f"strategy.{method}"
    )


def _strategy_here(group: int) -> Any:
    return here(group).strategy


def _default_resolver() -> ClusterResolver:
    return TFConfigClusterResolver() if os.environ.get("TF_CONFIG", "").strip() else MPIClusterResolver(chief=1, ps=1)
