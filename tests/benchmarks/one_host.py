"""One host: shared memory against what others do, and against a copy of the array."""

from __future__ import annotations

from typing import Any

from tests.benchmarks.cases import Case, measure_cases, table_of_cases
from tests.benchmarks.contenders import OURS
from tests.benchmarks.pages import Table
from tests.benchmarks.session import Session

KIB, MIB = 1 << 10, 1 << 20
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


def tables(result: dict[str, Any]) -> dict[str, Table]:
    """Return the times of all cases."""
    return {"": table_of_cases(result["rows"])}
