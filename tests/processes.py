"""What tests do with processes: commands with a deadline, and waiting for what another process does."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpistrat.launch.openmpi import remove_rendezvous_files

TIMED_OUT = 124  # as timeout(1) returns
# before a command: where tests run in the background, a shell has turned Ctrl-C off
TAKES_CTRL_C = ("env", "--default-signal=INT")


def codes_after_loss(own: int) -> set[int]:
    """Return what mpiexec may return after a rank has ended by itself with this code, without MPI_Abort.

    MPICH returns 9, the signal that it sends to the other ranks. Open MPI returns the code of the rank, unless another
    rank is told of the closed socket first and ends the job with MPI_ERR_UNKNOWN, which is 14.
    """
    return {own, 9, 14}


def run_bounded(
    argv: Sequence[str], timeout: float, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command with an empty stdin, and kill all its remaining processes when it ends or its deadline passes.

    After that many seconds its code is TIMED_OUT, with the output until then; `env` is the whole environment.
    """
    pipe = subprocess.PIPE
    with started(argv, stdout=pipe, stderr=pipe, text=True, errors="replace", env=env, cwd=cwd) as process:
        try:
            out, err = process.communicate(timeout=timeout)
            code = process.returncode
        except subprocess.TimeoutExpired:
            kill_session(process.pid)
            out, err = process.communicate()
            code, err = TIMED_OUT, f"{err}\nkilled: still running after {timeout:g} s\n"
    return subprocess.CompletedProcess(list(argv), code, out, err)


def python(program: str, *words: str, options: Sequence[str] = (), **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a program of Python for a minute at most; `options` are the interpreter's, `environ` more variables."""
    return run_bounded([sys.executable, *options, "-c", program, *words], 60.0, {**os.environ, **environ})


def run_mpistrat(*arguments: str, code: int = 0, seconds: float = 180.0) -> subprocess.CompletedProcess[str]:
    """Run a command of mpistrat, which needs much less than these seconds on an idle machine, and check its exit code."""
    done = run_bounded([sys.executable, "-m", "mpistrat", *arguments], seconds)
    assert done.returncode == code, done.stdout + done.stderr
    return done


@contextlib.contextmanager
def started(argv: Sequence[str], **how: Any) -> Iterator[subprocess.Popen[Any]]:
    """Start a command with an empty stdin, and kill all its remaining processes in the end; `how` is for `subprocess.Popen`."""
    with subprocess.Popen(list(argv), stdin=subprocess.DEVNULL, start_new_session=True, **how) as process:
        try:
            yield process
        finally:
            kill_session(process.pid)


def kill_session(leader: int) -> None:
    """Kill every process of a session, which may have ended already."""
    killed = {leader}
    # Not by process group: mpiexec gives each rank its own.
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(int(process.name)) == leader:
                os.kill(int(process.name), signal.SIGKILL)
                killed.add(int(process.name))
    for pid in killed:  # any of them may have been mpiexec
        remove_rendezvous_files(pid, os.environ)


def until(condition: Callable[[], bool], seconds: float, pause: float = 0.01) -> bool:
    """Wait until a condition holds, looked at again after each pause, and return whether it does before the time is up."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return True


def patient(seconds: float) -> float:
    """Return how long to wait for what takes so long at most on an idle machine: longer by how many want each of its cores."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
