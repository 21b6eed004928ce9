"""Steps: work that is advanced bit by bit, so that one thread can take part in several operations, each with its deadline.

A generator yields WAITING wherever it would have to wait, and WORKED after each piece of work.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator

from mpistrat.arrays import Array
from mpistrat.errors import DeadlineExceededError

__all__ = ["WAITING", "WORKED", "Steps", "address", "drive", "give_way", "leave_to_peers"]

Steps = Iterator[bool]
WAITING, WORKED = False, True

# a yield that takes longer has let another process run on this core, perhaps beside an idle one: a rank that sleeps is woken
# where there is room, while ranks that only yield to each other may share a core for long
_SHARED_CORE_SECONDS = 20e-6
_SLEEP_SECONDS = 1e-6
_POLLS_PER_CLOCK = 256

_left_to_peers: list[object] = []


def drive(
    steps: Steps,
    what: Callable[[], str],
    timeout_seconds: float = 0.0,
    overdue: Callable[[], DeadlineExceededError] | None = None,
    rest: Callable[[int], None] | None = None,
    look: Callable[[], None] | None = None,
) -> None:
    """Advance `steps` to the end, giving the core away whenever they wait.

    Parameters
    ----------
    steps : iterator
        What to advance.
    what : callable
        Says, for the error, what is being waited for.
    timeout_seconds : float
        Deadline in seconds from now; 0 means none.
    overdue : callable, optional
        Returns the error to raise once the deadline has passed; by default it says what did not end.
    rest : callable, optional
        Called with how often in a row the steps waited before, to give the core away; by default just for a moment.
    look : callable, optional
        Called now and then while the steps wait; it raises if they will not end.

    Raises
    ------
    DeadlineExceededError
        If the deadline passes first.
    """
    give = give_way if rest is None else rest
    polls_per_clock = _POLLS_PER_CLOCK if rest is None else 1
    polls = waits = 0
    deadline = time.monotonic() + timeout_seconds if timeout_seconds else 0.0
    for worked in steps:
        if worked:
            waits = 0
            continue
        give(waits)
        waits += 1
        polls += 1
        if polls % polls_per_clock:
            continue
        try:
            if look is not None:
                look()
            if deadline and time.monotonic() > deadline:
                raise (
                    DeadlineExceededError(f"{what()} did not end within {timeout_seconds:g} s; not all ranks have arrived")
                    if overdue is None
                    else overdue()
                )
        except BaseException:
            if isinstance(steps, Generator):
                steps.close()  # what is cut off here must not go on later
            raise


def give_way(waits: int = 0) -> None:
    """Let another process have the core, however often there was nothing to do; sleep where it is shared."""
    before = time.perf_counter()
    os.sched_yield()
    if time.perf_counter() - before > _SHARED_CORE_SECONDS:
        time.sleep(_SLEEP_SECONDS)


def address(array: Array) -> int:
    """Return where the array's memory begins."""
    return int(array.__array_interface__["data"][0])


def leave_to_peers(memory: object) -> None:
    """Never free what a failed collective worked on: a peer that is late may still read and write it."""
    _left_to_peers.append(memory)
