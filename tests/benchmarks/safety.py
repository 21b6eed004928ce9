"""Safety: what becomes of programs in which one rank does something else, in every way we know."""

import collections
from collections.abc import Iterable

from tests.benchmarks.pages import Table
from tests.benchmarks.session import Session
from tests.disagreements.case import Plan
from tests.disagreements.job import run_cases
from tests.disagreements.kinds import SHAPES, all_plans, drawn_plans, quick_plans
from tests.disagreements.ranks import Place
from tests.disagreements.verdicts import CLASSES

HOSTS = {"hosts:2+2": 0.5, "hosts:1+1+1+1": 0.3}  # which part of all kinds
# how many random programs and random pairs of calls in each shape
DRAWN_COUNTS = {
    ("drawn_program", "random programs"): {"1x2": 250, "2+1": 250, "2x2": 250, "1x4": 250},
    ("drawn_pair", "random pairs"): {"1x2": 3000},
}
HEADS = ["what", "shape", "cases", *CLASSES, "must not end so", "told at the latest after", "commit"]
_EVERY = 100  # progress


def run(session: Session) -> dict[str, Table]:
    """Run all cases of every kind in each shape, and a part of them on several hosts."""
    unknown = set(session.only) - {*SHAPES, *HOSTS}
    if unknown:
        raise ValueError(f"there is no shape {', '.join(unknown)}; accepted: {', '.join((*SHAPES, *HOSTS))}")
    lines = [HEADS]
    for shape in SHAPES[:1] if session.quick else session.only or (*SHAPES, *HOSTS):
        share, size = 0.2 if session.quick else HOSTS.get(shape), Place(shape).size
        lines.append(_line(session, "every kind", shape, quick_plans(size, share=share) if share else all_plans(size)))
    return {"": lines}


def run_drawn(session: Session) -> dict[str, Table]:
    """Run random programs with one disagreement, and random pairs of calls."""
    lines = [HEADS]
    for (name, words), counts in DRAWN_COUNTS.items():
        for shape, count in counts.items():
            plans = drawn_plans(name, Place(shape).size, count // 50 if session.quick else count, 300_000)
            lines.append(_line(session, words, shape, plans))
    return {"": lines}


def _line(session: Session, what: str, shape: str, plans: Iterable[Plan]) -> list[str]:
    """Run cases in a shape; return how many ended in which class: ranks were told, if only the first three have any."""
    classes: collections.Counter[str] = collections.Counter()
    wrong = latest = 0
    for number, done in enumerate(run_cases(shape, plans), 1):
        classes[done.verdict.name] += 1
        latest = max(latest, done.verdict.further)
        if not done.is_allowed:
            wrong += 1
            session.say(str(done))
        if number % _EVERY == 0:
            session.say(f"{shape}: {number} cases, {dict(classes)}")
    session.say(f"{shape}: {dict(classes)}")
    late = f"{latest} further calls" if latest else "the call itself"
    found = [str(classes.get(name, "–")) for name in CLASSES]
    return [what, shape, str(classes.total()), *found, str(wrong), late, session.commit]
