"""Hangs: whether the stall report names the rank that does not come, and its line, on one host and on four."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.benchmarks.pages import Table
from tests.benchmarks.session import Session
from tests.disagreements.hangs import HANGS, WAITS, find_report
from tests.disagreements.places import Place

PLACES = ("1x3", "hosts:1+1+1+1")


def run(session: Session) -> dict[str, Any]:
    """Run all hangs."""
    return {"hangs": [row for place in PLACES[: 1 if session.quick else None] for row in _hangs(session, place)]}


def tables(result: dict[str, Any]) -> dict[str, Table]:
    """Return the line that the report named for each hang."""
    hangs = result["hangs"]
    places = list(dict.fromkeys(row["place"] for row in hangs))
    cells = {(row["name"], row["place"]): row["line"] or ("told" if row["right"] else "**no**") for row in hangs}
    names = dict.fromkeys(row["name"] for row in hangs)
    lines = [[name, *(cells.get((name, place), "–") for place in places)] for name in names]
    return {"": [["the missing rank", *(f"line named, {place}" for place in places)], *lines]}


def _hangs(session: Session, shape: str) -> Iterable[dict[str, Any]]:
    place = Place(shape)
    try:
        for name, hang in {**HANGS, **{f"others in {name}": hang for name, hang in WAITS.items()}}.items():
            found = find_report(place, hang)
            is_right = found.is_right(hang)
            session.say(f"{shape}, {name}: {found.line or ('told' if is_right else 'NOT REPORTED')}")
            yield {"place": shape, "name": name, "right": is_right, "line": found.line, "seconds": found.seconds}
    finally:
        place.close()
