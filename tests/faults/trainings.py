"""Trainings that are disturbed at random instants, in collectives and between them, in the data pipeline, and while they save.

``python -m tests.faults.trainings preempt --jobs 50``: signals tell one, some or all ranks to end, often twice. Each job must
save at one step on all ranks and end with the code within its grace period; it is started again, until it ends by itself.
``python -m tests.faults.trainings kill --jobs 50``: ranks are killed, and `mpistrat run --max-restarts` starts the job again.
Both must end with the weights of a training that nobody has disturbed: whole numbers, which are the same on any ranks.
"""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from mpistrat import RESTART_EXIT_CODE
from mpistrat.checkpoint.files import find_checkpoints, place_of
from mpistrat.launch.mpiexec import command
from mpistrat.topology.world import World
from tests.faults.jobs import MPISTRAT_RUN, PYTHON, running, said
from tests.processes import patient, run_bounded, until

SHAPES = ("2x2", "2x1", "1x2", "3+1")
_TELLING, _KILLING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2), (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV)
_GRACE_SECONDS = 2.0
_LATEST_SECONDS = 0.6  # from when all ranks train to what disturbs them
_BEGIN_SECONDS = 2.0  # which a job takes until then, about
_STUCK_SECONDS = 30.0
_MOST_KILLS, _MOST_OF_A_TRAINING = 3, 10  # in a job; jobs

# Its arguments are how many steps it takes, and a grace period if it watches for signals. A fault comes between step and save.
PROGRAM = """
import functools, os, random, signal, sys, time
from pathlib import Path
import numpy as np
import mpistrat
from mpistrat.experimental import PreemptionCheckpointHandler, TerminationConfig

steps, grace = int(sys.argv[1]), [float(seconds) for seconds in sys.argv[2:]]
strategy = mpistrat.MultiWorkerMirroredStrategy()
rank, attempt = strategy.rank, int(os.environ.get("MPISTRAT_RESTART_COUNT", 0))
with strategy.scope():
    weights, state = mpistrat.Variable(np.zeros(1000)), {"step": 0, "velocity": np.zeros(1000)}
    data = strategy.experimental_distribute_dataset(mpistrat.ArrayDataset(np.arange(230.0), 10, shuffle=True))
    checkpoint = mpistrat.Checkpoint(weights=weights, data=data, state=state)
    manager = mpistrat.CheckpointManager(checkpoint, "saved", max_to_keep=2)
take = strategy.run
if grace:
    handler = PreemptionCheckpointHandler(None, manager, None, TerminationConfig(grace_period=grace[0]))
    take = functools.partial(handler.run, strategy.run)
else:
    manager.restore()
Path(f"trains-{rank}").write_text(str(os.getpid()))
if rank == 0:
    print("attempt", attempt, "begins at step", state["step"], flush=True)
pause = random.Random(rank)

def loaded():
    for batch in data:
        time.sleep(0.002 * pause.random())
        yield batch

def step(batch):
    context = mpistrat.get_replica_context()
    state["velocity"] //= 2
    state["velocity"] += context.all_reduce("sum", np.full(1000, batch.sum()))
    context.update(weights, lambda w, v: (w * 3 + v) % 1048573, (state["velocity"],))
    state["step"] += 1

try:
    while state["step"] < steps:
        for batch in loaded():
            take(step, args=(batch,))
            pass  # the fault
            if state["step"] % 7 == 0:
                manager.save(state["step"])
            if state["step"] == steps:
                break
    manager.close()
except SystemExit:
    Path(f"left-{rank}").write_text(f"{time.time()} {state['step']}")
    raise
if rank == 0:
    print("trained", steps, int(weights.numpy().sum()), int(state["velocity"].sum()))
"""


@dataclass
class Training:
    """A training in an empty folder, which may be started again and again."""

    folder: Path
    shape: str = "1x1"
    steps: int = 400
    fault: str = "pass"
    counts: Counter[str] = field(default_factory=Counter)  # of what was done
    last: int = 0  # the step at which it was preempted

    def __post_init__(self) -> None:
        self.size = World.from_shape(self.shape).size
        (self.folder / "train.py").write_text(PROGRAM.replace("pass  # the fault", self.fault))

    def started(self, grace: float) -> AbstractContextManager[subprocess.Popen[bytes]]:
        program = [*PYTHON, "train.py", str(self.steps), str(grace)]
        return running(*command(self.size, program, self.shape), self._emptied())

    def restarted(self, restarts: int, **environ: str) -> AbstractContextManager[subprocess.Popen[bytes]]:
        """Start it by `mpistrat run`, which starts it again as often as that."""
        argv = [*MPISTRAT_RUN, "--nodes", self.shape, "--max-restarts", str(restarts), "--restart-delay", "0", "train.py"]
        return running([*argv, str(self.steps)], environ, self._emptied())

    def result(self) -> str:
        """Return what the training has come to; an empty text before its end."""
        return _result(said(self.folder, "out"))

    def restarts(self) -> list[str]:
        """Return what `mpistrat run` has said of restarts."""
        return re.findall(r"^mpistrat run: ((?:not started again|restart \d).*)$", said(self.folder, "err"), re.MULTILINE)

    def saved(self) -> list[int]:
        return [place_of(path)[0] for path in find_checkpoints(self.folder / "saved")]

    def preempt(self, rng: random.Random) -> Iterator[str]:
        """Start it, tell some ranks to end, and yield what was wrong."""
        grace = _GRACE_SECONDS if rng.random() < 0.25 else 0.0
        told = rng.sample(range(self.size), rng.choice([1, 1, rng.randint(1, self.size), self.size]))
        instants = sorted(
            (rng.uniform(0, _LATEST_SECONDS) + (rng.uniform(0, 0.05) if again else 0.0), rank)
            for rank in told
            for again in range(rng.choice([1, 1, 2]))
        )
        with self.started(grace) as process:
            pids = self._trains()
            if not pids:
                yield f"it has not begun: {said(self.folder)}"
                return
            began, first = time.time(), 0.0
            for instant, rank in instants:
                time.sleep(max(0.0, began + instant - time.time()))
                first = first or time.time()
                try:
                    os.kill(pids[rank], rng.choice(_TELLING))
                except ProcessLookupError:  # it has left
                    break
            if not _has_ended(process):
                yield f"it hangs: {said(self.folder)}"
                return
        left = [path.read_text().split() for path in sorted(self.folder.glob("left-*"))]
        if not left and (process.returncode == 0 or self.result()):  # it had done its steps
            self.counts["done before they heard of it"] += 1
            if process.returncode:
                yield f"it was done, and ended with {process.returncode}: {said(self.folder)}"
            return
        self.counts["preempted"] += 1
        if process.returncode != RESTART_EXIT_CODE:
            yield f"it ended with {process.returncode}: {said(self.folder)}"
        steps, end = {int(step) for _, step in left}, max((float(moment) for moment, _ in left), default=0.0)
        if len(left) != self.size or len(steps) != 1:
            yield f"ranks left at {left}: {said(self.folder)}"
            return
        [step] = steps
        if not self.saved() or self.saved()[-1] != step or step < self.last:
            yield f"ranks left at step {step} after {self.last}, and {self.saved()} are saved"
        if said(self.folder).count("the job stops after step") != 1 or re.search("Traceback|MPI_ABORT", said(self.folder)):
            yield f"it said {said(self.folder)}"
        if end - first > (grace or patient(5.0)):
            yield f"the last rank left {end - first:.2f} s after the first signal, with a grace period of {grace} s"
        self.last = step

    def kill(self, rng: random.Random) -> Iterator[str]:
        """Start it, kill ranks, and yield what was wrong.

        The first kill is at any instant, later ones after another checkpoint: two without progress between them would end it.
        """
        with self.restarted(9) as process:
            for kills in range(rng.randint(1, _MOST_KILLS)):
                if kills:
                    self._wait_for_progress(process, kills)
                time.sleep(rng.uniform(0, _LATEST_SECONDS + (0 if kills else _BEGIN_SECONDS)))
                ranks = _ranks(self.folder)
                if process.poll() is not None or not ranks:
                    break
                os.kill(rng.choice(ranks), rng.choice(_KILLING))
                self.counts["kills"] += 1
            _has_ended(process)
        self.counts["restarts"] += len(self.restarts())
        if process.returncode:
            yield f"it ended with {process.returncode}: {said(self.folder)}"

    def _wait_for_progress(self, process: subprocess.Popen[bytes], restarts: int) -> None:
        """Wait until it has been started again so often, and has saved another checkpoint since; or is over."""
        until(lambda: process.poll() is not None or len(self.restarts()) == restarts, patient(_STUCK_SECONDS))
        before = self.saved()
        until(lambda: process.poll() is not None or self.saved() > before, patient(_STUCK_SECONDS))
        time.sleep(0.05)  # until that is noted

    def _emptied(self) -> Path:
        """Return the folder, without what ranks have noted before."""
        for path in [*self.folder.glob("trains-*"), *self.folder.glob("left-*")]:
            path.unlink()
        return self.folder

    def _trains(self) -> list[int]:
        """Return the processes of the ranks as soon as all of them train; none if they do not."""
        files = [self.folder / f"trains-{rank}" for rank in range(self.size)]
        come = until(lambda: all(path.exists() and path.read_text() for path in files), patient(_STUCK_SECONDS))
        return [int(path.read_text()) for path in files] if come else []


def _result(text: str) -> str:
    return next((line for line in text.splitlines() if line.startswith("trained ")), "")


def _ranks(folder: Path) -> list[int]:
    """Return the processes of the ranks that `mpistrat run` has started in a folder."""
    found, words = [], [os.fsencode(word) for word in (*PYTHON, "-m", "mpi4py", "train.py")]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cmdline").read_bytes().split(b"\0")[: len(words)] == words and (process / "cwd").samefile(folder):
                found.append(int(process.name))
        except OSError:  # it has exited
            continue
    return found


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    return until(lambda: process.poll() is not None, patient(_STUCK_SECONDS))


def undisturbed(steps: int) -> str:
    """Return the result of a training that nobody disturbs, on one rank alone."""
    with tempfile.TemporaryDirectory() as name:
        Training(Path(name), steps=steps)
        done = run_bounded([*PYTHON, "train.py", str(steps)], patient(_STUCK_SECONDS), cwd=Path(name))
    assert done.returncode == 0, done.stderr
    return _result(done.stdout)


def disturb(how: str, shape: str, num_jobs: int, seed: int, counts: Counter[str], steps: int = 400) -> Iterator[str]:
    """Preempt so many jobs of a shape, or kill ranks in them; yield what was wrong."""
    rng, wanted, jobs = random.Random(f"{seed} {shape}"), undisturbed(steps), 0
    while jobs < num_jobs:
        with tempfile.TemporaryDirectory() as name:
            training = Training(Path(name), shape, steps, counts=counts)
            for _ in range(min(num_jobs - jobs, _MOST_OF_A_TRAINING)):
                wrong = training.preempt(rng) if how == "preempt" else training.kill(rng)
                yield from (f"{shape}, job {jobs}, seed {seed}: {text}" for text in wrong)
                jobs += 1
                if training.result():
                    break
            else:
                with training.started(0.0) as process:
                    _has_ended(process)
            if (found := training.result()) != wanted:
                yield f"{shape}, after job {jobs}, seed {seed}: {found!r} instead of {wanted!r}: {said(training.folder)}"


def main(argv: Sequence[str] | None = None) -> int:
    """Disturb what was asked for; return 1 if something was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.trainings", description="Trainings that are disturbed.")
    parser.add_argument("how", choices=("preempt", "kill"))
    parser.add_argument("--jobs", type=int, default=20, help="in each shape (default: 20)")
    parser.add_argument("--shape", action="append", help=f"again for more (default: {' '.join(SHAPES)})")
    parser.add_argument("--seed", type=int, default=0)
    arguments, wrong = parser.parse_args(argv), 0
    for shape in arguments.shape or SHAPES:
        counts, began = Counter[str](), time.monotonic()
        for text in disturb(arguments.how, shape, arguments.jobs, arguments.seed, counts):
            wrong += 1
            print(f"--- {text}", flush=True)
        print(f"{shape}: {dict(counts)} in {time.monotonic() - began:.0f} s, {wrong} wrong so far", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
