"""Steps: operations as generators, so that one thread can advance several of them and check deadlines.

A generator yields WAITING where it would have to wait, and WORKED after it has made progress.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator

from mpistrat.arrays import Array
from mpistrat.device.abstract import Event
from mpistrat.errors import DeadlineExceededError

__all__ = ["WAITING", "WORKED", "Steps", "address", "drive", "until", "yield_core"]

Steps = Iterator[bool]
WAITING, WORKED = False, True

# a longer sched_yield has let another process run on this core, perhaps while another core is idle: the scheduler moves a rank
# that sleeps to an idle core, while ranks that only yield to each other may share one for long
_SHARED_CORE_SECONDS = 20e-6
_SLEEP_SECONDS = 1e-6
_POLLS_PER_CLOCK = 256


def drive(
    steps: Steps,
    what: Callable[[], str],
    timeout_seconds: float = 0.0,
    overdue: Callable[[], DeadlineExceededError] | None = None,
    back_off: Callable[[int], None] | None = None,
    check: Callable[[], None] | None = None,
) -> None:
    """Advance `steps` to the end, yielding the core whenever they wait.

    Parameters
    ----------
    steps : iterator
        The operation.
    what : callable
        Returns a description of the operation, for the error.
    timeout_seconds : float
        Deadline in seconds from now; 0 means none.
    overdue : callable, optional
        Returns the error to raise when the deadline has passed; by default it names the operation.
    back_off : callable, optional
        Called at each wait with the number of waits in a row before it; by default `yield_core`.
    check : callable, optional
        Called now and then while the steps wait; raises if they are known not to end.

    Raises
    ------
    DeadlineExceededError
        If the deadline passes first.
    """
    wait = yield_core if back_off is None else back_off
    polls_per_clock = _POLLS_PER_CLOCK if back_off is None else 1
    polls = waits = 0
    deadline = time.monotonic() + timeout_seconds if timeout_seconds else 0.0
    for worked in steps:
        if worked:
            waits = 0
            continue
        wait(waits)
        waits += 1
        polls += 1
        if polls % polls_per_clock:
            continue
        try:
            if check is not None:
                check()
            if deadline and time.monotonic() > deadline:
                raise (
                    DeadlineExceededError(f"{what()} did not end within {timeout_seconds:g} s; not all ranks have arrived")
                    if overdue is None
                    else overdue()
                )
        except BaseException:
            if isinstance(steps, Generator):
                steps.close()  # runs its cleanup now, and it cannot be resumed
            raise


def until(event: Event) -> Steps:
    """Return the steps that wait for an event of a GPU."""
    while not event.done():
        yield WAITING


def yield_core(waits: int = 0) -> None:
    """Yield the core to another process; sleep for a moment if one was waiting for it."""
    before = time.perf_counter()
    os.sched_yield()
    if time.perf_counter() - before > _SHARED_CORE_SECONDS:
        time.sleep(_SLEEP_SECONDS)


def address(array: Array) -> int:
    """Return the address of an array's first element."""
    return int(array.__array_interface__["data"][0])
