"""What comparing every call costs, on top of the same calls with the check off.

Two jobs in one lab, one with the check on and one with it off, take turns.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpistrat.text import format_bytes, format_seconds
from tests.benchmarks.contest import Contender, Contest
from tests.benchmarks.pages import Table
from tests.benchmarks.session import Session
from tests.hosts.lab import Lab

KIB, MIB = 1 << 10, 1 << 20
SIZES = (8, 128, KIB, 8 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
_ON, _OFF = "check on", "check off"
_PROGRAM = Path(__file__).parent / "peers" / "check_ranks.py"
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class CostCase:
    """Ranks in a lab, how long each size is measured in a launch, in seconds, and how often both jobs are started anew."""

    hosts: int
    ranks: int
    sizes: Sequence[int] = SIZES
    seconds: float = 1.0
    launches: int = 8

    @property
    def where(self) -> str:
        """As tables have it."""
        return f"{self.hosts} hosts x {self.ranks // self.hosts}" if self.hosts > 1 else f"1 host, {self.ranks} ranks"


CASES = (CostCase(1, 2), CostCase(1, 4), CostCase(4, 8, launches=5))
QUICK = (CostCase(1, 2, (8, 64 * KIB, 4 * MIB), 0.5, 2),)


def run(session: Session) -> dict[str, Any]:
    """Measure in every place."""
    return {"cost": _measure(session, QUICK if session.quick else CASES)}


def tables(result: dict[str, Any]) -> dict[str, Table]:
    """Return the times, and what comes on top."""
    heads = ["where", "size", "check off", "check on", "on top: median of the launches (least to most)"]
    return {"": [heads, *([row["where"], format_bytes(row["nbytes"]), *_cells(row)] for row in result["cost"])]}


def _measure(session: Session, cases: Sequence[CostCase]) -> list[dict[str, Any]]:
    """Return a row for each case and size."""
    rows = []
    for case in cases:
        # two ranks have a core each: they need not give it up to each other
        env = {"OMPI_MCA_mpi_yield_when_idle": "0"} if case.ranks == 2 else {}
        rate = "1gbit" if case.hosts > 1 else "unlimited"
        contenders = [program(_ON, _ROOT, env), program(_OFF, _ROOT, {**env, "MPISTRAT_CHECK": "off"})]
        times: dict[int, dict[str, list[list[float]]]] = {nbytes: {"on": [], "off": []} for nbytes in case.sizes}
        with Lab(case.hosts, rate) as lab:
            for launch in range(case.launches):
                # which cores the ranks of a job get is luck, and who starts first may have it more often
                with Contest(lab, case.ranks, "block", contenders[:: -1 if launch % 2 else 1]) as contest:
                    for nbytes in case.sizes:
                        found = take_turns(contest, (_ON, _OFF), "seconds_of_a_call", case.seconds, nbytes=nbytes)
                        times[nbytes]["on"].append(found[_ON])
                        times[nbytes]["off"].append(found[_OFF])
        for nbytes, both in times.items():
            rows.append({"where": case.where, "ranks": case.ranks, "nbytes": nbytes, **both})
            session.say(f"{case.where}, {format_bytes(nbytes)}: {' | '.join(_cells(rows[-1]))}")
    return rows


def program(name: str, tree: Path, env: Mapping[str, str]) -> Contender:
    """Return the program that calls the library of a tree."""
    fixed = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
    return Contender(name, "openmpi", [sys.executable, str(_PROGRAM)], {**fixed, **env})


def take_turns(contest: Contest, names: tuple[str, str], task: str, seconds: float, **request: int) -> dict[str, list[float]]:
    """Return the times of two programs, block by block; who begins a pair changes."""
    times: dict[str, list[float]] = {name: [] for name in names}
    first, begun = times[names[0]], time.monotonic()
    while len(first) < 3 or (time.monotonic() - begun < seconds and len(first) < 60):
        for name in names if len(first) % 2 else names[::-1]:
            times[name].append(contest.call(name, task, **request)[0])
    return times


def _difference(row: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return what comes on top, as the median of the launches, and the least and the most of them.

    Each launch counts by the median of its pairs of neighbours: where its memory lies is the same for all of them.
    """
    launches = [
        statistics.median(one - other for one, other in zip(on, off, strict=True))
        for on, off in zip(row["on"], row["off"], strict=True)
    ]
    return statistics.median(launches), min(launches), max(launches)


def _off(row: Mapping[str, Any]) -> float:
    return statistics.median(seconds for launch in row["off"] for seconds in launch)


def _added(row: Mapping[str, Any]) -> str:
    middle, least, most = _difference(row)
    off = _off(row)
    if row["nbytes"] <= 128:
        return f"{middle * 1e6:+.2f} µs ({least * 1e6:+.2f} to {most * 1e6:+.2f}), {middle / off:+.1%}"
    return f"{middle / off:+.1%} ({least / off:+.1%} to {most / off:+.1%})"


def _cells(row: Mapping[str, Any]) -> list[str]:
    on = statistics.median(seconds for launch in row["on"] for seconds in launch)
    return [format_seconds(_off(row)), format_seconds(on), _added(row)]
