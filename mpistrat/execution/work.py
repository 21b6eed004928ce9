"""Work: a handle on a collective that has been started."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

from mpistrat.execution.engine import Job

__all__ = ["Work"]

T = TypeVar("T")
U = TypeVar("U")


class Work(Generic[T]):
    """An operation that goes on by itself; it ends even if nobody keeps this handle.

    Parameters
    ----------
    job : Job
        What the engine carries out.
    finish : callable, optional
        Makes the result of what the job returns; by default that is it.
    """

    def __init__(self, job: Job, finish: Callable[[Any], T] | None = None) -> None:
        self._job = job
        self._finish = finish or (lambda result: cast("T", result))
        self._finished: list[T] = []

    @classmethod
    def ended(cls, result: T) -> Work[T]:
        """Return a handle on what has ended already."""
        job = Job(lambda: result, lambda: "")
        job.run()
        return cls(job)

    def done(self) -> bool:
        """Return whether the operation has ended.

        What makes the operation fail is raised here and in `wait`, as often as they are called.
        """
        if not self._job.has_ended():
            time.sleep(0)  # who asks over and over would keep Python's lock from the engine
            return False
        self._job.result()
        return True

    def wait(self) -> T:
        """Wait for the end and return the result.

        Raises
        ------
        DeadlineExceededError
            If the operation had a deadline, which counts from when its turn came, and that passed.
        UnavailableError
            If one that was started before it has failed so that no further collective can be made.
        AgreementError
            On every replica, if replicas started different things.
        """
        self._job.join()
        if not self._finished:
            self._finished.append(self._finish(self._job.result()))
        return self._finished[0]

    def then(self, finish: Callable[[T], U]) -> Work[U]:
        """Return a handle on the same operation whose result is ``finish(result)``; it takes the place of this one."""
        before = self._finish
        return Work(self._job, lambda result: finish(before(result)))
