"""From mpi4py: what a program gains that wraps its communicator, and changes nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mpistrat.text import format_bytes, format_seconds
from tests.benchmarks.cases import Case, draw_cases, measure_cases, verdict
from tests.benchmarks.contenders import OURS, WRAPPED
from tests.benchmarks.pages import markdown_table
from tests.benchmarks.session import Session

__all__ = ["draw", "run", "table"]

KIB, MIB = 1 << 10, 1 << 20
NOISE = 0.05
PLAIN = "Open MPI"
NAMES = (PLAIN, WRAPPED, OURS)
HEADS = ("mpi4py", "wrapped", "`Communicator.all_reduce`")
SIZES = (8, 64 * KIB, MIB, 16 * MIB)
CASES = (
    Case(1, 2, "block", "unlimited", SIZES, NAMES),
    Case(1, 4, "block", "unlimited", SIZES, NAMES),
    Case(2, 4, "block", "1gbit", SIZES, NAMES),
)
QUICK = (Case(1, 2, "block", "unlimited", (8, MIB), NAMES, 0.3),)
# two ranks have a core each: they need not give it up to each other
ENV = {"OMPI_MCA_mpi_yield_when_idle": "0"}


def run(session: Session) -> dict[str, Any]:
    """Measure every case."""
    cases = QUICK if session.quick else CASES
    return {"rows": [row for case in cases for row in measure_cases(session, [case], ENV if case.ranks == 2 else None)]}


def table(result: dict[str, Any]) -> str:
    """Return the verdict, and the times."""
    judged = [row for row in result["rows"] if row["nbytes"] >= MIB]
    misses = [f"{_shape(row)} {format_bytes(row['nbytes'])} {_gain(row):.2f}" for row in judged if _gain(row) < 1 - NOISE]
    lines = [
        [
            _shape(row),
            format_bytes(row["nbytes"]),
            *(format_seconds(row["programs"][name]["seconds"]) for name in NAMES),
            f"{_gain(row):.2f}",
        ]
        for row in result["rows"]
    ]
    goal = f"the wrapped Allreduce is not slower than mpi4py's from 1 MiB up (noise: {NOISE:.0%})"
    heads = ["hosts x ranks on each", "size", *HEADS, "mpi4py / wrapped"]
    return f"{verdict(goal, len(judged) - len(misses), misses)}\n{markdown_table(heads, lines)}"


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the times over the size."""
    draw_cases(result["rows"], path, shares=False)


def _gain(row: dict[str, Any]) -> float:
    return float(row["programs"][PLAIN]["seconds"] / row["programs"][WRAPPED]["seconds"])


def _shape(row: dict[str, Any]) -> str:
    return f"{row['hosts']}x{row['ranks'] // row['hosts']}"
