"""One host: shared memory against what others do, and against a copy of the array."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mpistrat.text import format_bytes
from tests.benchmarks.cases import Case, draw_cases, measure_cases, table_of_cases, verdict
from tests.benchmarks.contenders import OURS
from tests.benchmarks.session import Session

__all__ = ["draw", "run", "table"]

KIB, MIB = 1 << 10, 1 << 20
NOISE = 0.05
SIZES = (8, KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
NAMES = (OURS, "Open MPI", "MPICH", "gloo", "TensorFlow")
CASES = (Case(1, 2, "block", "unlimited", SIZES, NAMES, 1.0), Case(1, 4, "block", "unlimited", SIZES[3:], NAMES[:3], 1.0))
QUICK = (Case(1, 2, "block", "unlimited", (8, 64 * KIB, 16 * MIB), NAMES, 0.3),)
# two ranks have a core each: they need not give it up to each other
ENV = {"OMPI_MCA_mpi_yield_when_idle": "0"}


def run(session: Session) -> dict[str, Any]:
    """Measure every case."""
    rows = []
    for case in QUICK if session.quick else CASES:
        rows += measure_cases(session, [case], ENV if case.ranks == 2 else None)
    return {"rows": rows}


def table(result: dict[str, Any]) -> str:
    """Return the verdict on goal 3, and the table; in brackets is the share of the limit: a copy of the array by each rank."""
    judged = [row for row in result["rows"] if row["ranks"] == 2 and row["nbytes"] >= 64 * KIB]
    misses = [f"{format_bytes(row['nbytes'])} {_ratio(row):.2f}" for row in judged if _ratio(row) < _goal(row["nbytes"])]
    goal = f"2 ranks: at least 2.5 times as fast as Open MPI from 16 MiB up, and as fast from 64 KiB up (noise: {NOISE:.0%})"
    return f"{verdict(goal, len(judged) - len(misses), misses)}\n{table_of_cases(result['rows'])}"


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the times over the size."""
    draw_cases(result["rows"], path, shares=False)


def _goal(nbytes: int) -> float:
    return 2.5 if nbytes >= 16 * MIB else 1 - NOISE


def _ratio(row: dict[str, Any]) -> float:
    return float(row["programs"]["Open MPI"]["seconds"] / row["programs"][OURS]["seconds"])
