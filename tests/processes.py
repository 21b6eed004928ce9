"""What tests do with processes: commands that must end, and waiting for what another process does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from mpistrat.testing.processes import TIMED_OUT, kill_session, run_bounded

__all__ = ["TIMED_OUT", "kill_session", "patient", "run_bounded", "until"]


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until a condition holds, and return whether it does before the time is up."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def patient(seconds: float) -> float:
    """Return how long to wait for what takes so long at most on an idle machine: longer by how many want each of its cores."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
