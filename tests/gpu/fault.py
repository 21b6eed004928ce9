"""A rank that raises, is killed, or stops, at the first collective or later: the job ends soon, and says whom it was for.

NCCL makes its connections in the first collective, which the faulty rank does not enter. It has entered a later one, if calls
only enqueue: the other rank reads the result, and so waits for what the GPU of the faulty one never does. The GPU must be free
afterwards: this process looks how much of it is used before and after, and takes most of the rest.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

import mpistrat
from mpistrat.arrays import to_host
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.launch.mpiexec import command
from tests.gpu.program import write_report
from tests.gpu.streams import DELAY
from tests.processes import TIMED_OUT, patient, run_bounded

FAULTS = {"first": ("raise", "kill"), "late": ("raise", "kill", "stop")}
FAULTY, NUM_RANKS = 1, 2
CALLS_BEFORE = {"first": 0, "late": 3}
LIMIT_SECONDS, DELAY_SECONDS = 30.0, 40.0
DEADLINE_SECONDS = 3.0  # without one nobody misses a rank that has stopped
READ_SECONDS = 0.5  # in which the other rank comes to wait for its result
FREED_SECONDS = 10.0
SPARED_BYTES = 1 << 30
PLANTED = "planted before a collective has ended"
READ_ON = "read what nobody has computed"

_PROGRAM = ("-m", "tests.gpu.fault")


def main(when: str) -> dict[str, float]:
    before, figures = _used_mib(), {}
    for fault in FAULTS[when]:
        figures |= end(fault, when)
    figures["mib_left"] = _freed(before)
    _take_the_rest()
    return figures


def end(fault: str, when: str, environ: Mapping[str, str] | None = None, program: Sequence[str] = _PROGRAM) -> dict[str, float]:
    """Let a job end by a fault.

    Returns ``<fault>_seconds``, from the fault to the end of the job, and ``<fault>_read_on``: how many ranks went on with the
    result of the collective that never ended.
    """
    argv, extra = command(NUM_RANKS, [sys.executable, *program, fault, when])
    limit = patient(LIMIT_SECONDS)
    done = run_bounded(argv, limit, {**(os.environ if environ is None else environ), **extra}, Path(__file__).parents[2])
    now, said = time.time(), done.stdout + done.stderr
    if done.returncode == TIMED_OUT:
        raise AssertionError(f"{fault}: the job went on for {limit:g} s\n{said}")
    if not done.returncode:
        raise AssertionError(f"{fault}: the job ended as if all had been well\n{said}")
    faults = [line.split()[-1] for line in done.stdout.splitlines() if line.startswith("fault at ")]
    if not faults:
        raise AssertionError(f"{fault}: the job ended before the fault\n{said}")
    named = {
        "raise": f"[rank {FAULTY} on " in said and PLANTED in said,
        "kill": f"rank {FAULTY}" in said.lower(),
        "stop": "DeadlineExceededError" in said,
    }
    if not named[fault]:
        raise AssertionError(f"{fault}: nobody named rank {FAULTY}, or what it did\n{said}")
    return {f"{fault}_seconds": round(now - float(faults[0]), 1), f"{fault}_read_on": said.count(READ_ON)}


def be_rank(fault: str, when: str, delay: Callable[[], None]) -> None:
    """Be a rank of a job; `delay` keeps busy the stream of the faulty one. A collective call."""
    strategy = mpistrat.MultiWorkerMirroredStrategy()

    def run() -> None:
        context = mpistrat.get_replica_context()
        array = strategy.array_module.asarray(np.ones(1 << 20, np.float32))
        for _ in range(CALLS_BEFORE[when]):
            to_host(context.all_reduce("sum", array))
        options = CommunicationOptions(timeout_seconds=patient(DEADLINE_SECONDS) if fault == "stop" else None)
        if context.replica_id_in_sync_group != FAULTY:
            to_host(context.all_reduce("sum", array, options))
            print(READ_ON, flush=True)
            time.sleep(DELAY_SECONDS)
        if when == "late" and strategy.communicator.path.startswith("nccl"):  # calls only enqueue
            delay()
            context.all_reduce("sum", array, options)
            time.sleep(READ_SECONDS)
        print(f"fault at {time.time()}", flush=True)
        if fault == "raise":
            raise ValueError(PLANTED)
        os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)

    strategy.run(run)


def _delay() -> None:
    import cupy

    cupy.RawKernel(DELAY, "delay")((1,), (1,), (np.uint64(DELAY_SECONDS * 1e9),))


def _used_mib() -> float:
    from cupy.cuda import runtime

    free, total = runtime.memGetInfo()
    return (total - free) / (1 << 20)


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
    if "--report" in sys.argv:
        write_report(main)
    else:
        be_rank(*sys.argv[1:], delay=_delay)
