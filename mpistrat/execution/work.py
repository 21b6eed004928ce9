"""Work: the handle of an asynchronous collective."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

from mpistrat.execution.engine import Job

T = TypeVar("T")
U = TypeVar("U")


class Work(Generic[T]):
    """The handle of an asynchronous operation, which completes even if the handle is dropped.

    Parameters
    ----------
    job : Job
        The job of the engine.
    finish : callable, optional
        Turns the job's result into that of the handle; by default they are the same.
    """

    def __init__(self, job: Job, finish: Callable[[Any], T] | None = None) -> None:
        self._job = job
        self._finish = finish or (lambda result: cast("T", result))
        self._finished: list[T] = []

    @classmethod
    def ended(cls, result: T) -> Work[T]:
        """Return a handle that has completed with this result."""
        job = Job(lambda: result, lambda: "")
        job.run()
        return cls(job)

    def done(self) -> bool:
        """Return whether the operation has completed.

        If it has failed, every call of `done` and `wait` raises its error.
        """
        if not self._job.has_ended():
            time.sleep(0)  # a polling loop would keep the GIL from the engine
            return False
        self._job.result()
        return True

    def wait(self) -> T:
        """Wait until the operation has completed and return its result.

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
        if not self._finished:
            self._finished.append(self._finish(self._job.result()))
        return self._finished[0]

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        """Have `callback` called once when the operation has ended, well or not; at once if it has. It must not block."""
        self._job.add_done_callback(callback)

    def then(self, finish: Callable[[T], U]) -> Work[U]:
        """Return a handle on the same operation with the result ``finish(result)``; use it in place of this one."""
        before = self._finish
        return Work(self._job, lambda result: finish(before(result)))
