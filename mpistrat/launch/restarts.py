"""Restarts: a job that has failed is started again, and continues from its last checkpoint, as long as it makes progress.

Progress is a checkpoint of a later step; in a program whose checkpoints all are of step 0, another checkpoint. The rank that
writes checkpoints appends their steps to a file, which is in a folder that this process and that rank share.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from mpistrat import settings
from mpistrat.launch.abort import RESTART_EXIT_CODE
from mpistrat.launch.environment import in_slurm_allocation
from mpistrat.launch.job import Ended
from mpistrat.text import format_elapsed

COUNT, PROGRESS, FIRST_START = "MPISTRAT_RESTART_COUNT", "MPISTRAT_PROGRESS_FILE", "MPISTRAT_FIRST_START"


def note_saved(step: int) -> None:
    """Tell the `mpistrat run` that would start this job again, if any, that the checkpoint of a step is durable."""
    with suppress(KeyError, OSError):  # it cannot be seen from this host
        progress = os.open(os.environ[PROGRESS], os.O_WRONLY | os.O_APPEND)
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
            ended, reason = start({COUNT: str(count), PROGRESS: progress.name, FIRST_START: first_start})
            if ended.code == 0 or ended.was_stopped:
                return ended.code
            # opened anew: NFS shows what other hosts have written
            steps = list(map(int, Path(progress.name).read_text().split()))
            reached = max(steps, default=-1), 0 if any(steps) else len(steps)
            place = (
                f"the last checkpoint is that of step {reached[0]}" if steps else "no checkpoint was saved since it was started"
            )
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
            time.sleep(delay)
    raise AssertionError("a job is started at least once")


@contextmanager
def _exiting_on_signals() -> Iterator[dict[int, int]]:
    """Have signals that end this process between two jobs raise SystemExit, and so leave no file behind; give its codes."""
    ending = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    numbers = [number for number in ending if signal.getsignal(number) == signal.SIG_DFL]
    codes = {int(number): 128 + number for number in numbers}
    for number in numbers:
        signal.signal(number, lambda number, _: sys.exit(codes[number]))
    try:
        yield codes
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
