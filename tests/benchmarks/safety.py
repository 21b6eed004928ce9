"""Safety: what becomes of programs in which one rank does something else than the others, in every way that we know."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.cases import verdict
from tests.benchmarks.pages import markdown_table
from tests.benchmarks.session import Session
from tests.disagreements.case import Plan
from tests.disagreements.job import run_cases
from tests.disagreements.kinds import KINDS
from tests.disagreements.places import Place
from tests.disagreements.plans import SHAPES, all_plans, quick_plans
from tests.disagreements.verdicts import CLASSES

__all__ = ["draw", "judged", "run", "run_group", "table"]

HOSTS = {"hosts:2+2": 0.5, "hosts:1+1+1+1": 0.3}  # which part of all kinds
_EVERY = 100  # progress
_TOLD = "each rank is told, no memory of others changes, and nobody waits without a report"


def run(session: Session) -> dict[str, Any]:
    """Run all cases of every kind in each shape, and a part of them on several hosts."""
    if session.quick:
        return {"groups": [run_group(session, SHAPES[0], quick_plans(Place(SHAPES[0]).size, share=0.2))]}
    unknown = set(session.only) - {*SHAPES, *HOSTS}
    if unknown:
        raise ValueError(f"there is no shape {', '.join(unknown)}; accepted: {', '.join((*SHAPES, *HOSTS))}")
    groups = {group["shape"]: group for group in session.earlier.get("groups", ())}
    for shape in session.only or (*SHAPES, *HOSTS):
        size = Place(shape).size
        plans = quick_plans(size, share=HOSTS[shape]) if shape in HOSTS else all_plans(size)
        groups[shape] = {**run_group(session, shape, plans), "commit": session.commit}
    return {"groups": [groups[shape] for shape in (*SHAPES, *HOSTS) if shape in groups]}


def table(result: dict[str, Any]) -> str:
    """Return whether ranks were told, and the classes of all cases."""
    return f"{judged(result['groups'])}\nBy what differs, over all shapes:\n\n{_families(result['groups'])}"


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw how many cases ended in which class, shape by shape."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    groups = result["groups"]
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    names = [group["shape"] for group in groups]
    left = [0] * len(groups)
    for name in CLASSES:
        counts = [group["classes"].get(name, 0) for group in groups]
        if any(counts):
            axes.barh(names, counts, left=left, label=name)
            left = [before + count for before, count in zip(left, counts, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("cases")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def judged(groups: Sequence[Mapping[str, Any]]) -> str:
    """Return the verdict on groups of cases, and their classes."""
    wrong = [text for group in groups for text in group["wrong"]]
    cases = sum(sum(group["classes"].values()) for group in groups)
    return f"{verdict(_TOLD, cases - len(wrong), wrong[:20])}\n{_classes(groups)}"


def run_group(session: Session, shape: str, plans: Iterable[Plan]) -> dict[str, Any]:
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
            session.say(f"{shape}: {number} cases, {dict(classes)}")
    session.say(f"{shape}: {dict(classes)}")
    counted = {family: dict(counts) for family, counts in families.items()}
    return {"shape": shape, "classes": dict(classes), "families": counted, "wrong": wrong, "latest": latest}


def _classes(groups: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        [
            group.get("what", "every kind"),
            group["shape"],
            str(sum(group["classes"].values())),
            *_counts(group["classes"]),
            _late(group),
            *([group["commit"]] if "commit" in group else ()),
        ]
        for group in groups
    ]
    # groups may have been measured one by one
    measured = ["commit"] if any("commit" in group for group in groups) else []
    return markdown_table(["what", "shape", "cases", *CLASSES, "told at the latest after", *measured], lines)


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
