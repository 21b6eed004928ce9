"""Work: the handle of an asynchronous collective."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar, cast

from mpistrat.execution.engine import Job

T = TypeVar("T")
U = TypeVar("U")


class End(Protocol):
    """The end of what a job has enqueued on a GPU."""

    def done(self) -> bool:
        """Return whether the GPU has come to it."""

    def wait(self, host: bool) -> None:
        """Let the host wait for it, or only the current stream."""


class Work(Generic[T]):
    """The handle of an asynchronous operation, which completes even if the handle is dropped.

    Parameters
    ----------
    job : Job
        The job of the engine.
    finish : callable, optional
        Turns the job's result into that of the handle; by default they are the same.
    end : End, optional
        The end on the GPU of a job that ends when its work has been enqueued.
    """

    def __init__(self, job: Job, finish: Callable[[Any], T] | None = None, end: End | None = None) -> None:
        self._job, self._end = job, end
        self._finish = finish or (lambda result: cast("T", result))
        self._finished: list[T] = []

    @classmethod
    def ended(cls, result: T, end: End | None = None) -> Work[T]:
        """Return a handle that has completed with this result, or will where a GPU comes to its `end`."""
        job = Job(lambda: result, lambda: "")
        job.run()
        return cls(job, end=end)

    def done(self) -> bool:
        """Return whether the operation has completed.

        If it has failed, every call of `done` and `wait` raises its error.
        """
        if not self._job.has_ended():
            time.sleep(0)  # a polling loop would keep the GIL from the engine
            return False
        self._job.result()
        return self._end is None or self._end.done()

    def wait(self, *, host: bool = False) -> T:
        """Wait until the operation has completed and return its result.

        On a GPU where NCCL joins all ranks, the current stream waits, and the program goes on: work enqueued there afterwards
        sees the result. With `host` the program waits too.

        Raises
        ------
        DeadlineExceededError
            If its deadline, which counts from its beginning, has passed.
        UnavailableError
            If an operation started earlier has failed, so that no further collective can be made.
        AgreementError
            On every replica, if replicas started different operations.
        """
        self._job.join()
        result = self._job.result()
        if self._end is not None:
            self._end.wait(host)
        if not self._finished:
            self._finished.append(self._finish(result))
        return self._finished[0]

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        """Have `callback` called once when the operation has ended, well or not; at once if it has. It must not block.

        What has been enqueued on a GPU has ended in this sense.
        """
        self._job.add_done_callback(callback)

    def then(self, finish: Callable[[T], U]) -> Work[U]:
        """Return a handle on the same operation with the result ``finish(result)``; use it in place of this one."""
        before = self._finish
        return Work(self._job, lambda result: finish(before(result)), self._end)
