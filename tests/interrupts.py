"""Interrupts: a signal handler raises KeyboardInterrupt in the midst of what a program does, again and again."""

import signal
import time
from collections.abc import Callable


def interrupted(
    act: Callable[[], object], seconds: float = 1.0, interval: float = 1e-4, caught: type[Exception] | None = None
) -> int:
    """Call `act` for some seconds, in which each call is interrupted once; return how many were, or raised what is `caught`."""
    is_under_way, deadline, count = False, time.monotonic() + seconds, 0

    def interrupt(*_: object) -> None:
        nonlocal is_under_way
        if is_under_way:
            is_under_way = False
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 1e-3, interval)
    try:
        while time.monotonic() < deadline:
            try:
                is_under_way = True
                act()
                is_under_way = False
            except KeyboardInterrupt:
                count += 1
            except Exception as error:
                if caught is None or not isinstance(error, caught):
                    raise
                count += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    return count
