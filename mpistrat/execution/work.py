"""Work: a handle on a collective that has been started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from mpistrat.errors import DeadlineExceededError
from mpistrat.transports.base import WORKED, Steps, drive

__all__ = ["Work"]

T = TypeVar("T")
U = TypeVar("U")


class Work(Generic[T]):
    """A running operation; it advances whenever `done` or `wait` is called.

    Parameters
    ----------
    steps : iterator
        What is left to do.
    result : callable
        Returns the result once the steps are through.
    what : callable
        Says, for an error, what is being waited for.
    timeout_seconds : float
        Deadline of `wait`, in seconds; 0 means none.
    overdue : callable, optional
        Returns the error to raise once the deadline has passed.
    """

    def __init__(
        self,
        steps: Steps,
        result: Callable[[], T],
        what: Callable[[], str],
        timeout_seconds: float = 0.0,
        overdue: Callable[[], DeadlineExceededError] | None = None,
    ) -> None:
        self._steps: Steps | None = steps
        self._result = result
        self._what = what
        self._timeout_seconds = timeout_seconds
        self._overdue = overdue
        self._failure: BaseException | None = None

    def done(self) -> bool:
        """Return whether the operation has ended; advance it as far as it goes without waiting.

        What makes the operation fail is raised here and in `wait`, as often as they are called.
        """
        self._advance(self._walk)
        return self._steps is None

    def wait(self) -> T:
        """Wait for the end and return the result.

        Raises
        ------
        DeadlineExceededError
            If the deadline passes first.
        """
        self._advance(lambda steps: drive(steps, self._what, self._timeout_seconds, self._overdue))
        self._steps = None
        return self._result()

    def then(self, finish: Callable[[T], U]) -> Work[U]:
        """Return a handle on the same operation whose result is ``finish(result)``; it takes the place of this one."""
        steps = iter(()) if self._steps is None else self._steps
        return Work(steps, lambda: finish(self._result()), self._what, self._timeout_seconds, self._overdue)

    def _walk(self, steps: Steps) -> None:
        answer: bool | None = WORKED
        while answer:
            answer = next(steps, None)
        if answer is None:
            self._steps = None

    def _advance(self, how: Callable[[Steps], None]) -> None:
        if self._failure is not None:
            raise self._failure
        if self._steps is None:
            return
        try:
            how(self._steps)
        except BaseException as failure:
            self._failure = failure
            raise
