"""A rank that raises, or is killed, before the first collective: with the defaults the job ends soon and names it.

    python -m tests.gpu.first_fault --report FILE

The others are in that collective by then, and NCCL makes its connections there. The GPU must be free afterwards: this process
looks how much of it is used before and after, and takes most of the rest.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

import mpistrat
from mpistrat.launch.mpiexec import command
from tests.gpu.program import write_report
from tests.processes import TIMED_OUT, run_bounded

FAULTS = ("raise", "kill")
FAULTY, NUM_RANKS = 1, 2
LIMIT_SECONDS = 60.0
FREED_SECONDS = 10.0
SPARED_BYTES = 1 << 30
PLANTED = "planted before the first collective"

_ROOT = Path(__file__).parents[2]
_MIB = 1 << 20


def main() -> dict[str, float]:
    """Let jobs end by each fault; the program is one of their ranks where it is told a fault."""
    before = _used_mib()
    figures = {f"{fault}_seconds": end(fault) for fault in FAULTS}
    figures["mib_left"] = _freed(before)
    _take_the_rest()
    return figures


def end(fault: str, environ: Mapping[str, str] | None = None) -> float:
    """Let a job end by a fault.

    Returns seconds from the fault to the end of the job.
    """
    argv, extra = command(NUM_RANKS, [sys.executable, "-m", "tests.gpu.first_fault", fault])
    done = run_bounded(argv, LIMIT_SECONDS, {**(os.environ if environ is None else environ), **extra}, _ROOT)
    now, said = time.time(), done.stdout + done.stderr
    if done.returncode == TIMED_OUT:
        raise AssertionError(f"{fault}: the job went on for {LIMIT_SECONDS:g} s\n{said}")
    if not done.returncode:
        raise AssertionError(f"{fault}: the job ended as if all had been well\n{said}")
    faults = [line.split()[-1] for line in done.stdout.splitlines() if line.startswith("fault at ")]
    if not faults:
        raise AssertionError(f"{fault}: the job ended before the fault\n{said}")
    named = f"[rank {FAULTY} on " in said and PLANTED in said if fault == "raise" else f"rank {FAULTY}" in said.lower()
    if not named:
        raise AssertionError(f"{fault}: nobody named rank {FAULTY}\n{said}")
    return round(now - float(faults[0]), 1)


def _be_rank(fault: str) -> None:
    strategy = mpistrat.MultiWorkerMirroredStrategy()

    def run() -> None:
        context = mpistrat.get_replica_context()
        array = strategy.array_module.asarray(np.ones(1 << 20, np.float32))
        if context.replica_id_in_sync_group == FAULTY:
            print(f"fault at {time.time()}", flush=True)
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError(PLANTED)
        context.all_reduce("sum", array)

    strategy.run(run)


def _used_mib() -> float:
    from cupy.cuda import runtime

    free, total = runtime.memGetInfo()
    return (total - free) / _MIB


def _freed(before: float) -> float:
    """Return how much more of the GPU is used than before, once that no longer falls."""
    deadline = time.monotonic() + FREED_SECONDS
    while _used_mib() > before and time.monotonic() < deadline:
        time.sleep(0.1)
    return round(_used_mib() - before, 1)


def _take_the_rest() -> None:
    """Allocate what is free, but for a little, and write to it."""
    from cupy.cuda import runtime

    free, _ = runtime.memGetInfo()
    start = runtime.malloc(free - SPARED_BYTES)
    runtime.memset(start, 1, free - SPARED_BYTES)
    runtime.deviceSynchronize()
    runtime.free(start)


if __name__ == "__main__":
    if sys.argv[1] in FAULTS:
        _be_rank(sys.argv[1])
    else:
        write_report(main)
