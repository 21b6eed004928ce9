"""Random programs with one disagreement, and random pairs of calls: what becomes of them."""

from __future__ import annotations

from typing import Any

from tests.benchmarks import safety
from tests.benchmarks.pages import Table
from tests.benchmarks.session import Session
from tests.disagreements.kinds import drawn_plans
from tests.disagreements.places import Place

COUNTS = {
    "drawn_program": {"1x2": 250, "2+1": 250, "2x2": 250, "1x4": 250},
    "drawn_pair": {"1x2": 3000},
}
_WORDS = {"drawn_program": "random programs", "drawn_pair": "random pairs"}


def run(session: Session) -> dict[str, Any]:
    """Run so many of each."""
    groups = []
    for name, counts in COUNTS.items():
        for shape, count in counts.items():
            plans = drawn_plans(name, Place(shape).size, count // 50 if session.quick else count, 300_000)
            groups.append({"what": _WORDS[name], **safety.run_group(session, shape, plans)})
    return {"groups": groups}


def tables(result: dict[str, Any]) -> dict[str, Table]:
    """Return the classes of all programs."""
    return {"": safety.table_of(result["groups"])}
