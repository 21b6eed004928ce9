"""Work: a handle on a collective that has been started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from mpistrat.transports.base import Steps, drive

__all__ = ["Work"]

T = TypeVar("T")

_OVER = object()


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
    """

    def __init__(self, steps: Steps, result: Callable[[], T], what: Callable[[], str], timeout_seconds: float = 0.0) -> None:
        self._steps: Steps | None = steps
        self._result = result
        self._what = what
        self._timeout_seconds = timeout_seconds

    def done(self) -> bool:
        """Return whether the operation has ended; advance it as far as it goes without waiting."""
        if self._steps is not None and next(self._steps, _OVER) is _OVER:
            self._steps = None
        return self._steps is None

    def wait(self) -> T:
        """Wait for the end and return the result.

        Raises
        ------
        DeadlineExceededError
            If the deadline passes first.
        """
        if self._steps is not None:
            drive(self._steps, self._what, self._timeout_seconds)
            self._steps = None
        return self._result()
