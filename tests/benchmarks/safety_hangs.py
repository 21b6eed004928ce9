"""Hangs: whether the stall report names the rank that does not come, and its line, on one host and on four."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.cases import verdict
from tests.benchmarks.pages import markdown_table
from tests.benchmarks.session import Session
from tests.disagreements.hangs import HANGS, WAITS, find_report
from tests.disagreements.places import Place

__all__ = ["PAGE", "draw", "run", "table"]

PAGE = "safety"
PLACES = ("1x3", "hosts:1+1+1+1")


def run(session: Session) -> dict[str, Any]:
    """Run all hangs."""
    return {"hangs": [row for place in PLACES[: 1 if session.quick else None] for row in _hangs(session, place)]}


def table(result: dict[str, Any]) -> str:
    """Return whether the report was right, and the line that it named."""
    hangs = result["hangs"]
    missed = [f"{row['place']} {row['name']}" for row in hangs if not row["right"]]
    goal = "the report names the rank that does not come, and its line"
    return f"{verdict(goal, len(hangs) - len(missed), missed)}\n{_hang_table(hangs)}"


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw after how many seconds it was reported, from the start of the job on."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    hangs = result["hangs"]
    figure, axes = plt.subplots(figsize=(7, 5), layout="constrained")
    for place in dict.fromkeys(row["place"] for row in hangs):
        rows = [row for row in hangs if row["place"] == place]
        axes.plot([row["seconds"] for row in rows], [row["name"] for row in rows], "o", label=place)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds from the start of the job to the report, MPISTRAT_STALL_SECONDS=1")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


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


def _hang_table(hangs: Sequence[Mapping[str, Any]]) -> str:
    places = list(dict.fromkeys(row["place"] for row in hangs))
    cells = {(row["name"], row["place"]): row["line"] or ("told" if row["right"] else "**no**") for row in hangs}
    lines = [
        [name, *(cells.get((name, place), "–") for place in places)] for name in dict.fromkeys(row["name"] for row in hangs)
    ]
    return markdown_table(["the missing rank", *(f"line named, {place}" for place in places)], lines)
