"""Safety: what becomes of programs in which ranks disagree or do not come, and what comparing every call costs."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks import check_cost
from tests.benchmarks.cases import verdict
from tests.benchmarks.pages import markdown_table
from tests.benchmarks.session import Session
from tests.disagreements.case import Plan
from tests.disagreements.hangs import HANGS, WAITS, find_report
from tests.disagreements.job import run_cases
from tests.disagreements.kinds import KINDS
from tests.disagreements.places import Place
from tests.disagreements.plans import SHAPES, all_plans, drawn_plans, quick_plans
from tests.disagreements.verdicts import CLASSES

__all__ = ["draw", "run", "table"]

HOSTS = {"hosts:2+2": 0.5, "hosts:1+1+1+1": 0.3}  # which part of all kinds
PROGRAMS = {"1x2": 250, "2+1": 250, "2x2": 250, "1x4": 250}
PAIRS = {"1x2": 3000}
PLACES_OF_HANGS = ("1x3", "hosts:1+1+1+1")
_EVERY = 100  # progress


def run(session: Session) -> dict[str, Any]:
    """Run all cases, random programs and pairs, all hangs, and measure the cost."""
    groups: list[dict[str, Any]] = []
    for shape in SHAPES[:1] if session.quick else SHAPES:
        size = Place(shape).size
        groups.append(_group(session, "kinds", shape, quick_plans(size, share=0.2) if session.quick else all_plans(size)))
    for shape, share in {} if session.quick else HOSTS.items():
        groups.append(_group(session, "kinds", shape, quick_plans(Place(shape).size, share=share)))
    for name, shapes in {"drawn_program": PROGRAMS, "drawn_pair": PAIRS}.items():
        for shape, count in shapes.items():
            plans = drawn_plans(name, Place(shape).size, count // 50 if session.quick else count, 300_000)
            groups.append(_group(session, name, shape, plans))
    hangs = [row for place in PLACES_OF_HANGS[: 1 if session.quick else None] for row in _hangs(session, place)]
    cost = check_cost.measure_cost(session, check_cost.QUICK if session.quick else check_cost.CASES)
    return {"groups": groups, "hangs": hangs, "cost": cost}


def table(result: dict[str, Any]) -> str:
    """Return whether ranks were told, the classes of all cases, the hangs, and the cost."""
    groups, hangs, cost = result["groups"], result["hangs"], result["cost"]
    wrong = [text for group in groups for text in group["wrong"]]
    cases = sum(sum(group["classes"].values()) for group in groups)
    told = "each rank is told, no memory of others changes, and nobody waits without a report"
    missed = [f"{row['place']} {row['name']}" for row in hangs if not row["right"]]
    dear = check_cost.too_dear(cost)
    limits = "at most 0.4 µs at 8 B on one host with 2 ranks, and 3 % elsewhere"
    return "\n".join(
        [
            verdict(told, cases - len(wrong), wrong[:20]),
            _classes(groups),
            "By what differs, over all shapes:\n",
            _families(groups),
            verdict("the report names the rank that does not come, and its line", len(hangs) - len(missed), missed),
            _hang_table(hangs),
            verdict(limits, len(cost) - len(dear), dear),
            check_cost.cost_table(cost),
        ]
    )


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw what the check costs over the size, with the half of all pairs in the middle."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for where in dict.fromkeys(row["where"] for row in result["cost"]):
        rows = [row for row in result["cost"] if row["where"] == where]
        shares = [[100 * (on / off - 1) for on, off in zip(row["on"], row["off"], strict=True)] for row in rows]
        quartiles = [statistics.quantiles(share, n=4) for share in shares]
        middles = [middle for _, middle, _ in quartiles]
        spans = [[middle - low for low, middle, _ in quartiles], [high - middle for _, middle, high in quartiles]]
        axes.errorbar([row["nbytes"] for row in rows], middles, spans, fmt="o-", markersize=4, capsize=3, label=where)
    axes.axhline(3, color="tab:red", linewidth=1, linestyle="--", label="3 %")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("bytes")
    axes.set_ylabel("% on top of the check off")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _group(session: Session, what: str, shape: str, plans: Iterable[Plan]) -> dict[str, Any]:
    """Run cases in a shape; return how many ended in which class, and each that did not end as it must."""
    classes: collections.Counter[str] = collections.Counter()
    families: dict[str, collections.Counter[str]] = {}
    wrong, latest = [], 0
    for number, done in enumerate(run_cases(shape, plans), 1):
        classes[done.verdict.name] += 1
        families.setdefault(KINDS[done.plan.kind].family, collections.Counter())[done.verdict.name] += 1
        latest = max(latest, done.verdict.further)
        if not done.is_allowed:
            wrong.append(f"{shape} {done.plan}: {done.verdict.name}")
            session.say(str(done))
        if number % _EVERY == 0:
            session.say(f"{what} in {shape}: {number} cases, {dict(classes)}")
    session.say(f"{what} in {shape}: {dict(classes)}")
    counted = {family: dict(counts) for family, counts in families.items()}
    return {"what": what, "shape": shape, "classes": dict(classes), "families": counted, "wrong": wrong, "latest": latest}


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


def _classes(groups: Sequence[Mapping[str, Any]]) -> str:
    words = {"kinds": "every kind", "drawn_program": "random programs", "drawn_pair": "random pairs"}
    lines = [
        [words[group["what"]], group["shape"], str(sum(group["classes"].values())), *_counts(group["classes"]), _late(group)]
        for group in groups
    ]
    return markdown_table(["what", "shape", "cases", *CLASSES, "told at the latest after"], lines)


def _late(group: Mapping[str, Any]) -> str:
    return f"{group['latest']} further calls" if group["latest"] else "the call itself"


def _families(groups: Sequence[Mapping[str, Any]]) -> str:
    totals: dict[str, collections.Counter[str]] = {}
    for group in groups:
        for family, counts in group["families"].items():
            totals.setdefault(family, collections.Counter()).update(counts)
    kinds = collections.Counter(kind.family for kind in KINDS.values())
    lines = [[family, str(kinds[family]), *_counts(counts)] for family, counts in totals.items()]
    return markdown_table(["what differs", "kinds", *CLASSES], lines)


def _counts(counts: Mapping[str, int]) -> list[str]:
    return [str(counts[name]) if counts.get(name) else "–" for name in CLASSES]


def _hang_table(hangs: Sequence[Mapping[str, Any]]) -> str:
    places = list(dict.fromkeys(row["place"] for row in hangs))
    cells = {(row["name"], row["place"]): row["line"] or ("told" if row["right"] else "**no**") for row in hangs}
    lines = [
        [name, *(cells.get((name, place), "–") for place in places)] for name in dict.fromkeys(row["name"] for row in hangs)
    ]
    return markdown_table(["the missing rank", *(f"line named, {place}" for place in places)], lines)
