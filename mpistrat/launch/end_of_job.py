"""How a process learns that its job will be ended, and how a job that has failed is started again.

Queues and launchers send signals, and a scheduler has a time limit. A job that is started again continues from its last
checkpoint, as long as it makes progress: a checkpoint of a later step, or where all are of step 0 another one. The rank that
writes checkpoints appends their steps to a file, in a folder that it shares with `mpistrat run`.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpistrat import settings
from mpistrat.launch import environment, process
from mpistrat.launch.abort import RESTART_EXIT_CODE
from mpistrat.launch.environment import in_slurm_allocation
from mpistrat.logger import logger
from mpistrat.text import format_elapsed

if TYPE_CHECKING:
    from mpistrat.launch.mpiexec import Ended

ENDING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""What queues and launchers send before they end a job."""
_ANSWER_SECONDS = 20.0  # of SLURM
# a signal that comes between the interpreter's last look for one and the sleep does not interrupt the sleep
_NAP_SECONDS = 0.5


class Signals:
    """Handles some signals, on the main thread: by default it only notes the first one that comes, and when."""

    def __init__(self, numbers: Sequence[int], handler: Callable[[int, object], object] | None = None) -> None:
        self.first: tuple[int, float] | None = None
        self._pid = os.getpid()
        self._previous: dict[int, Any] = {}
        for number in numbers:
            self._previous[number] = signal.signal(number, handler or self._hear)

    def ignore(self) -> None:
        """Ignore them from now on: while the program ends, the interpreter would let them kill the process."""
        for number in self._previous:
            signal.signal(number, signal.SIG_IGN)

    def restore(self) -> None:
        """Handle them as before."""
        while self._previous:
            number, previous = self._previous.popitem()
            signal.signal(number, signal.SIG_DFL if previous is None else previous)  # None: it was not set by Python

    def _hear(self, number: int, frame: object) -> None:
        if os.getpid() != self._pid:  # a forked child, which somebody waits for after Process.terminate
            self.restore()
            signal.raise_signal(number)
        elif self.first is None:
            self.first = number, time.monotonic()


def seconds_left(environ: Mapping[str, str]) -> float:
    """Return the seconds until this job is ended; infinity if there is no limit. It may ask SLURM: one rank calls it once."""
    limit, first_start = settings.TIME_LIMIT.read(environ), environ.get(settings.FIRST_START)
    used = time.time() - float(first_start) if first_start else _age_seconds()
    own = limit - used if limit else math.inf
    return min(own, _slurm_seconds_left(environ) if environment.in_slurm_allocation(environ) else math.inf)


def _age_seconds() -> float:
    """Return how long this process exists."""
    own = process.find(os.getpid())
    return time.clock_gettime(time.CLOCK_BOOTTIME) - own.started / os.sysconf("SC_CLK_TCK") if own else 0.0


def _slurm_seconds_left(environ: Mapping[str, str]) -> float:
    end = environ.get("SLURM_JOB_END_TIME", "")  # SLURM 22.05.8 does not set it
    if end.isdecimal() and int(end):
        return int(end) - time.time()
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array and task else environ["SLURM_JOB_ID"]
    command = ["squeue", "--noheader", "--format=%L", f"--jobs={job}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning(f"when SLURM ends job {job} is not known, as squeue does not tell ({error}): MPISTRAT_TIME_LIMIT can")
        return math.inf
    left = math.inf
    for answer in done.stdout.split() or ["nothing"]:  # one for each part of a heterogeneous job
        try:
            left = min(left, settings.parse_duration(answer))
        except ValueError:
            if answer not in ("UNLIMITED", "NOT_SET"):
                logger.warning(f"when SLURM ends job {job} is not known, as squeue says {answer}: MPISTRAT_TIME_LIMIT can tell")
    return left


def note_saved(step: int) -> None:
    """Tell the `mpistrat run` that would start this job again, if any, that the checkpoint of a step is durable."""
    with suppress(KeyError, OSError):  # it cannot be seen from this host
        progress = os.open(os.environ[settings.PROGRESS_FILE], os.O_WRONLY | os.O_APPEND)
        try:
            os.write(progress, f"{step}\n".encode())
        finally:
            os.close(progress)


def run_again(
    start: Callable[[Mapping[str, str]], tuple[Ended, str]],
    most: int,
    delay: float,
    shared: Path | None,
    say: Callable[[str], None],
) -> int:
    """Start a job by `start`, and again up to `most` times when it fails; return the last exit code.

    Of several hosts, all share the folder `shared`.
    """
    failed_at: tuple[int, int] | None = None
    has_limit, first_start = bool(settings.TIME_LIMIT.read()), str(time.time())
    with _exiting_on_signals() as exit_codes, tempfile.NamedTemporaryFile(prefix="mpistrat-progress-", dir=shared) as progress:
        for count in range(most + 1):
            told = {settings.RESTART_COUNT: str(count), settings.PROGRESS_FILE: progress.name}
            ended, reason = start({**told, settings.FIRST_START: first_start})
            if ended.code == 0 or ended.was_stopped:
                return ended.code
            # opened anew: NFS shows what other hosts have written
            steps = list(map(int, Path(progress.name).read_text().split()))
            reached = max(steps, default=-1), 0 if any(steps) else len(steps)
            place = f"the last checkpoint is that of step {reached[0]}" if steps else "no checkpoint was saved since it started"
            # who sends them starts it again, if that makes sense
            exit_codes[signal.SIGUSR1] = exit_codes[signal.SIGUSR2] = RESTART_EXIT_CODE if steps else ended.code
            if ended.code == RESTART_EXIT_CODE:
                if ended.signals or has_limit or in_slurm_allocation(os.environ):
                    return ended.code  # this process is told to end, or its time is over: its caller starts it again
            elif reached == failed_at:
                say(f"not started again, because it failed twice without progress: {reason}; {place}")
                return ended.code
            else:
                failed_at = reached
            if count == most:
                say(f"not started again, because that was done {most} times: {reason}; {place}")
                return ended.code
            wait = f" in {format_elapsed(delay)}" if delay else ""
            say(f"restart {count + 1} of {most}{wait}: {reason}; {place}")
            again_at = time.monotonic() + delay
            while (left := again_at - time.monotonic()) > 0:
                time.sleep(min(left, _NAP_SECONDS))
    raise AssertionError("a job is started at least once")


@contextmanager
def _exiting_on_signals() -> Iterator[dict[int, int]]:
    """Have signals that end this process between two jobs raise SystemExit, and so leave no file behind; give its codes."""
    ending = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    numbers = [number for number in ending if signal.getsignal(number) == signal.SIG_DFL]
    codes = {int(number): 128 + number for number in numbers}
    signals = Signals(numbers, lambda number, _: sys.exit(codes[number]))
    try:
        yield codes
    finally:
        signals.restore()
