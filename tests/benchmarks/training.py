"""Steps of a training, and checkpoints that are saved meanwhile, beside PyTorch's: jobs that print what they took."""

from __future__ import annotations

import importlib.metadata
import json
import math
import statistics
from typing import Any

from mpistrat.text import format_bytes, format_seconds
from tests.benchmarks.pages import Table, spread
from tests.benchmarks.session import Session, answers_of
from tests.gradients import resnet50
from tests.hosts.lab import Lab

COUNTS = (10_000, 100_000, 1_000_000, 5_000_000, 25_000_000)
_RANK = "data_parallel_ranks.py"


def data_parallel(session: Session) -> dict[str, Table]:
    """Data parallel: steps of a PyTorch module with `average_gradients`, beside DistributedDataParallel on gloo."""
    session.versions["PyTorch"] = importlib.metadata.version("torch")
    counts = [*map(str, COUNTS[:2] if session.quick else COUNTS)]
    lines = [["hosts × ranks", "parameters", "mpistrat", "DDP on gloo", "DDP / mpistrat"]]
    for shape in ("1x2",) if session.quick else ("1x2", "1x4", "2x2"):
        for row in _in_lab(counts) if shape == "2x2" else answers_of(int(shape[-1]), _RANK, *counts):
            parameters, times = f"{row['parameters']:_}".replace("_", " "), [row["ours"], row["ddp"]]
            ratio = f"{row['ddp'] / row['ours']:.2f}"
            session.add(lines, [shape.replace("x", "×"), parameters, *map(format_seconds, times), ratio])
    return {"": lines}


def _in_lab(counts: list[str]) -> list[Any]:
    with Lab(2, "1gbit") as lab:
        return answers_of(4, _RANK, *counts, lab=lab, GLOO_SOCKET_IFNAME="eth0", OMP_NUM_THREADS="1")


NUM_BYTES, ROUNDS = 256 << 20, 15
_NAMES = {"mpistrat": "mpistrat", "torch": "PyTorch `async_save`", "savez": "`np.savez`, chief"}


def checkpoint(session: Session) -> dict[str, Table]:
    """Checkpoints: what a step waits for, whole saves, restores, and steps meanwhile, beside PyTorch's and `numpy.savez`."""
    session.versions.update({name: importlib.metadata.version(name) for name in ("torch", "safetensors")})
    num_bytes, rounds = (16 << 20, 1) if session.quick else (NUM_BYTES, ROUNDS)
    heads = ["arrays", "what", "step waits", "of a copy", "whole save", "plain write / save", "restore", "steps meanwhile"]
    lines = [heads]
    shares = [[math.prod(shape) for shape in resnet50()], [1] * 8]
    program = ("checkpoint_ranks.py", json.dumps(shares), str(num_bytes), str(rounds))
    for answer in answers_of(2, *program, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1"):
        arrays = f"{answer['arrays']} of {format_bytes(answer['bytes'])}"
        beside = answer["seconds"].pop("beside")
        copy, write = (statistics.median(beside[what]) for what in ("copy", "write"))
        alone = [spread(beside["copy"]), "1.00", spread(beside["write"]), "1.00", "", _slower(beside)]
        session.add(lines, [arrays, "a copy, and a plain write", *alone])
        for name, seconds in answer["seconds"].items():
            session.add(lines, [arrays, _NAMES[name], *_cells(seconds, copy, write, name == "savez")])
    return {"": lines}


def _cells(seconds: dict[str, list[float]], copy: float, write: float, stands_still: bool) -> list[str]:
    middle = {what: statistics.median(each) for what, each in seconds.items()}
    return [
        spread(seconds["wait"]),
        f"{middle['wait'] / copy:.2f}",
        spread(seconds["save"]),
        f"{write / middle['save']:.2f}",
        spread(seconds["restore"]),
        "stand still" if stands_still else _slower(seconds),
    ]


def _slower(seconds: dict[str, list[float]]) -> str:
    """Return by how much steps were slower meanwhile: the median, and the quarters beside it."""
    slower = [meanwhile / step - 1 for step, meanwhile in zip(seconds["step"], seconds["step meanwhile"], strict=True)]
    low, middle, high = statistics.quantiles(slower, n=4) if len(slower) > 1 else slower * 3
    return f"{middle:+.0%} ({low:+.0%} to {high:+.0%})"
