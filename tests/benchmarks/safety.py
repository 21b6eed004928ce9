"""Safety: what becomes of programs in which one rank does something else than the others, in every way that we know."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tests.benchmarks.pages import Table
from tests.benchmarks.session import Session
from tests.disagreements.case import Plan
from tests.disagreements.job import run_cases
from tests.disagreements.kinds import SHAPES, all_plans, drawn_plans, quick_plans
from tests.disagreements.places import Place
from tests.disagreements.verdicts import CLASSES

HOSTS = {"hosts:2+2": 0.5, "hosts:1+1+1+1": 0.3}  # which part of all kinds
# how many random programs and random pairs of calls in each shape
DRAWN_COUNTS = {
    ("drawn_program", "random programs"): {"1x2": 250, "2+1": 250, "2x2": 250, "1x4": 250},
    ("drawn_pair", "random pairs"): {"1x2": 3000},
}
_EVERY = 100  # progress


def run(session: Session) -> dict[str, Any]:
    """Run all cases of every kind in each shape, and a part of them on several hosts."""
    if session.quick:
        return {"groups": [run_group(session, SHAPES[0], quick_plans(Place(SHAPES[0]).size, share=0.2))]}
    unknown = set(session.only) - {*SHAPES, *HOSTS}
    if unknown:
        raise ValueError(f"there is no shape {', '.join(unknown)}; accepted: {', '.join((*SHAPES, *HOSTS))}")
    groups = []
    for shape in session.only or (*SHAPES, *HOSTS):
        size = Place(shape).size
        groups.append(run_group(session, shape, quick_plans(size, share=HOSTS[shape]) if shape in HOSTS else all_plans(size)))
    return {"groups": groups}


def tables(result: dict[str, Any]) -> dict[str, Table]:
    """Return the classes of all cases; ranks were told, or it is not there, if only the first three have any."""
    return {"": table_of(result["groups"])}


class Drawn:
    """Random programs with one disagreement, and random pairs of calls: what becomes of them."""

    def run(self, session: Session) -> dict[str, Any]:
        """Run so many of each."""
        groups = []
        for (name, words), counts in DRAWN_COUNTS.items():
            for shape, count in counts.items():
                plans = drawn_plans(name, Place(shape).size, count // 50 if session.quick else count, 300_000)
                groups.append({"what": words, **run_group(session, shape, plans)})
        return {"groups": groups}

    tables = staticmethod(tables)


DRAWN = Drawn()


def table_of(groups: Sequence[Mapping[str, Any]]) -> Table:
    """Return how many cases of each group ended in which class, and how many of them must not end so."""
    heads = ["what", "shape", "cases", *CLASSES, "must not end so", "told at the latest after", "commit"]
    lines = [
        [
            group.get("what", "every kind"),
            group["shape"],
            str(sum(group["classes"].values())),
            *(str(group["classes"].get(name, "–")) for name in CLASSES),
            str(len(group["wrong"])),
            _late(group),
            group["commit"],
        ]
        for group in groups
    ]
    return [heads, *lines]


def run_group(session: Session, shape: str, plans: Iterable[Plan]) -> dict[str, Any]:
    """Run cases in a shape; return how many ended in which class, and each that did not end as it must."""
    classes: collections.Counter[str] = collections.Counter()
    wrong, latest = [], 0
    for number, done in enumerate(run_cases(shape, plans), 1):
        classes[done.verdict.name] += 1
        latest = max(latest, done.verdict.further)
        if not done.is_allowed:
            wrong.append(f"{shape} {done.plan}: {done.verdict.name}")
            session.say(str(done))
        if number % _EVERY == 0:
            session.say(f"{shape}: {number} cases, {dict(classes)}")
    session.say(f"{shape}: {dict(classes)}")
    return {"shape": shape, "classes": dict(classes), "wrong": wrong, "latest": latest, "commit": session.commit}


def _late(group: Mapping[str, Any]) -> str:
    return f"{group['latest']} further calls" if group["latest"] else "the call itself"
