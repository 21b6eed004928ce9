"""What comparing every call costs, on top of the same calls with the check off.

Two jobs in one lab, one with the check on and one with it off, take turns.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mpistrat.text import format_bytes, format_seconds
from tests.benchmarks.contest import Contender, Contest
from tests.benchmarks.pages import Table
from tests.benchmarks.session import Session
from tests.hosts.lab import Lab

KIB, MIB = 1 << 10, 1 << 20
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


def run(session: Session) -> dict[str, Table]:
    """Measure in every place: the times, and what comes on top."""
    lines = [["where", "size", "check off", "check on", "on top: median of the launches (least to most)"]]
    for hosts, ranks, sizes, seconds, launches in QUICK if session.quick else CASES:
        where = f"{hosts} hosts x {ranks // hosts}" if hosts > 1 else f"1 host, {ranks} ranks"
        tasks = [("seconds_of_a_call", {"nbytes": nbytes}) for nbytes in sizes]
        with Lab(hosts, "1gbit" if hosts > 1 else "unlimited") as lab:
            found = side_by_side(lab, ranks, (ROOT, {}), (ROOT, {"MPISTRAT_CHECK": "off"}), tasks, seconds, launches)
        for nbytes, times in zip(sizes, found, strict=True):
            session.add(lines, [where, format_bytes(nbytes), *_cells(nbytes, times)])
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


def _cells(nbytes: int, launches: Launches) -> list[str]:
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
