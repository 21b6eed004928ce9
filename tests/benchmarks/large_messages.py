"""Large messages between hosts: how much of the wire an all-reduce uses, by placement and number of hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mpistrat.text import format_bytes
from tests.benchmarks.cases import Case, draw_cases, measure_cases, table_of_cases, verdict
from tests.benchmarks.contenders import NAMES, OURS
from tests.benchmarks.session import Session

__all__ = ["draw", "run", "table"]

MIB = 1 << 20
MPIS, FEW = (OURS, "Open MPI", "Open MPI, no HAN"), (OURS, "Open MPI", "gloo")
# gloo gives no answer at 16 MiB where neighbours in its ring sit on different hosts
CASES = (
    Case(4, 8, "block", "1gbit", (MIB, 4 * MIB, 16 * MIB), NAMES),
    Case(4, 8, "block", "1gbit", (64 * MIB,), FEW),
    Case(4, 8, "cyclic", "1gbit", (MIB, 4 * MIB, 16 * MIB), MPIS),
    Case(4, 8, "random", "1gbit", (MIB, 4 * MIB, 16 * MIB), MPIS),
    Case(4, 8, "4+2+1+1", "1gbit", (MIB, 4 * MIB, 16 * MIB), (OURS, "Open MPI")),
    Case(2, 4, "3+1", "1gbit", (MIB, 4 * MIB, 16 * MIB), MPIS),
    Case(2, 4, "block", "1gbit", (MIB, 4 * MIB, 16 * MIB), MPIS),
    # slower links, so that two cores keep up with all that is sent
    Case(8, 8, "block", "500mbit", (MIB, 4 * MIB, 16 * MIB), (OURS, "Open MPI")),
    Case(16, 16, "block", "250mbit", (MIB, 4 * MIB, 16 * MIB), (OURS, "Open MPI")),
)
QUICK = (
    Case(4, 8, "block", "1gbit", (MIB, 4 * MIB), FEW, 0.3),
    Case(2, 4, "3+1", "1gbit", (4 * MIB,), (OURS, "Open MPI"), 0.3),
    Case(8, 8, "block", "500mbit", (4 * MIB,), (OURS, "Open MPI"), 0.3),
)


def run(session: Session) -> dict[str, Any]:
    """Measure every case."""
    return {"rows": measure_cases(session, QUICK if session.quick else CASES)}


def table(result: dict[str, Any]) -> str:
    """Return the verdict on goal 1, and the table of all cases; in brackets is the share of the wire."""
    rows = result["rows"]
    misses = [
        f"{row['hosts']} hosts {row['placement']} {format_bytes(row['nbytes'])} {row['programs'][OURS]['share']:.2f}"
        for row in rows
        if row["programs"][OURS]["share"] < _goal(row["nbytes"])
    ]
    goal = "at least 0.95 of the wire from 4 MiB up, 0.90 at 1 MiB"
    return f"{verdict(goal, len(rows) - len(misses), misses)}\n{table_of_cases(rows)}"


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the share of the wire over the size."""
    draw_cases(result["rows"], path, shares=True)


def _goal(nbytes: int) -> float:
    return 0.95 if nbytes >= 4 * MIB else 0.90
