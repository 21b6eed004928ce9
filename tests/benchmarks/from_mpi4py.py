"""From mpi4py: what a program gains that wraps its communicator, and changes nothing else."""

from __future__ import annotations

from typing import Any

from mpistrat.text import format_bytes
from tests.benchmarks.cases import Case, measure_cases
from tests.benchmarks.contenders import OURS, WRAPPED
from tests.benchmarks.pages import Table, spread
from tests.benchmarks.session import Session

KIB, MIB = 1 << 10, 1 << 20
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


def tables(result: dict[str, Any]) -> dict[str, Table]:
    """Return the times."""
    lines = [
        [
            f"{row['hosts']}×{row['ranks'] // row['hosts']}",
            format_bytes(row["nbytes"]),
            *(spread(row["programs"][name]) for name in NAMES),
            f"{row['programs'][PLAIN]['seconds'] / row['programs'][WRAPPED]['seconds']:.2f}",
        ]
        for row in result["rows"]
    ]
    return {"": [["hosts × ranks", "size", *HEADS, "mpi4py / wrapped"], *lines]}
