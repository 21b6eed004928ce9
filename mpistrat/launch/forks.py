"""Forked children of a rank: they are not ranks, and end without affecting the job.

A child has a copy of its parent's MPI in memory, with its connections. If it took part in a collective it would do so in the
parent's place; if it finalized MPI at exit it would tell the launcher that the parent had.
"""

from __future__ import annotations

import atexit
import os

from mpistrat.errors import UnavailableError
from mpistrat.launch import exit_code

__all__ = ["in_child", "refused", "watch"]

in_child = False
"""Whether this process was forked from one in which MPI ran. Read it as `forks.in_child`: it changes after import."""

_rank, _pid = 0, 0


def watch(rank: int) -> None:
    """Mark children that are forked from now on, and make them exit without MPI.

    Parameters
    ----------
    rank : int
        Of this process.
    """
    global _rank, _pid
    _rank, _pid = rank, os.getpid()
    os.register_at_fork(after_in_child=_begin_child)


def refused(call: str) -> UnavailableError:
    """Return the error for a collective call in a forked child.

    Parameters
    ----------
    call : str
        The call, as errors name it.
    """
    return UnavailableError(
        f"process {os.getpid()}: {call} was called in a process that was forked from rank {_rank} (process {_pid}), and which "
        "is not a rank itself; communicate in the process that made the strategy, and only compute or load data in its children"
    )


def _begin_child() -> None:
    global in_child
    if not in_child:
        in_child = True
        # registered last, so called first: the exit handlers of the parent must not run in the child
        atexit.register(_end_child)


def _end_child() -> None:
    exit_code.flush_output()
    os._exit(exit_code.ending_code())
