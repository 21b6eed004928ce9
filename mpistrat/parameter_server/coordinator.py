"""ClusterCoordinator: schedules functions of the chief on the workers, with what each worker has of its own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from mpistrat.context.values import checked_args
from mpistrat.errors import InvalidArgumentError
from mpistrat.inputs.input_options import InputContext
from mpistrat.parameter_server.client import current_client
from mpistrat.parameter_server.dispatcher import Dispatcher, RemoteValue, ScheduledCall
from mpistrat.parameter_server.functions import loading_worker, parameters_of, pickled_with_uses, use
from mpistrat.structures import flatten, map_leaves


class PerWorkerValues:
    """One value for each worker: a scheduled function gets, in its place, that of the worker which runs it.

    Parameters
    ----------
    values : sequence
        In the order of the workers.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = tuple(values)

    def __reduce__(self) -> tuple[Any, ...]:
        return _own_value, (self._values,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self._values))})"


def _own_value(values: tuple[Any, ...]) -> Any:
    """Return, where a worker unpickles what it is to run, the value of that worker."""
    worker = loading_worker()
    if worker is None:
        return PerWorkerValues(values)
    value = values[worker]
    return value.find() if isinstance(value, _Kept) else value


class _Kept(NamedTuple):
    """What a worker keeps, as workers refer to it: only its own one can be found."""

    group: int
    call: int

    def find(self) -> Any:
        resources = current_client(self.group).resources
        if self.call not in resources:
            raise RuntimeError("what the function is to work on is not on this worker: the chief has dropped it")
        return resources[self.call]()


class _PerWorkerResource(PerWorkerValues):
    """What workers keep, such as datasets, as the chief refers to it.

    It holds the calls that made it, with what these use: a worker that takes the place of a lost one makes it again.
    """

    def __init__(self, coordinator: ClusterCoordinator, fn: Callable[..., Any], *args: Any) -> None:
        client = coordinator.strategy.client
        workers = range(len(client.channel.workers))  # each of which keeps what it returns
        self._coordinator, self._calls = coordinator, coordinator._submit(fn, (args, {}), workers)
        super().__init__([_Kept(client.channel.number, call.number) for call in self._calls])
        dropped = [call.number for call in self._calls]
        weakref.finalize(self, client.dropped.extend, dropped).atexit = False  # at any moment: only notes it

    def __reduce__(self) -> tuple[Any, ...]:
        use(self)
        return super().__reduce__()


class PerWorkerDataset(_PerWorkerResource):
    """A dataset on each worker. `ClusterCoordinator.create_per_worker_dataset` makes them."""

    def __iter__(self) -> PerWorkerIterator:
        """Return an iterator on each worker, which begins at the beginning."""
        return PerWorkerIterator(self._coordinator, iter, self)


class PerWorkerIterator(_PerWorkerResource):
    """An iterator on each worker: pass it to a scheduled function, which calls ``next`` on it."""

    def __iter__(self) -> PerWorkerIterator:
        return self

    def __next__(self) -> NoReturn:
        raise NotImplementedError(
            "the elements of a per-worker dataset are on the workers.\n"
            "    incorrect:  next(per_worker_iterator)\n"
            "    correct:    coordinator.schedule(step, args=(per_worker_iterator,)), where step calls next(iterator)"
        )


class ClusterCoordinator:
    """Has workers run functions, asynchronously. There is one for each strategy: a second call returns the first one.

    Parameters
    ----------
    strategy : ParameterServerStrategy
        Whose workers it has run functions.
    """

    def __new__(cls, strategy: Any) -> ClusterCoordinator:  # noqa: PYI034 - Self is of Python 3.11
        """Return the coordinator of a strategy."""
        if not isinstance(getattr(strategy, "dispatcher", None), Dispatcher):
            raise InvalidArgumentError(f"a ClusterCoordinator works with a ParameterServerStrategy; got {strategy!r}")
        found: ClusterCoordinator = getattr(strategy, "coordinator", None) or super().__new__(cls)
        strategy.coordinator = found
        return found

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._dispatcher: Dispatcher = strategy.dispatcher

    @property
    def strategy(self) -> Any:
        """The strategy."""
        return self._strategy

    def schedule(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> RemoteValue:
        """Have a worker that is free run a function, and return at once what it will return.

        Functions are not run in the order in which they are scheduled. One is run at least once: twice if a worker is lost
        while it runs it. Arguments are sent each time, as they are now. The function is sent to a worker once, with what it
        refers to, and again where that has changed: pass large arrays as arguments, or keep them in variables.

        Parameters
        ----------
        fn : callable
            What to run, in the scope of the strategy.
        args, kwargs : sequence, mapping
            Its arguments. Values of workers, such as an iterator of a per-worker dataset, are replaced by those of the worker
            that runs it; a `RemoteValue` by its value, for which this waits.

        Raises
        ------
        Exception
            The first error of a function that was scheduled before and that has not been raised yet. Then what was scheduled
            before is cancelled, and this function is not scheduled.
        InvalidArgumentError
            If `args` is neither a list nor a tuple.
        TypeError
            If the function or an argument cannot be pickled.
        RuntimeError
            If the strategy was closed.
        """
        self._dispatcher.check_open("schedule")
        self._dispatcher.pump()
        self._dispatcher.raise_error()
        return self._submit(fn, map_leaves(_fetched, (() if args is None else checked_args(args), dict(kwargs or {}))))[0].value

    def join(self) -> None:
        """Wait until everything that was scheduled has run.

        Raises
        ------
        Exception
            The first error of a function that has not been raised yet; what had not begun then is cancelled. After that the
            coordinator can be used again.
        """
        if not self._dispatcher.is_closed:
            self._dispatcher.wait(self._dispatcher.is_idle, "the scheduled functions")
        self._dispatcher.raise_error()

    def done(self) -> bool:
        """Return whether everything that was scheduled has run; raises as `join`."""
        self._dispatcher.pump()
        self._dispatcher.raise_error()
        return self._dispatcher.is_idle()

    def fetch(self, val: Any) -> Any:
        """Wait for values, and return them.

        Parameters
        ----------
        val : nest
            Each `RemoteValue` in it is replaced by its value, and of a `PerWorkerValues` each of its values.

        Raises
        ------
        Exception
            As `join`; a CancelledError if a value's function was cancelled.
        """
        leaves = [leaf for leaf in flatten(val)[0] if isinstance(leaf, RemoteValue)]
        for leaf in leaves:
            self._dispatcher.wait_for(leaf)
        self._dispatcher.raise_error()
        return map_leaves(_fetched, val)

    def create_per_worker_dataset(self, dataset_or_dataset_fn: Any) -> PerWorkerDataset:
        """Make a dataset on each worker.

        Nothing is split: the function chooses what its worker reads, by the `InputContext` that it gets if it takes one.

        Parameters
        ----------
        dataset_or_dataset_fn : callable or iterable
            A function that each worker calls, and that returns an iterable; or a dataset, which each worker gets whole.

        Returns
        -------
        PerWorkerDataset
            ``iter`` of it is an argument for scheduled functions.
        """
        self._dispatcher.check_open("create_per_worker_dataset")
        given = dataset_or_dataset_fn
        if not callable(given):
            if not hasattr(given, "__iter__"):
                raise TypeError(f"a per-worker dataset is made of a dataset, or of a function that returns one; got {given!r}")
            return PerWorkerDataset(self, _itself, given)
        if not _takes_context(given):
            return PerWorkerDataset(self, given)
        number = len(self._strategy.client.channel.workers)
        return PerWorkerDataset(self, given, PerWorkerValues([InputContext(number, worker, 1) for worker in range(number)]))

    def _submit(self, fn: Callable[..., Any], given: Any, workers: Iterable[int | None] = (None,)) -> list[ScheduledCall]:
        """Have a worker call a function; or some workers, each of which keeps the result."""
        function = self._strategy.client.functions.find(fn)
        arguments = pickled_with_uses(given, f"an argument of function {function.name}")
        calls = []
        for worker in workers:
            calls.append(ScheduledCall(function, arguments, RemoteValue(self._dispatcher.wait_for), worker))
            self._dispatcher.submit(calls[-1])
        return calls

    def __repr__(self) -> str:
        return f"ClusterCoordinator({self._strategy!r})"


def _fetched(leaf: Any) -> Any:
    if type(leaf) is PerWorkerValues:
        return PerWorkerValues([_fetched(value) for value in leaf._values])
    return leaf.fetch() if isinstance(leaf, RemoteValue) else leaf


def _takes_context(fn: Callable[..., Any]) -> bool:
    parameters = parameters_of(fn).values()
    return any(one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) for one in parameters)


def _itself(value: Any) -> Any:
    return value
