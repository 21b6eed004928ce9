"""An uncaught exception on one rank, or an exit code that is not 0, ends the whole job, and says why.

Without this a rank that raises waits in MPI_Finalize for the others, which wait for it in their next collective. The hooks
run before the interpreter's exit handlers, and MPI_Abort does not return: MPI_Finalize is never entered. A program that
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
import traceback
from typing import TYPE_CHECKING, Any, NoReturn

from mpistrat.launch import exit_code

if TYPE_CHECKING:
    from types import TracebackType

    from mpi4py import MPI

__all__ = ["end", "format_exception", "install"]

# Where several ranks raise, the traceback of rank 0 is the one to read: the others give it time to end the job. They print
# theirs if it did not, so that no job ends without a word. Where a rank raises because another one has failed, the traceback
# of that one is the one to read, and even rank 0 waits for it.
HEAD_START_SECONDS = 0.5
HEAD_START_SECONDS_RAISED_EVERYWHERE = 2.0
# What a rank prints reaches the terminal through its launcher, which MPI_Abort makes hurry: give the text a start as well.
RELAY_SECONDS = 0.2

INTERRUPTED = 128 + signal.SIGINT


def install(comm: MPI.Intracomm) -> None:
    """Have uncaught exceptions, of the main thread or another, print a traceback with rank and host and end the job.

    An exit with a code that is not 0 ends it too, with this code; Ctrl-C ends it with 130. Nothing is installed in a job of
    one rank: nobody waits for it, and in an interactive session an error does not end anything.

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
    # Another hook of threads is that of a test runner, which collects their exceptions.
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = hooks.on_other_thread


def end(error: BaseException) -> NoReturn:
    """End this process, and with it the job, by an error that comes up when the program has ended already.

    Where this module has installed no hook, the exit handlers that were registered first are not called any more: only so
    can an exit handler still change the exit code.

    Parameters
    ----------
    error : BaseException
        What to tell; the exit code is 1.
    """
    sys.excepthook(type(error), error, error.__traceback__)
    exit_code.flush_output()
    os._exit(1)


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
        self._host = socket.gethostname()

    def on_main_thread(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != self._pid:  # a forked child owns no place in the job
            sys.__excepthook__(kind, error, trace)
        elif isinstance(error, KeyboardInterrupt):
            self._end(INTERRUPTED, f"[{self._label()}] interrupted\n", _head_start(self._comm.rank, error))
        else:
            self._tell_and_end(error, self._label())

    def on_other_thread(self, arguments: threading.ExceptHookArgs) -> None:
        error = arguments.exc_value
        if os.getpid() != self._pid or error is None:
            threading.__excepthook__(arguments)
            return
        label = self._label() + (f", thread {arguments.thread.name}" if arguments.thread else "")
        if not isinstance(error, SystemExit):
            self._tell_and_end(error, label)
        elif code := exit_code.as_exit_code(error.code):
            text = f"[{label}] sys.exit({error.code!r}) in a thread ends the job\n"
            self._end(code, text, _head_start(self._comm.rank, error))

    def on_exit(self) -> None:
        """Have mpi4py abort the job where it would finalize MPI, if the program ends with a code that is not 0."""
        code = exit_code.ending_code()
        if code == 0 or os.getpid() != self._pid:
            return
        from mpi4py import MPI

        exit_code.flush_output()
        time.sleep(RELAY_SECONDS)
        MPI._set_abort_status(code)  # what `python -m mpi4py` does with it

    def _label(self) -> str:
        return f"rank {self._comm.rank} on {self._host}"

    def _tell_and_end(self, error: BaseException, label: str) -> None:
        self._end(1, format_exception(error, label), _head_start(self._comm.rank, error))

    def _end(self, code: int, text: str, head_start_seconds: float) -> None:
        try:
            # The lock is never released: of two threads that raise, one ends the job and the other has no more to say.
            self._lock.acquire()
            time.sleep(head_start_seconds)
            # one write, so that lines of several ranks do not mix
            sys.stderr.write(text)
            sys.stderr.flush()
            time.sleep(RELAY_SECONDS)
        finally:  # whatever happens meanwhile, such as Ctrl-C or a closed stderr
            self._comm.Abort(code)


def _head_start(rank: int, error: BaseException) -> float:
    """Return how long a rank lets others speak and end the job first."""
    seconds = HEAD_START_SECONDS if rank else 0.0
    if getattr(error, "failed_ranks", ()):
        return HEAD_START_SECONDS_RAISED_EVERYWHERE + seconds
    return HEAD_START_SECONDS_RAISED_EVERYWHERE if rank and getattr(error, "raised_everywhere", False) else seconds
