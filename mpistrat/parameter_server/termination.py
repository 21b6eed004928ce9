"""Termination: where the launcher ends the job because a task was killed, a task that is left says which one that was.

Open MPI's launcher sends SIGTERM to the ranks that are left, and kills them a moment later; MPICH's kills them at once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType

from mpistrat.parameter_server.tasks import TaskGroup
from mpistrat.watch.neighbours import Neighbours
from mpistrat.watch.recorder import recorder

__all__ = ["names_the_killed"]

# those that are left look around before any of them ends by itself
_LOOK_SECONDS = 0.2


@contextmanager
def names_the_killed(group: TaskGroup) -> Iterator[None]:
    """Say in this context, when SIGTERM comes, which task of this host was killed; unless the program handles SIGTERM itself.

    Parameters
    ----------
    group : TaskGroup
        The tasks.
    """
    is_ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if is_ours:
        signal.signal(signal.SIGTERM, partial(_end, group))
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end(group: TaskGroup, number: int, frame: FrameType | None) -> None:
    path, mine = recorder().path, group.job_rank
    states = Neighbours(path.parent).states()[0] if path else []
    gone = [state.rank for state in states if state.state == "gone"]
    alive = [state.rank for state in states if state.state in ("in", "out")]
    # of one that is slow to come here the others may be gone by now
    if len(gone) == 1 and mine == min(alive, default=mine) and gone[0] in group.job_ranks:
        name = group.names[group.job_ranks.index(gone[0])]
        os.write(2, f"mpistrat: {name} was killed, and the launcher ends the job\n".encode())
    time.sleep(_LOOK_SECONDS)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
