"""Small messages between hosts: from 8 B to 256 KiB, against the best peer at each size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mpistrat.text import format_bytes
from tests.benchmarks.cases import Case, best_peer, draw_cases, measure_cases, table_of_cases, verdict
from tests.benchmarks.contenders import NAMES, OURS
from tests.benchmarks.session import Session

__all__ = ["draw", "run", "table"]

SIZES = (8, 128, 1 << 10, 8 << 10, 32 << 10, 128 << 10, 256 << 10)
MPIS = (OURS, "Open MPI", "Open MPI, no HAN", "MPICH")
LAUNCHES = 3
CASES = (
    Case(4, 8, "block", "1gbit", SIZES, NAMES, 0.5, LAUNCHES),
    Case(4, 8, "cyclic", "1gbit", SIZES, MPIS, 0.5, LAUNCHES),
    Case(4, 8, "4+2+1+1", "1gbit", SIZES, MPIS, 0.5, LAUNCHES),
    Case(2, 2, "block", "1gbit", SIZES, MPIS, 0.5, LAUNCHES),
    Case(8, 8, "block", "500mbit", SIZES, MPIS, 0.5, LAUNCHES),
)
QUICK = (Case(4, 8, "block", "1gbit", (8, 8 << 10, 128 << 10), NAMES, 0.3), Case(2, 2, "block", "1gbit", (8,), MPIS, 0.3))
NOISE = 0.05


def run(session: Session) -> dict[str, Any]:
    """Measure every case."""
    return {"rows": measure_cases(session, QUICK if session.quick else CASES)}


def table(result: dict[str, Any]) -> str:
    """Return the verdict on goal 2, and the table of all cases."""
    rows = result["rows"]
    slower = [
        f"{row['hosts']} hosts {row['placement']} {format_bytes(row['nbytes'])} {_ratio(row):.2f} of {best_peer(row)}"
        for row in rows
        if _ratio(row) < 1 - NOISE
    ]
    goal = f"never slower than the best peer of that size, but for a noise of {NOISE:.0%}"
    return f"{verdict(goal, len(rows) - len(slower), slower)}\n{table_of_cases(rows)}"


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the times over the size."""
    draw_cases(result["rows"], path, shares=False)


def _ratio(row: dict[str, Any]) -> float:
    return float(row["programs"][best_peer(row)]["seconds"] / row["programs"][OURS]["seconds"])
