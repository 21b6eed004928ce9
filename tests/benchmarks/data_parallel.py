"""Data parallel: steps of a PyTorch module with `average_gradients`, beside DistributedDataParallel on gloo."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

from mpistrat.text import format_seconds
from tests.benchmarks.pages import Table
from tests.benchmarks.session import Session, answers_of
from tests.hosts.lab import Lab

COUNTS = (10_000, 100_000, 1_000_000, 5_000_000, 25_000_000)
QUICK = COUNTS[:2]
_RANK = Path(__file__).parent / "peers" / "data_parallel_ranks.py"
_LIMIT_SECONDS = 600.0


def run(session: Session) -> dict[str, Any]:
    """Measure every number of parameters on one host of two ranks and of four, and on two hosts of two."""
    session.versions["PyTorch"] = importlib.metadata.version("torch")
    counts = [*map(str, QUICK if session.quick else COUNTS)]
    rows = []
    for shape in ("1x2",) if session.quick else ("1x2", "1x4", "2x2"):
        found = _in_lab(counts) if shape == "2x2" else answers_of(int(shape[-1]), _RANK.name, *counts)
        rows += [{"shape": shape, **row} for row in found]
        session.say(", ".join(f"{shape} {row['parameters']} parameters {row['ratio']:.2f}" for row in found))
    return {"rows": rows}


def tables(result: dict[str, Any]) -> dict[str, Table]:
    """Return the times."""
    lines = [
        [
            row["shape"].replace("x", "×"),
            f"{row['parameters']:_}".replace("_", " "),
            format_seconds(row["ours"]),
            format_seconds(row["ddp"]),
            f"{row['ddp'] / row['ours']:.2f}",
        ]
        for row in result["rows"]
    ]
    return {"": [["hosts × ranks", "parameters", "mpistrat", "DDP on gloo", "DDP / mpistrat"], *lines]}


def _in_lab(counts: list[str]) -> list[dict[str, Any]]:
    with Lab(2, "1gbit") as lab:
        env = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        done = lab.run(4, "block", [sys.executable, str(_RANK), *counts], timeout=_LIMIT_SECONDS, env=env)
    if done.returncode:
        raise RuntimeError(f"the program failed: {done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
