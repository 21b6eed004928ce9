"""Large messages between hosts: how much of the wire an all-reduce uses, by placement and number of hosts."""

from __future__ import annotations

from typing import Any

from tests.benchmarks.cases import Case, measure_cases, table_of_cases
from tests.benchmarks.contenders import OURS
from tests.benchmarks.pages import Table
from tests.benchmarks.session import Session

MIB = 1 << 20
MPIS, FEW = (OURS, "Open MPI", "Open MPI, no HAN"), (OURS, "Open MPI", "gloo")
# Open MPI hangs at random placement and on 16 hosts; gloo gives no answer at 16 MiB where neighbours in its ring sit on
# different hosts
CASES = (
    Case(4, 8, "block", "1gbit", (MIB, 4 * MIB, 16 * MIB), (*MPIS, "MPICH", "gloo")),
    Case(4, 8, "block", "1gbit", (32 * MIB, 64 * MIB), FEW),
    Case(4, 8, "cyclic", "1gbit", (MIB, 4 * MIB, 16 * MIB), MPIS),
    Case(4, 8, "random", "1gbit", (4 * MIB, 16 * MIB), (OURS,)),
    Case(4, 8, "4+2+1+1", "1gbit", (MIB, 4 * MIB, 16 * MIB), (OURS, "Open MPI")),
    Case(2, 4, "3+1", "1gbit", (MIB, 4 * MIB, 16 * MIB), (OURS, "Open MPI")),
    Case(2, 4, "block", "1gbit", (MIB, 4 * MIB, 16 * MIB), (OURS, "Open MPI")),
    # slower links, so that two cores keep up with all that is sent
    Case(8, 8, "block", "500mbit", (MIB, 4 * MIB, 16 * MIB), (OURS, "Open MPI")),
    Case(16, 16, "block", "250mbit", (4 * MIB, 16 * MIB), (OURS,)),
)
QUICK = (
    Case(4, 8, "block", "1gbit", (MIB, 4 * MIB), FEW, 0.3),
    Case(2, 4, "3+1", "1gbit", (4 * MIB,), (OURS, "Open MPI"), 0.3),
    Case(8, 8, "block", "500mbit", (4 * MIB,), (OURS, "Open MPI"), 0.3),
)


def run(session: Session) -> dict[str, Any]:
    """Measure every case, or the placements that were asked for, such as ``4x8-block``."""
    cases = [case for case in CASES if not session.only or f"{case.hosts}x{case.ranks}-{case.placement}" in session.only]
    return {"rows": measure_cases(session, QUICK if session.quick else cases)}


def tables(result: dict[str, Any]) -> dict[str, Table]:
    """Return the times of all cases."""
    return {"": table_of_cases(result["rows"], shares=True)}
