"""Overlap: a step that reduces gradients while it computes, against computing and reducing alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from mpistrat.text import format_bytes, format_seconds
from tests.benchmarks.pages import Table
from tests.benchmarks.session import Session
from tests.hosts.lab import Lab

MIB = 1 << 20
# link, bytes, buckets, what is computed
CASES = (
    ("1gbit", 16 * MIB, 16, "matmul"),
    ("1gbit", 64 * MIB, 32, "matmul"),
    ("1gbit", 64 * MIB, 32, "elementwise"),
    ("500mbit", 64 * MIB, 32, "matmul"),
    ("250mbit", 16 * MIB, 16, "matmul"),
)
QUICK = (("1gbit", 4 * MIB, 8, "matmul"),)
_RANK = Path(__file__).parent / "peers" / "overlap_ranks.py"


def run(session: Session) -> dict[str, Any]:
    """Measure every case, on two hosts of one rank."""
    return {"rows": [_measure(session, *case) for case in (QUICK if session.quick else CASES)]}


def tables(result: dict[str, Any]) -> dict[str, Table]:
    """Return the times."""
    heads = ["link", "gradients", "computing", "computing alone", "reducing alone", "both", "both / the longer"]
    lines = [
        [
            row["rate"],
            f"{format_bytes(row['nbytes'])} in {row['buckets']}",
            row["kind"],
            *(format_seconds(row[name]) for name in ("compute", "communicate", "overlap")),
            f"{_ratio(row):.2f}",
        ]
        for row in result["rows"]
    ]
    return {"": [heads, *lines]}


def _measure(session: Session, rate: str, nbytes: int, buckets: int, kind: str) -> dict[str, Any]:
    program = [sys.executable, str(_RANK), str(nbytes), str(buckets), kind]
    with Lab(2, rate) as lab:
        # computing has one core, as its rank has: a library's own threads would take that of the other
        done = lab.run(2, "block", program, env={"OPENBLAS_NUM_THREADS": "1"})
    if done.returncode:
        raise RuntimeError(f"the program failed: {done.stderr}")
    row = {"rate": rate, "nbytes": nbytes, "buckets": buckets, "kind": kind, **json.loads(done.stdout.splitlines()[-1])}
    session.say(f"{_where(row)}: {_ratio(row):.2f}")
    return row


def _where(row: dict[str, Any]) -> str:
    return f"{row['rate']}, {format_bytes(row['nbytes'])} in {row['buckets']}, {row['kind']}"


def _ratio(row: dict[str, Any]) -> float:
    return float(row["overlap"] / max(row["compute"], row["communicate"]))
