"""Hangs: whether the stall report names the rank that does not come, and its line, on one host and on four."""

from __future__ import annotations

from tests.benchmarks.pages import Table
from tests.benchmarks.session import Session
from tests.disagreements.hangs import HANGS, WAITS, find_report
from tests.disagreements.places import Place

PLACES = ("1x3", "hosts:1+1+1+1")


def run(session: Session) -> dict[str, Table]:
    """Run all hangs, and return the line that the report named for each."""
    hangs = {**HANGS, **{f"others in {name}": hang for name, hang in WAITS.items()}}
    cells: dict[str, list[str]] = {name: [] for name in hangs}
    places = PLACES[: 1 if session.quick else None]
    for place in map(Place, places):
        for name, hang in hangs.items():
            found = find_report(place, hang)
            cells[name].append(found.line or ("told" if found.is_right(hang) else "**no**"))
            session.say(f"{place.shape}, {name}: {cells[name][-1]}")
        place.close()
    heads = ["the missing rank", *(f"line named, {place}" for place in places)]
    return {"": [heads, *([name, *row] for name, row in cells.items())]}
