"""Checkpoints: what a step waits for, whole saves, restores, and steps meanwhile, beside PyTorch's and `numpy.savez`."""

from __future__ import annotations

import importlib.metadata
import json
import math
import statistics

from mpistrat.text import format_bytes
from tests.benchmarks.pages import Table, spread
from tests.benchmarks.session import Session, answers_of
from tests.gradients import resnet50

NUM_BYTES, ROUNDS = 256 << 20, 15
QUICK = 16 << 20, 1
_NAMES = {"mpistrat": "mpistrat", "torch": "PyTorch `async_save`", "savez": "`np.savez`, chief"}


def run(session: Session) -> dict[str, Table]:
    """Measure two ranks: 161 arrays, as ResNet-50 has, and 8."""
    session.versions.update({name: importlib.metadata.version(name) for name in ("torch", "safetensors")})
    num_bytes, rounds = QUICK if session.quick else (NUM_BYTES, ROUNDS)
    heads = ["arrays", "what", "step waits", "of a copy", "whole save", "plain write / save", "restore", "steps meanwhile"]
    lines = [heads]
    shares = [[math.prod(shape) for shape in resnet50()], [1] * 8]
    program = ("checkpoint_ranks.py", json.dumps(shares), str(num_bytes), str(rounds))
    for answer in answers_of(2, *program, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1"):
        arrays = f"{answer['arrays']} of {format_bytes(answer['bytes'])}"
        beside = answer["seconds"].pop("beside")
        copy, write = (statistics.median(beside[what]) for what in ("copy", "write"))
        alone = [spread(beside["copy"]), "1.00", spread(beside["write"]), "1.00", "", _slower(beside)]
        lines.append([arrays, "a copy, and a plain write", *alone])
        session.say(", ".join(lines[-1]))
        for name, seconds in answer["seconds"].items():
            lines.append([arrays, _NAMES[name], *_cells(seconds, copy, write, name == "savez")])
            session.say(", ".join(lines[-1]))
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
