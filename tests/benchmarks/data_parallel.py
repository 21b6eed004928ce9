"""Data parallel: steps of a PyTorch module with `average_gradients`, beside DistributedDataParallel on gloo."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from mpistrat.text import format_seconds
from tests.benchmarks.pages import Table
from tests.benchmarks.session import Session, answers_of
from tests.hosts.lab import Lab

COUNTS = (10_000, 100_000, 1_000_000, 5_000_000, 25_000_000)
QUICK = COUNTS[:2]
_RANK = "data_parallel_ranks.py"


def run(session: Session) -> dict[str, Table]:
    """Measure every number of parameters on one host of two ranks and of four, and on two hosts of two."""
    session.versions["PyTorch"] = importlib.metadata.version("torch")
    counts = [*map(str, QUICK if session.quick else COUNTS)]
    lines = [["hosts × ranks", "parameters", "mpistrat", "DDP on gloo", "DDP / mpistrat"]]
    for shape in ("1x2",) if session.quick else ("1x2", "1x4", "2x2"):
        for row in _in_lab(counts) if shape == "2x2" else answers_of(int(shape[-1]), _RANK, *counts):
            parameters, times = f"{row['parameters']:_}".replace("_", " "), [row["ours"], row["ddp"]]
            ratio = f"{row['ddp'] / row['ours']:.2f}"
            lines.append([shape.replace("x", "×"), parameters, *map(format_seconds, times), ratio])
            session.say(", ".join(lines[-1]))
    return {"": lines}


def _in_lab(counts: list[str]) -> list[Any]:
    with Lab(2, "1gbit") as lab:
        return answers_of(4, _RANK, *counts, lab=lab, GLOO_SOCKET_IFNAME="eth0", OMP_NUM_THREADS="1")
