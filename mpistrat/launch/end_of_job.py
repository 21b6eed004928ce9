"""How a process learns that its job will be ended: by signals of queues and launchers, and by the scheduler's time limit."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

from mpistrat import settings
from mpistrat.launch import environment, process
from mpistrat.launch.restarts import FIRST_START
from mpistrat.logger import logger

ENDING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""What queues and launchers send before they end a job."""
_ANSWER_SECONDS = 20.0  # of SLURM


class Signals:
    """The first of some signals that this process gets, and when. A handler, on the main thread, only notes it."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.first: tuple[int, float] | None = None
        self._pid = os.getpid()
        self._previous: dict[int, Any] = {}
        for number in numbers:
            self._previous[number] = signal.signal(number, self._hear)

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
    limit, first_start = settings.TIME_LIMIT.read(environ), environ.get(FIRST_START)
    used = time.time() - float(first_start) if first_start else _age_seconds()
    own = limit - used if limit else math.inf
    return min(own, _slurm_seconds_left(environ) if environment.in_slurm_allocation(environ) else math.inf)


def _age_seconds() -> float:
    """Return how long this process exists."""
    own = process.find(os.getpid())
    return time.clock_gettime(time.CLOCK_BOOTTIME) - own.started / os.sysconf("SC_CLK_TCK") if own else 0.0


def _slurm_seconds_left(environ: Mapping[str, str]) -> float:
    end = environ.get("SLURM_JOB_END_TIME", "")  # since SLURM 22.05
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
