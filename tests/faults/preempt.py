"""Preempt training jobs at random instants: ``python -m tests.faults.preempt --jobs 200``.

A training is told to end again and again, by a signal to one, some or all ranks, often by a second one soon after, in
collectives and between them, in the data pipeline, and while it saves. Each job must save at one step on all ranks and end with
the code within its grace period. The last one ends by itself, with the weights of a training that nobody has disturbed.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from mpistrat import RESTART_EXIT_CODE
from mpistrat.launch.mpiexec import command
from mpistrat.topology.world import World
from tests.processes import patient, started, until

SHAPES = ("2x2", "2x1", "1x2", "3+1")
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_GRACE_SECONDS = 2.0
_LATEST_SECONDS = 0.6  # from when all ranks watch to the signal
_STUCK_SECONDS = 30.0
_JOBS_OF_A_TRAINING = 10

PROGRAM = """
import os, random, sys, time
from pathlib import Path
import numpy as np
import mpistrat
from mpistrat.experimental import PreemptionCheckpointHandler, TerminationConfig

grace, steps = float(sys.argv[1]), int(sys.argv[2])
strategy = mpistrat.MultiWorkerMirroredStrategy()
rank = strategy.extended.communicator.rank
with strategy.scope():
    weights = mpistrat.Variable(np.zeros(1000))
    velocity = np.zeros(1000)
    data = strategy.experimental_distribute_dataset(mpistrat.ArrayDataset(np.arange(230.0), 10, shuffle=True))
    checkpoint = mpistrat.Checkpoint(weights=weights, velocity=velocity, data=data)
    manager = mpistrat.CheckpointManager(checkpoint, "checkpoints", max_to_keep=2)
handler = PreemptionCheckpointHandler(None, manager, None, TerminationConfig(grace_period=grace))
Path(f"watches-{rank}").write_text(str(os.getpid()))
pause = random.Random(rank)

def loaded():
    for batch in data:
        time.sleep(0.002 * pause.random())
        yield batch

def step(batch):  # whole numbers: the order of sums changes nothing
    context = mpistrat.get_replica_context()
    velocity[:] = np.floor(velocity / 2) + context.all_reduce("sum", np.full(1000, batch.sum()))
    context.update(weights, lambda w, v: (w * 3 + v) % 1048573, (velocity,))

try:
    while handler.total_run_calls < steps:
        for batch in loaded():
            handler.run(strategy.run, step, args=(batch,))
            if handler.total_run_calls % 7 == 0:
                manager.save(handler.total_run_calls)
            if handler.total_run_calls == steps:
                break
except SystemExit:
    Path(f"left-{rank}").write_text(f"{time.time()} {handler.total_run_calls}")
    raise
if rank == 0:
    print(steps, int(weights.numpy()[0]), int(velocity[0]))
"""


@dataclass
class Counts:
    """What the jobs were."""

    preempted: int = 0
    finished: int = 0  # before they heard of the signal
    trainings: int = 0
    longest_seconds: float = 0.0  # from the first signal until the last rank left, without a grace period
    least_rest: float = field(default=_GRACE_SECONDS)  # of the grace period, where there was one


def preempt(shape: str, num_jobs: int, seed: int, steps: int = 400, counts: Counts | None = None) -> Iterator[str]:
    """Preempt so many jobs of a shape; yield what was wrong."""
    counts, rng = counts or Counts(), random.Random(f"{seed} {shape}")
    with tempfile.TemporaryDirectory() as name:
        wanted = _Training(shape, Path(name), steps).run_to_end()
    while num_jobs > 0:
        with tempfile.TemporaryDirectory() as name:
            training, begun = _Training(shape, Path(name), steps), counts.preempted
            while counts.preempted < begun + min(num_jobs, _JOBS_OF_A_TRAINING):
                before = counts.preempted
                yield from (f"{shape}, job {before}, seed {seed}: {text}" for text in training.preempt(rng, counts))
                if training.has_ended:
                    break
            got = training.result if training.has_ended else training.run_to_end()
            counts.trainings += 1
            if got != wanted:
                yield f"{shape}, after job {counts.preempted}, seed {seed}: {got!r} instead of {wanted!r}"
            num_jobs -= max(1, counts.preempted - begun)


class _Training:
    """A training in a folder, which is started again and again."""

    def __init__(self, shape: str, folder: Path, steps: int) -> None:
        self._shape, self._size, self._folder, self._steps = shape, World.from_shape(shape).size, folder, steps
        self.result, self.has_ended, self._last = "", False, 0
        (folder / "train.py").write_text(PROGRAM)

    def run_to_end(self) -> str:
        with self._start(0.0) as process:
            self._end(process)
        return self.result

    def preempt(self, rng: random.Random, counts: Counts) -> Iterator[str]:
        """Start it, tell some ranks to end, and yield what was wrong."""
        grace = _GRACE_SECONDS if rng.random() < 0.25 else 0.0
        told = rng.sample(range(self._size), rng.choice([1, 1, rng.randint(1, self._size), self._size]))
        instants = sorted(
            (rng.uniform(0, _LATEST_SECONDS) + (rng.uniform(0, 0.05) if again else 0.0), rank)
            for rank in told
            for again in range(rng.choice([1, 1, 2]))
        )
        with self._start(grace) as process:
            watches = [self._folder / f"watches-{rank}" for rank in range(self._size)]
            if not until(lambda: all(path.exists() and path.read_text() for path in watches), patient(_STUCK_SECONDS)):
                yield f"it has not begun: {self._end(process)}"
                return
            pids, began, first = [int(path.read_text()) for path in watches], time.time(), 0.0
            for instant, rank in instants:
                time.sleep(max(0.0, began + instant - time.time()))
                first = first or time.time()
                try:
                    os.kill(pids[rank], rng.choice(_SIGNALS))
                except ProcessLookupError:  # it has left
                    break
            said = self._end(process)
        left = [path.read_text().split() for path in sorted(self._folder.glob("left-*"))]
        if not left and (process.returncode == 0 or self.result):  # it had done its steps
            counts.finished += 1
            self.has_ended = True
            if process.returncode:
                yield f"it was done, and ended with {process.returncode}: {said}"
            return
        counts.preempted += 1
        if process.returncode != RESTART_EXIT_CODE:
            yield f"it ended with {process.returncode}: {said}"
        steps, last = {int(step) for _, step in left}, max((float(moment) for moment, _ in left), default=0.0)
        if len(left) != self._size or len(steps) != 1:
            yield f"ranks left at {left}: {said}"
            return
        kept = sorted(path.name for path in (self._folder / "checkpoints").iterdir() if (path / "manifest.json").exists())
        if not kept or not kept[-1].startswith(f"ckpt-{max(steps):08d}") or max(steps) < self._last:
            yield f"ranks left at step {steps} after {self._last}, and {kept} are saved"
        if said.count("the job stops after step") != 1 or re.search("Traceback|MPI_ABORT", said):
            yield f"it said {said}"
        self._last, seconds = max(steps), last - first
        if grace:
            counts.least_rest = min(counts.least_rest, grace - seconds)
            if seconds > grace:
                yield f"the last rank left {seconds:.2f} s after the first signal, with a grace period of {grace} s"
        else:
            counts.longest_seconds = max(counts.longest_seconds, seconds)
            if seconds > patient(5.0):
                yield f"the last rank left {seconds:.2f} s after the first signal"

    @contextmanager
    def _start(self, grace: float) -> Iterator[subprocess.Popen[bytes]]:
        for path in [*self._folder.glob("watches-*"), *self._folder.glob("left-*")]:
            path.unlink()
        argv, extra = command(self._size, [sys.executable, "train.py", str(grace), str(self._steps)])
        environ = {**os.environ, **extra, "MPISTRAT_VIRTUAL_NODES": self._shape, "MPISTRAT_DEVICE": "cpu"}
        with (
            (self._folder / "out").open("wb") as out,
            started(argv, stdout=out, stderr=subprocess.STDOUT, env=environ, cwd=self._folder) as process,
        ):
            yield process

    def _end(self, process: subprocess.Popen[bytes]) -> str:
        """Wait for the end of a job, keep its result, and return what it has said."""
        ended = until(lambda: process.poll() is not None, patient(_STUCK_SECONDS))
        said = (self._folder / "out").read_text(errors="replace")
        self.result = next((line for line in said.splitlines() if line.startswith(f"{self._steps} ")), "")
        return said if ended else f"{said}\nIT HANGS"


def main(argv: Sequence[str] | None = None) -> int:
    """Preempt what was asked for; return 1 if something was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.preempt", description="Jobs that are told to end.")
    parser.add_argument("--jobs", type=int, default=20, help="in each shape (default: 20)")
    parser.add_argument("--shape", action="append", help=f"again for more (default: {' '.join(SHAPES)})")
    parser.add_argument("--seed", type=int, default=0)
    arguments, wrong = parser.parse_args(argv), 0
    for shape in arguments.shape or SHAPES:
        counts, began = Counts(), time.monotonic()
        for text in preempt(shape, arguments.jobs, arguments.seed, counts=counts):
            wrong += 1
            print(f"--- {text}", flush=True)
        print(f"{shape}: {counts} in {time.monotonic() - began:.0f} s, {wrong} wrong so far", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
