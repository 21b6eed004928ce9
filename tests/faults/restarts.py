"""Jobs whose ranks are killed at random instants, and which `mpistrat run --max-restarts` starts again.

``python -m tests.faults.restarts --jobs 50`` kills in 50 of them: each must end with the weights of an undisturbed job.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.processes import started, until

SHAPES = ("1x2", "2x1", "1x3", "2x2")
_SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV)
_MOST_KILLS, _STEPS = 3, 100
_STEP_SECONDS = 0.02
_SECONDS = 300.0
_RANK = [os.fsencode(word) for word in (sys.executable, "-m", "mpi4py", "train.py")]

# Trains STEPS steps, and saves after each SAVE_EVERY of them. A fault is a statement: `attempt` counts the starts.
_PROGRAM = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
import mpistrat

strategy = mpistrat.MultiWorkerMirroredStrategy()
x = np.random.default_rng(0).normal(size=(120, 3))
dataset = strategy.experimental_distribute_dataset(mpistrat.ArrayDataset((x, x @ [1.0, 2.0, 3.0]), batch_size=12, shuffle=True))
with strategy.scope():
    weights = mpistrat.Variable(np.zeros(3))
    state = {{"step": 0, "velocity": np.zeros(3)}}
    manager = mpistrat.CheckpointManager(mpistrat.Checkpoint(weights=weights, dataset=dataset, state=state), "saved", 2)

def train(batch):
    x, y = batch
    context = mpistrat.get_replica_context()
    state["velocity"] *= 0.5
    state["velocity"] += context.all_reduce("sum", x.T @ (x @ weights - y)) / 12
    context.update(weights, lambda w, v: w - 0.05 * v, (state["velocity"],))
    state["step"] += 1

attempt, rank, restored = int(os.environ.get("MPISTRAT_RESTART_COUNT", 0)), strategy.rank, manager.restore()
if strategy.is_chief:
    print("attempt", attempt, "begins at step", state["step"], flush=True)
while state["step"] < {steps}:
    for batch in dataset:
        strategy.run(train, args=(batch,))
        time.sleep({step_seconds})
        {fault}
        if state["step"] % {save_every} == 0:
            manager.save(state["step"])
        if state["step"] == {steps}:
            break
manager.close()
if strategy.is_chief:
    np.save("weights.npy", weights.numpy())
"""


@dataclass(frozen=True)
class Done:
    """How a job ended: its code, the weights if it has written any, how often ranks were killed, what it printed."""

    code: int
    weights: bytes
    kills: int
    out: str
    err: str

    @property
    def restarts(self) -> list[str]:
        """What was said of restarts."""
        return _restarts(self.err)


def train(
    folder: Path,
    shape: str,
    *options: str,
    fault: str = "pass",
    steps: int = 30,
    save_every: int = 5,
    meanwhile: Callable[[subprocess.Popen[str]], int] = lambda process: 0,
) -> Done:
    """Run the program in an empty folder by `mpistrat run` with options; `meanwhile` returns how often it has killed a rank."""
    program = _PROGRAM.format(fault=fault, steps=steps, save_every=save_every, step_seconds=_STEP_SECONDS)
    (folder / "train.py").write_text(program)
    argv = [sys.executable, "-m", "mpistrat", "run", "--nodes", shape, "--restart-delay", "0", *options, "train.py"]
    with (
        (folder / "out").open("w") as out,
        (folder / "err").open("w") as err,
        started(argv, cwd=folder, stdout=out, stderr=err, text=True) as process,
    ):
        kills = meanwhile(process)
        code = process.wait(_SECONDS)
    weights = folder / "weights.npy"
    texts = [(folder / name).read_text(errors="replace") for name in ("out", "err")]
    return Done(code, weights.read_bytes() if weights.exists() else b"", kills, *texts)


def train_with_kills(folder: Path, shape: str, rng: random.Random, seconds: float, steps: int) -> Done:
    """Run the program, which takes so many seconds undisturbed, and kill ranks at random instants.

    The first kill is at any instant, later ones after another checkpoint: two without progress between them would end the job.
    """

    def kill(process: subprocess.Popen[str]) -> int:
        kills = 0
        for number in range(rng.randint(1, _MOST_KILLS)):
            if number:
                _wait_for_progress(process, folder, kills)
            time.sleep(rng.random() * (_STEP_SECONDS * steps / 2 if number else seconds))
            ranks = _ranks(folder)
            if process.poll() is None and ranks:
                os.kill(rng.choice(ranks), rng.choice(_SIGNALS))
                kills += 1
        return kills

    return train(folder, shape, "--max-restarts", "9", steps=steps, meanwhile=kill)


def _wait_for_progress(process: subprocess.Popen[str], folder: Path, restarts: int) -> None:
    """Wait until a job has been started again so often, and has saved another checkpoint since; or is over."""
    err = folder / "err"
    until(lambda: process.poll() is not None or len(_restarts(err.read_text(errors="replace"))) == restarts, _SECONDS)
    before = _last_step(folder)
    until(lambda: process.poll() is not None or _last_step(folder) > before, _SECONDS)
    time.sleep(0.05)  # until that is noted


def _restarts(err: str) -> list[str]:
    return re.findall(r"^mpistrat run: ((?:not started again|restart \d).*)$", err, re.MULTILINE)


def _ranks(folder: Path) -> list[int]:
    """Return the processes of the ranks that run in a folder now."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            if words[: len(_RANK)] == _RANK and (process / "cwd").readlink() == folder:
                found.append(int(process.name))
        except OSError:  # it has exited
            continue
    return found


def _last_step(folder: Path) -> int:
    return max((int(path.parent.name.split("-")[1]) for path in folder.glob("saved/ckpt-*/manifest.json")), default=-1)


def play(jobs: int, seed: int) -> list[str]:
    """Run so many jobs; return what was wrong with which."""
    wrong, kills, restarts = list[str](), 0, 0
    undisturbed = dict[str, tuple[bytes, float]]()
    for job in range(jobs):
        rng = random.Random(f"{seed} {job}")
        shape = rng.choice(SHAPES)
        if shape not in undisturbed:
            with tempfile.TemporaryDirectory() as name:
                began = time.monotonic()
                done = train(Path(name).resolve(), shape, steps=_STEPS)
                assert done.code == 0, done.err
                undisturbed[shape] = done.weights, time.monotonic() - began
        weights, seconds = undisturbed[shape]
        with tempfile.TemporaryDirectory() as name:
            done = train_with_kills(Path(name).resolve(), shape, rng, seconds, _STEPS)
        kills, restarts = kills + done.kills, restarts + len(done.restarts)
        if done.code or done.weights != weights:
            wrong.append(f"job {job} of seed {seed}, {shape}: code {done.code}\n{done.out}{done.err}")
    print(f"{jobs} jobs, {kills} kills, {restarts} restarts, {len(wrong)} wrong")
    return wrong


def main(argv: Sequence[str] | None = None) -> int:
    """Run the jobs, and return 1 if one of them ended wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    wrong = play(arguments.jobs, arguments.seed)
    print(*wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
