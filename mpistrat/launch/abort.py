"""Abort the whole job, and say why, when one rank has an uncaught exception or exits with a non-zero code.

Without this a rank that raises would wait in MPI_Finalize for the others, which wait for it in their next collective. The hooks
run before the interpreter's exit handlers, and MPI_Abort does not return, so MPI_Finalize is never entered. A program that
exits with a code, ``sys.exit(3)``, runs its exit handlers first; then mpi4py aborts the job instead of finalizing MPI.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, TextIO

from mpistrat.launch import exit_code
from mpistrat.launch.exception_text import format_exception

if TYPE_CHECKING:
    from types import TracebackType

    from mpi4py import MPI

__all__ = ["before_end", "end", "install", "say", "say_on"]

# If several ranks raise, the traceback of rank 0 is the one to read: the others give it time to print and to end the job, and
# print theirs if it did not, so that no job ends silently. If a rank raises because another one has failed, the traceback of
# the other one is the one to read, and even rank 0 waits for it.
HEAD_START_SECONDS = 0.5
HEAD_START_SECONDS_RAISED_EVERYWHERE = 2.0
# Output of a rank reaches the terminal through its launcher, which may drop it after MPI_Abort: wait until it has been relayed.
RELAY_SECONDS = 0.2

INTERRUPTED = 128 + signal.SIGINT

_before_end: list[Callable[[], None]] = []
_stream: TextIO | None = None


def install(comm: MPI.Intracomm) -> None:
    """Install the hooks: an uncaught exception of any thread prints a traceback with rank and host, and ends the job.

    A non-zero exit code ends it too, with this code; Ctrl-C ends it with 130. In a job of one rank nothing is installed: no
    other rank waits for it, and in an interactive session an error should not end anything.

    Parameters
    ----------
    comm : Intracomm
        COMM_WORLD; nothing is sent on it.
    """
    if comm.size == 1:
        return
    hooks = _Hooks(comm)
    atexit.register(hooks.on_exit)
    sys.excepthook = hooks.on_main_thread
    # If another hook is installed already, it belongs to a test runner, which collects the exceptions of threads.
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = hooks.on_other_thread


def end(error: BaseException) -> NoReturn:
    """End this process, and with it the job, because of an error in an exit handler.

    In a job of one rank, exit handlers that were registered earlier are not called any more: Python offers no other way to
    change the exit code at this point.

    Parameters
    ----------
    error : BaseException
        The error to print; the exit code is 1.
    """
    sys.excepthook(type(error), error, error.__traceback__)
    exit_code.flush_output()
    os._exit(1)


def before_end(call: Callable[[], None]) -> None:
    """Have a function called when this rank is about to end the job by itself, because of an exception."""
    _before_end.append(call)


def say_on(stream: TextIO) -> None:
    """Have this rank say why it ends the job on a stream instead of ``sys.stderr``, which may be captured, and lost with it."""
    global _stream
    _stream = stream


def say(text: str) -> None:
    """Write why this rank ends the job, in one call, so that lines of several ranks do not interleave."""
    stream = _stream or sys.stderr
    stream.write(text)
    stream.flush()


class _Hooks:
    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._host = socket.gethostname()

    def on_main_thread(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != self._pid:  # a forked child is not a rank of the job
            sys.__excepthook__(kind, error, trace)
        elif isinstance(error, KeyboardInterrupt):
            self._end(INTERRUPTED, f"[{self._label()}] interrupted\n", _head_start(self._comm.rank, error))
        else:
            self._report_and_end(error, self._label())

    def on_other_thread(self, arguments: threading.ExceptHookArgs) -> None:
        error = arguments.exc_value
        if os.getpid() != self._pid or error is None:
            threading.__excepthook__(arguments)
            return
        label = self._label() + (f", thread {arguments.thread.name}" if arguments.thread else "")
        if not isinstance(error, SystemExit):
            self._report_and_end(error, label)
        elif code := exit_code.as_exit_code(error.code):
            text = f"[{label}] sys.exit({error.code!r}) in a thread ends the job\n"
            self._end(code, text, _head_start(self._comm.rank, error))

    def on_exit(self) -> None:
        """Let mpi4py abort the job instead of finalizing MPI, if the program ends with a non-zero code."""
        code = exit_code.ending_code()
        if code == 0 or os.getpid() != self._pid:
            return
        from mpi4py import MPI

        exit_code.flush_output()
        time.sleep(RELAY_SECONDS)
        MPI._set_abort_status(code)  # as `python -m mpi4py` does

    def _label(self) -> str:
        return f"rank {self._comm.rank} on {self._host}"

    def _report_and_end(self, error: BaseException, label: str) -> None:
        self._end(1, format_exception(error, label), _head_start(self._comm.rank, error))

    def _end(self, code: int, text: str, head_start_seconds: float) -> None:
        try:
            # The lock is never released: if two threads raise, the first one ends the job and the other stops here.
            self._lock.acquire()
            time.sleep(head_start_seconds)
            say(text)
            time.sleep(RELAY_SECONDS)
            for call in _before_end:
                call()
        finally:  # even after Ctrl-C or with a closed stderr
            self._comm.Abort(code)


def _head_start(rank: int, error: BaseException) -> float:
    """Return how long a rank waits, so that others can print their traceback and end the job first."""
    seconds = HEAD_START_SECONDS if rank else 0.0
    if getattr(error, "failed_ranks", ()):
        return HEAD_START_SECONDS_RAISED_EVERYWHERE + seconds
    return HEAD_START_SECONDS_RAISED_EVERYWHERE if rank and getattr(error, "raised_everywhere", False) else seconds
