"""The end of a program: what is done then, in one order: at exit, or in MPI_Finalize where the program calls that.

The exit handlers of the program run before, if they were registered after this module was imported. Python calls no hook for an
uncaught exception on a rank, or for an exit code: `launch.abort` recognises them, and ends the job.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from enum import Enum

from mpistrat.lazy import MPI


class Stage(Enum):
    """What is done one after the other; of a stage, what was registered last is done first."""

    FAIL = "an exit code other than 0 is told to MPI and to the other ranks"
    FINISH = "what goes on in the background is finished"
    COMPARE = "calls are compared that were not yet; ranks make collective calls for the last time"
    REFUSE = "later calls are refused, as MPI ends before the program does"
    MEET = "ranks wait for each other"
    FREE = "what ranks share is freed, once all have met; functions get one that tells whether all ranks say yes"
    CLOSE = "files are written and removed"
    ABORT = "in the place of all these, where this rank ends the job by itself"


_AT_EXIT = (Stage.FAIL, Stage.FINISH, Stage.COMPARE, Stage.MEET, Stage.CLOSE)
_AT_FINALIZE = (Stage.COMPARE, Stage.REFUSE, Stage.MEET)

_calls: dict[Stage, list[Callable[..., object]]] = {stage: [] for stage in Stage}
_keyvals: list[int] = []


def at(stage: Stage, call: Callable[..., object]) -> None:
    """Have a function called at a stage of the end."""
    _calls[stage].append(call)


def forget(stage: Stage, call: Callable[..., object]) -> None:
    """Do not call a function at the end, if it was to be called."""
    if call in _calls[stage]:
        _calls[stage].remove(call)


def watch_finalize() -> None:
    """Take part in MPI_Finalize, where the program calls that.

    Otherwise mpi4py calls it after the interpreter's exit handlers have run, and Python cannot be called any more.
    """
    if not _keyvals:  # MPI deletes the attributes of COMM_SELF before it does anything else
        _keyvals.append(MPI.Comm.Create_keyval(delete_fn=_before_finalize))
        MPI.COMM_SELF.Set_attr(_keyvals[0], None)


def _before_finalize(comm: object, keyval: int, value: object) -> None:
    if keyval in _keyvals:
        run(*_AT_FINALIZE)


def run(*stages: Stage, given: Iterable[object] = ()) -> None:
    """Do what was registered for some stages; FREE and ABORT have callers of their own, the watcher and `launch.abort`."""
    with ExitStack() as stack:  # calls them from the last to the first, each even if another has raised
        for stage in reversed(stages):
            for call in _calls[stage]:
                stack.callback(call, *given)


@atexit.register
def _at_exit() -> None:
    if _keyvals:  # the interpreter is about to shut down: nothing is called at MPI_Finalize any more
        keyval = _keyvals.pop()
        if not MPI.Is_finalized():
            MPI.COMM_SELF.Delete_attr(keyval)
            MPI.Comm.Free_keyval(keyval)
    run(*_AT_EXIT)
