"""RemoteValue and PerWorkerValues: what a scheduled function will return, and what each worker has of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from mpistrat.parameter_server.client import here
from mpistrat.parameter_server.functions import loads

__all__ = ["PerWorkerValues", "RemoteValue", "RemoteValueStatus", "WorkerResource"]


class RemoteValueStatus(Enum):
    """Whether a value is there."""

    NOT_READY = "NOT_READY"
    ABORTED = "ABORTED"
    READY = "READY"


class RemoteValue:
    """What a scheduled function returns, once it has run. `ClusterCoordinator.schedule` returns one.

    Parameters
    ----------
    wait : callable
        Waits until the function has run, failed or been cancelled.
    """

    def __init__(self, wait: Callable[[RemoteValue], None]) -> None:
        self._wait = wait
        self._status = RemoteValueStatus.NOT_READY
        self._data: bytes | None = None
        self._value: Any = None
        self._error: BaseException | None = None

    @property
    def status(self) -> RemoteValueStatus:
        """Whether the value is there: NOT_READY, READY, or ABORTED where the function failed or was cancelled."""
        return self._status

    def fetch(self) -> Any:
        """Wait for the value, and return it.

        Raises
        ------
        Exception
            The error of the function.
        CancelledError
            If it was cancelled because of another function's error, or because the strategy was closed.
        """
        self._wait(self)
        if self._error is not None:
            raise self._error
        if self._data is not None:
            self._value, self._data = loads(self._data), None
        return self._value

    def get(self) -> Any:
        """Return the same as `fetch`."""
        return self.fetch()

    def set_data(self, data: bytes) -> None:
        """Take the result of the function, as bytes."""
        self._data, self._status = data, RemoteValueStatus.READY

    def abort(self, error: BaseException) -> None:
        """Take the error of the function, or that it was cancelled."""
        self._error, self._status = error, RemoteValueStatus.ABORTED

    def __repr__(self) -> str:
        return f"RemoteValue({self._status.name})"


class PerWorkerValues:
    """One value for each worker: a scheduled function gets, in its place, that of the worker which runs it.

    Parameters
    ----------
    values : sequence
        In the order of the workers.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = tuple(values)

    def on_worker(self, worker: int) -> Any:
        """Return the value of one worker."""
        return self._values[worker]

    def map(self, fn: Callable[[Any], Any]) -> PerWorkerValues:
        """Return what a function makes of each value."""
        return PerWorkerValues([fn(value) for value in self._values])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self._values))})"


class WorkerResource:
    """Stands for what a worker keeps, such as a dataset; where the worker unpacks it, it is that.

    Parameters
    ----------
    group : int
        The number of the group of tasks.
    number : int
        The number of the call that made it.
    made_of : sequence
        What it was made of. Workers keep that as long as it: one that takes the place of a lost one makes it again.
    """

    def __init__(self, group: int, number: int, made_of: Sequence[Any] = ()) -> None:
        self._group, self.number, self._made_of = group, number, made_of

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, (self._group, self.number)


def _unpacked(group: int, number: int) -> Any:
    resources = here(group).resources
    if number not in resources:
        raise RuntimeError("what the function is to work on is not there: making it on this worker has failed")
    return resources[number]
