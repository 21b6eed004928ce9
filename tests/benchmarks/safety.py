"""Safety: what becomes of programs in which one rank does something else, in every way we know; and what comparing costs."""

import collections
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from mpistrat.text import format_bytes, format_seconds
from tests.benchmarks.contest import Contender, Contest
from tests.benchmarks.messages import KIB, MIB
from tests.benchmarks.pages import Table
from tests.benchmarks.session import Session
from tests.disagreements.case import Plan
from tests.disagreements.job import run_cases
from tests.disagreements.kinds import SHAPES, all_plans, drawn_plans, quick_plans
from tests.disagreements.ranks import Place
from tests.disagreements.verdicts import CLASSES
from tests.hosts.lab import Lab

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


SIZES = (8, 128, KIB, 8 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
ROOT = Path(__file__).parents[2]
_PROGRAM = Path(__file__).parent / "peers" / "check_ranks.py"
Launches = list[tuple[list[float], list[float]]]
"""The times of two programs, block by block, in each launch."""

# hosts, ranks, sizes, seconds that each is measured in a launch, and how often both jobs are started anew
CASES: tuple[tuple[int, int, Sequence[int], float, int], ...] = (
    (1, 2, SIZES, 1.0, 8),
    (1, 4, SIZES, 1.0, 8),
    (4, 8, SIZES, 1.0, 5),
)
QUICK = ((1, 2, (8, 64 * KIB, 4 * MIB), 0.5, 2),)


def cost(session: Session) -> dict[str, Table]:
    """Return what comparing every call costs, in every place: two jobs, one with the check off, take turns."""
    lines = [["where", "size", "check off", "check on", "on top: median of the launches (least to most)"]]
    for hosts, ranks, sizes, seconds, launches in QUICK if session.quick else CASES:
        where = f"{hosts} hosts x {ranks // hosts}" if hosts > 1 else f"1 host, {ranks} ranks"
        tasks = [("seconds_of_a_call", {"nbytes": nbytes}) for nbytes in sizes]
        with Lab(hosts, "1gbit" if hosts > 1 else "unlimited") as lab:
            found = side_by_side(lab, ranks, (ROOT, {}), (ROOT, {"MPISTRAT_CHECK": "off"}), tasks, seconds, launches)
        for nbytes, times in zip(sizes, found, strict=True):
            session.add(lines, [where, format_bytes(nbytes), *_cost_cells(nbytes, times)])
    return {"": lines}


def side_by_side(
    lab: Lab,
    ranks: int,
    one: tuple[Path, dict[str, str]],
    other: tuple[Path, dict[str, str]],
    tasks: Sequence[tuple[str, dict[str, int]]],
    seconds: float,
    launches: int,
) -> list[Launches]:
    """Return, for each task, the times of two trees, each with an environment of its own, that take turns in a lab."""
    contenders = [
        Contender(name, "openmpi", [sys.executable, str(_PROGRAM)], {"PYTHONPATH": str(tree), **env})
        for name, (tree, env) in (("one", one), ("other", other))
    ]
    found: list[Launches] = [[] for _ in tasks]
    for launch in range(launches):
        # which cores the ranks of a job get is luck, and who starts first may have it more often
        with Contest(lab, ranks, "block", contenders[:: -1 if launch % 2 else 1]) as contest:
            for (task, request), times in zip(tasks, found, strict=True):
                times.append(_take_turns(contest, task, seconds, request))
    return found


def _take_turns(contest: Contest, task: str, seconds: float, request: dict[str, int]) -> tuple[list[float], list[float]]:
    """Return the times of both programs; who begins a pair changes."""
    times: dict[str, list[float]] = {"one": [], "other": []}
    begun = time.monotonic()
    while (turns := len(times["one"])) < 3 or (time.monotonic() - begun < seconds and turns < 60):
        for name in times if turns % 2 else reversed(times):
            times[name].append(contest.call(name, task, **request)[0])
    return times["one"], times["other"]


def _cost_cells(nbytes: int, launches: Launches) -> list[str]:
    """Return the medians, and what comes on top, as the median of the launches, and the least and the most of them.

    Each launch counts by the median of its pairs of neighbours: where its memory lies is the same for all of them.
    """
    on, off = (statistics.median(seconds for launch in launches for seconds in launch[index]) for index in (0, 1))
    added = sorted(statistics.median(one - other for one, other in zip(*launch, strict=True)) for launch in launches)
    middle, least, most = statistics.median(added), added[0], added[-1]
    if nbytes <= 128:
        on_top = f"{middle * 1e6:+.2f} µs ({least * 1e6:+.2f} to {most * 1e6:+.2f}), {middle / off:+.1%}"
    else:
        on_top = f"{middle / off:+.1%} ({least / off:+.1%} to {most / off:+.1%})"
    return [format_seconds(off), format_seconds(on), on_top]
