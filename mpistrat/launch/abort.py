"""How a rank ends: with its exit code, and with it the whole job if it has an uncaught exception or a non-zero code.

Without this a rank that raises would wait in MPI_Finalize for the others, which wait for it in their next collective. The hooks
run before the interpreter's exit handlers, and MPI_Abort does not return, so MPI_Finalize is never entered. A program that
exits with a code, ``sys.exit(3)``, runs its exit handlers first; then mpi4py aborts the job instead of finalizing MPI.

Where ranks go on when one of them is lost, as Open MPI's ``mpirun --with-ft ulfm`` allows, MPI is neither finalized nor
aborted: MPI_Finalize waits for all ranks, and after a loss it may wait for ever; MPI_Abort of Open MPI 5 may not return there,
may end no other rank, and mpirun may then exit with 0. There a rank that fails tells the others to end by a message.
"""

from __future__ import annotations

import builtins
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mpistrat import ending, settings
from mpistrat.errors import MpistratError
from mpistrat.lazy import MPI
from mpistrat.logger import stderr

if TYPE_CHECKING:
    from types import TracebackType

# If several ranks raise, the traceback of rank 0 is the one to read: the others give it time to print and to end the job, and
# print theirs if it did not, so that no job ends silently. If a rank raises because another one has failed, the traceback of
# the other one is the one to read, and even rank 0 waits for it.
HEAD_START_SECONDS = 0.5
HEAD_START_SECONDS_RAISED_EVERYWHERE = 2.0
# Output of a rank reaches the terminal through its launcher, which may drop it after MPI_Abort: wait until it has been relayed.
RELAY_SECONDS = 0.2
_LISTEN_SECONDS, _TELL_SECONDS = 0.1, 1.0

INTERRUPTED = 128 + signal.SIGINT
RESTART_EXIT_CODE = 42
"""The exit code of a job that has saved its state and wants to be started again; TensorFlow's, too."""

_PACKAGE = Path(__file__).parents[1]
_HINT = "  (frames inside mpistrat are left out; MPISTRAT_TRACEBACK=full shows them)\n"

_original_exit = sys.exit
_codes: list[int] = []
_agreed_code = 0
_ending = threading.Lock()
_survivors: MPI.Intracomm | None = None  # on which ranks tell each other to end, where the job survives the loss of ranks


def install(comm: MPI.Intracomm) -> None:
    """Have an uncaught exception of any thread, or a non-zero exit code, end the job; nothing is sent on its `comm`."""
    if comm.size == 1:  # no other rank waits for it, and in an interactive session an error should not end anything
        return
    hooks = _Hooks(comm)
    ending.at(ending.Stage.FAIL, hooks.on_exit)
    sys.excepthook = hooks.on_main_thread
    # If another hook is installed already, it belongs to a test runner, which collects the exceptions of threads.
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = hooks.on_other_thread


def end(error: BaseException) -> NoReturn:
    """End this process, and with it the job, with code 1, because of an error in an exit handler."""
    sys.excepthook(type(error), error, error.__traceback__)
    # where that has not ended the job: nothing else changes the exit code now, so handlers registered earlier are not called
    leave(1)


def end_job(comm: MPI.Intracomm, code: int, text: str, head_start_seconds: float = 0.0, seconds: float = RELAY_SECONDS) -> None:
    """Say why this rank ends the job, after a head start of others, and end it so many seconds later."""
    try:
        # The lock is never released: if two threads end the job, the first one does and the other stops here.
        _ending.acquire()
        time.sleep(head_start_seconds)
        stderr.say(text)
        time.sleep(seconds)
        ending.run(ending.Stage.ABORT)
    finally:  # even after Ctrl-C or with a closed stderr
        if _survivors is not None:
            _tell(_survivors, code)
            leave(code)
        comm.Abort(code)


def leave(code: int) -> NoReturn:
    """End this process at once, after what it has printed."""
    flush_output()
    os._exit(code)


def survives_losses(environ: Mapping[str, str]) -> bool:
    """Return whether the job of this environment was started so that it survives the loss of ranks."""
    return environ.get("OMPI_MCA_mpi_ft_enable", "").lower() in ("1", "true", "yes", "on")


def end_together(comm: MPI.Intracomm) -> None:
    """Have a rank that fails end all others, by a message with its exit code. A collective call the first time."""
    global _survivors
    if _survivors is None:
        _survivors = comm.Dup()
        threading.Thread(target=_listen, args=(_survivors,), name="mpistrat end of the job", daemon=True).start()


def acknowledge_losses(comm: MPI.Comm) -> set[int]:
    """Return which ranks are lost, and acknowledge it: otherwise nothing can be received from any rank."""
    failed, everybody = comm.Get_failed(), comm.Get_group()
    lost = failed.Translate_ranks(None, everybody)
    comm.Ack_failed(len(lost))
    failed.Free()
    everybody.Free()
    return set(lost)


def watch_exit() -> None:
    """Record from now on the code that the program exits with, for `ending_code`; a second call changes nothing.

    Python calls no hook for an uncaught SystemExit. ``python -m mpi4py``, which `mpistrat run` uses, catches it, and tells
    mpi4py its code. Under plain ``python`` it is recognised if `sys.exit` has raised it.
    """
    if sys.exit is not _original_exit:
        return
    set_abort_status = MPI._set_abort_status

    def record(code: int) -> None:
        if code and code == _agreed_code:
            return
        if code:
            _codes.append(_as_exit_code(code))
        set_abort_status(code)

    MPI._set_abort_status = record  # type: ignore[assignment]
    sys.exit = builtins.exit = builtins.quit = _exit  # type: ignore[assignment]
    main = vars(sys.modules["__main__"])  # a script that says `from sys import exit`
    main.update({name: _exit for name, value in main.items() if value is _original_exit})


def leave_together(code: object) -> None:
    """Record that all ranks of the job are about to call ``sys.exit(code)``, which is no failure: MPI is finalized then."""
    global _agreed_code
    _agreed_code = _as_exit_code(code)


def ending_code() -> int:
    """Return the exit code of the process, once its main program has ended: 0 if it has succeeded, or all leave together."""
    if _codes:
        return 0 if _codes[-1] == _agreed_code else _codes[-1]
    return int(getattr(sys, "last_value", None) is not None)


def flush_output() -> None:
    """Flush stdout and stderr, before an exit in which Python does not do so."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # it is None, or closed
            stream.flush()


def format_exception(error: BaseException, label: str) -> str:
    """Return the traceback of an exception, beginning with the user's script, each line prefixed by ``[label]``."""
    text = traceback.TracebackException(type(error), error, _without_runner(error.__traceback__))
    wants_all = settings.TRACEBACK.read_or_default() == "full"
    is_folded = False if wants_all or _may_be_bug(error, text) else _fold(text)
    chunks, last = list(text.format()), len(list(text.format_exception_only()))
    if is_folded:  # the error stays the last thing to read
        chunks.insert(len(chunks) - last, _HINT)
    return "".join(f"[{label}] {line}\n" for line in "".join(chunks).splitlines())


class _Hooks:
    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._pid = os.getpid()
        self._host = socket.gethostname()

    def on_main_thread(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not self._is_of_job():
            sys.__excepthook__(kind, error, trace)
        elif isinstance(error, KeyboardInterrupt):
            self._end(INTERRUPTED, f"[{self._label()}] interrupted\n", error)
        else:
            self._end(1, format_exception(error, self._label()), error)

    def on_other_thread(self, arguments: threading.ExceptHookArgs) -> None:
        error = arguments.exc_value
        if error is None or not self._is_of_job():
            threading.__excepthook__(arguments)
            return
        label = self._label() + (f", thread {arguments.thread.name}" if arguments.thread else "")
        if not isinstance(error, SystemExit):
            self._end(1, format_exception(error, label), error)
        elif code := _as_exit_code(error.code):
            self._end(code, f"[{label}] sys.exit({error.code!r}) in a thread ends the job\n", error)

    def on_exit(self) -> None:
        """Let mpi4py abort the job instead of finalizing MPI, if the program ends with a non-zero code."""
        code = ending_code()
        if code == 0 or os.getpid() != self._pid:
            return
        flush_output()
        time.sleep(RELAY_SECONDS)
        if _survivors is not None:
            _tell(_survivors, code)
        MPI._set_abort_status(code if _survivors is None else 0)

    def _is_of_job(self) -> bool:
        """Return whether others may wait for this process: not for a forked child, nor for a rank that has finalized MPI."""
        return os.getpid() == self._pid and not MPI.Is_finalized()

    def _label(self) -> str:
        return f"rank {self._comm.rank} on {self._host}"

    def _end(self, code: int, text: str, error: BaseException) -> None:
        end_job(self._comm, code, text, _head_start(self._comm.rank, error))


def _tell(comm: MPI.Intracomm, code: int) -> None:
    told, requests = bytes([code]), list[MPI.Request]()
    for rank in set(range(comm.size)) - {comm.rank}:
        with suppress(MPI.Exception):  # it is lost
            requests.append(comm.Isend(told, rank))
    deadline = time.monotonic() + _TELL_SECONDS
    for request in requests:
        with suppress(MPI.Exception):
            while not request.Test() and time.monotonic() < deadline:
                time.sleep(_TELL_SECONDS / 1000)


def _listen(comm: MPI.Intracomm) -> None:
    """End this rank, whatever it is doing, when another one that fails says so."""
    code = bytearray(1)
    while True:
        try:
            if comm.Iprobe():
                comm.Recv(code)
                break
        except MPI.Exception:
            acknowledge_losses(comm)
        time.sleep(_LISTEN_SECONDS)
    leave(code[0])


def _head_start(rank: int, error: BaseException) -> float:
    """Return how long a rank waits, so that others can print their traceback and end the job first."""
    seconds = HEAD_START_SECONDS if rank else 0.0
    if getattr(error, "failed_ranks", ()):
        return HEAD_START_SECONDS_RAISED_EVERYWHERE + seconds
    return HEAD_START_SECONDS_RAISED_EVERYWHERE if rank and getattr(error, "raised_everywhere", False) else seconds


class _Exit(SystemExit):
    """What ``sys.exit`` raises: uncaught, its code is read by the interpreter, with no Python frame below."""

    @property
    def code(self) -> Any:
        code = super().code
        if sys._getframe().f_back is None:
            _codes.append(_as_exit_code(code))
        return code

    @code.setter
    def code(self, code: Any) -> None:
        vars(SystemExit)["code"].__set__(self, code)


_Exit.__name__ = SystemExit.__name__  # for those who print one that they have caught


def _exit(status: Any = None, /) -> NoReturn:
    """Exit the interpreter by raising SystemExit(status), as the ``sys.exit`` that it replaces does."""
    if isinstance(status, SystemExit):
        raise status
    # threads end silently by a SystemExit, but not by a subclass of it
    kind = _Exit if threading.current_thread() is threading.main_thread() else SystemExit
    raise kind(*status) if isinstance(status, tuple) else kind(status)


def _as_exit_code(code: object) -> int:
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def _without_runner(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_next is not None:
        module = trace.tb_frame.f_globals
        if module.get("__name__") != "runpy" and module.get("__package__") != "mpi4py":
            break
        trace = trace.tb_next
    return trace


def _may_be_bug(error: BaseException, text: traceback.TracebackException) -> bool:
    """Return whether the library did not raise an error by a ``raise`` statement, a TypeError for example."""
    if isinstance(error, MpistratError) or not text.stack:
        return False
    innermost = text.stack[-1]
    return _is_ours(innermost) and not (innermost.line or "").startswith("raise")


def _fold(text: traceback.TracebackException | None) -> bool:
    """Leave out frames of this library, also of causes; return whether there were any."""
    if text is None:
        return False
    others = [frame for frame, next_frame in pairwise([*text.stack, None]) if frame and not _is_ours(frame, next_frame)]
    is_folded = 0 < len(others) < len(text.stack)
    if is_folded:
        text.stack[:] = others
    context = None if text.__suppress_context__ else text.__context__
    if context is not None and context.stack and all(map(_is_ours, context.stack)):  # how the library came to the error
        text.__context__, is_folded = None, True
    causes = [_fold(text.__cause__), _fold(text.__context__)]
    return is_folded or any(causes)


def _is_ours(frame: traceback.FrameSummary, next_frame: traceback.FrameSummary | None = None) -> bool:
    if frame.filename == "<string>" and next_frame is not None:  # what a dataclass generates
        return _is_ours(next_frame)
    path = Path(frame.filename)
    return path.is_relative_to(_PACKAGE) and not path.is_relative_to(_PACKAGE / "tools")
