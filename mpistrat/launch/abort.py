"""An uncaught exception on one rank ends the whole job, and says why.

Without this a rank that raises waits in MPI_Finalize for the others, which wait for it in their next collective. The hooks
run before the interpreter's exit handlers, and MPI_Abort does not return: MPI_Finalize is never entered.

SystemExit reaches no hook of Python's. ``python -m mpi4py script.py``, which is what ``mpistrat run`` starts, sees it, and
aborts the job with its code where that is not zero.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import TracebackType

    from mpi4py import MPI

__all__ = ["format_exception", "install"]

# Where several ranks raise, the traceback of rank 0 is the one to read: the others give it time to end the job. They print
# theirs if it did not, so that no job ends without a word.
HEAD_START_SECONDS = 0.5
HEAD_START_SECONDS_RAISED_EVERYWHERE = 2.0
# What a rank prints reaches the terminal through its launcher, which MPI_Abort makes hurry: give the text a start as well.
RELAY_SECONDS = 0.2

INTERRUPTED = 128 + signal.SIGINT


def install(comm: MPI.Intracomm) -> None:
    """Have uncaught exceptions, of the main thread or another, print a traceback with rank and host and end the job.

    Nothing is installed in a job of one rank: nobody waits for it, and in an interactive session an error is no end.

    Parameters
    ----------
    comm : Intracomm
        COMM_WORLD; nothing is sent on it.
    """
    if comm.size == 1:
        return
    hooks = _Hooks(comm)
    sys.excepthook = hooks.on_main_thread
    # Another hook of threads is that of a test runner, which collects their exceptions.
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = hooks.on_other_thread


def format_exception(error: BaseException, label: str) -> str:
    """Return the traceback of an exception from the user's script on, each line behind ``[label]``."""
    lines = "".join(traceback.format_exception(type(error), error, _without_runner(error.__traceback__))).splitlines()
    return "".join(f"[{label}] {line}\n" for line in lines)


def _without_runner(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_next is not None and _is_runner(trace.tb_frame.f_globals):
        trace = trace.tb_next
    return trace


def _is_runner(module: dict[str, Any]) -> bool:
    return module.get("__name__") == "runpy" or module.get("__package__") == "mpi4py"


class _Hooks:
    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._pid = os.getpid()
        self._lock = threading.Lock()

    def on_main_thread(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != self._pid:  # a forked child owns no place in the job
            sys.__excepthook__(kind, error, trace)
        elif isinstance(error, KeyboardInterrupt):
            self._comm.Abort(INTERRUPTED)
        else:
            self._end(error, "")

    def on_other_thread(self, arguments: threading.ExceptHookArgs) -> None:
        if os.getpid() != self._pid:
            threading.__excepthook__(arguments)
        elif arguments.exc_value is not None and not isinstance(arguments.exc_value, SystemExit):
            self._end(arguments.exc_value, f", thread {arguments.thread.name}" if arguments.thread else "")

    def _end(self, error: BaseException, thread: str) -> None:
        label = f"rank {self._comm.rank} on {socket.gethostname()}{thread}"
        try:
            # The lock is never released: of two threads that raise, one ends the job and the other has no more to say.
            self._lock.acquire()
            if self._comm.rank:
                everywhere = getattr(error, "raised_everywhere", False)
                time.sleep(HEAD_START_SECONDS_RAISED_EVERYWHERE if everywhere else HEAD_START_SECONDS)
            # one write, so that lines of several ranks do not mix
            sys.stderr.write(format_exception(error, label))
            sys.stderr.flush()
            time.sleep(RELAY_SECONDS)
        finally:  # whatever happens meanwhile, such as Ctrl-C or a closed stderr
            self._comm.Abort(1)
