"""Small messages between hosts: from 8 B to 256 KiB, against the best peer at each size."""

from __future__ import annotations

from typing import Any

from tests.benchmarks.cases import Case, measure_cases, table_of_cases
from tests.benchmarks.contenders import NAMES, OURS
from tests.benchmarks.pages import Table
from tests.benchmarks.session import Session

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


def run(session: Session) -> dict[str, Any]:
    """Measure every case."""
    return {"rows": measure_cases(session, QUICK if session.quick else CASES)}


def tables(result: dict[str, Any]) -> dict[str, Table]:
    """Return the times of all cases."""
    return {"": table_of_cases(result["rows"])}
