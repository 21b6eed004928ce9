"""Steps: operations as generators, so that one thread can advance several of them and check deadlines.

A generator yields WAITING where it would have to wait, and WORKED after it has made progress.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator

from mpistrat.errors import DeadlineExceededError

Steps = Iterator[bool]
WAITING, WORKED = False, True

_POLLS_PER_CLOCK = 16  # on a busy machine each may take 20 ms
_LOOK_SECONDS = 1e-3
_POLLS_AT_ONCE = 64


def one_by_one(acts: Iterable[Callable[[], Steps]]) -> Steps:
    """Return the steps of several acts, each of which begins when the one before has ended."""
    for act in acts:
        yield from act()


def drive(
    steps: Steps,
    what: Callable[[], str],
    timeout_seconds: float = 0.0,
    overdue: Callable[[], DeadlineExceededError] | None = None,
    back_off: Callable[[int], None] | None = None,
    check: Callable[[], None] | None = None,
) -> None:
    """Advance `steps` to the end, yielding the core whenever they wait.

    After `timeout_seconds`, unless they are 0, the DeadlineExceededError is raised that `overdue` returns; by default it names
    `what`. At each wait `back_off`, if given, is called with the number of waits in a row before it; now and then `check`,
    which raises if the steps are known not to end.

    By default it never sleeps: where eight ranks shared two cores and slept for a moment after long yields, Linux left single
    ranks out for up to 400 ms, while all others waited for them.
    """
    polls_per_clock = _POLLS_PER_CLOCK if back_off is None else 1
    polls = waits = 0
    now = time.monotonic()
    deadline, look = now + timeout_seconds if timeout_seconds else math.inf, now + _LOOK_SECONDS
    try:
        for worked in steps:
            if worked:
                waits = 0
                continue
            if back_off is None:
                os.sched_yield()
            else:
                back_off(waits)
            waits += 1
            polls += 1
            if polls % polls_per_clock or (now := time.monotonic()) < look:
                continue
            look = now + _LOOK_SECONDS
            if check is not None:
                check()
            if now > deadline:
                raise (
                    DeadlineExceededError(f"{what()} did not end within {timeout_seconds:g} s; not all ranks have arrived")
                    if overdue is None
                    else overdue()
                )
    except BaseException:  # of a signal handler, too
        if isinstance(steps, Generator):
            steps.close()  # runs its cleanup now, and it cannot be resumed
        raise


def ends_soon(steps: Steps) -> bool:
    """Advance steps without arithmetic for a few microseconds; return whether they have come to their end."""
    for _ in range(_POLLS_AT_ONCE):
        if next(steps, None) is None:
            return True
        os.sched_yield()
    return False


def until(has_come: Callable[[], bool]) -> Steps:
    """Return the steps that wait for a message, an event of a GPU, or a peer."""
    while not has_come():
        yield WAITING
