"""What comparing every call costs: two jobs in one lab, one with the check on and one with it off, in turns."""

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
from tests.benchmarks.pages import markdown_table
from tests.benchmarks.session import Session
from tests.hosts.lab import Lab

__all__ = ["CASES", "QUICK", "CostCase", "cost_table", "measure_cost", "too_dear"]

KIB, MIB = 1 << 10, 1 << 20
SIZES = (8, 128, KIB, 8 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
# at 8 B on one host with two ranks; elsewhere a share of the time with the check off
MOST_SECONDS, MOST_SHARE = 0.4e-6, 0.03
_ON, _OFF = "check on", "check off"
_PROGRAM = Path(__file__).parent / "peers" / "check_ranks.py"
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class CostCase:
    """Ranks in a lab, how long each size is measured in a launch, in seconds, and how often both jobs are started anew."""

    hosts: int
    ranks: int
    sizes: Sequence[int] = SIZES
    seconds: float = 4.0
    launches: int = 4

    @property
    def where(self) -> str:
        """As tables have it."""
        return f"{self.hosts} hosts x {self.ranks // self.hosts}" if self.hosts > 1 else f"1 host, {self.ranks} ranks"


CASES = (CostCase(1, 2), CostCase(1, 4), CostCase(4, 8))
QUICK = (CostCase(1, 2, (8, 64 * KIB, 4 * MIB), 1.0, 2),)


def measure_cost(session: Session, cases: Sequence[CostCase]) -> list[dict[str, Any]]:
    """Return a row for each case and size."""
    rows = []
    for case in cases:
        # two ranks have a core each: they need not give it up to each other
        env = {"OMPI_MCA_mpi_yield_when_idle": "0"} if case.ranks == 2 else {}
        rate = "1gbit" if case.hosts > 1 else "unlimited"
        contenders = [_contender(_ON, env), _contender(_OFF, {**env, "MPISTRAT_CHECK": "off"})]
        times: dict[int, dict[str, list[float]]] = {nbytes: {"on": [], "off": []} for nbytes in case.sizes}
        with Lab(case.hosts, rate) as lab:
            for launch in range(case.launches):
                # which cores the ranks of a job get is luck, and who starts first may have it more often
                with Contest(lab, case.ranks, "block", contenders[:: -1 if launch % 2 else 1]) as contest:
                    for nbytes in case.sizes:
                        for name, found in _in_turns(contest, case, nbytes).items():
                            times[nbytes][name] += found
        for nbytes, found in times.items():
            rows.append({"where": case.where, "ranks": case.ranks, "nbytes": nbytes, **found})
            session.say(f"{case.where}, {format_bytes(nbytes)}: {' | '.join(_cells(rows[-1]))}")
    return rows


def too_dear(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return where the check costs more than it may."""
    return [f"{row['where']} {format_bytes(row['nbytes'])} {_added(row)}" for row in rows if not _is_cheap(row)]


def cost_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the times in Markdown."""
    heads = ["where", "size", "check off", "check on", "on top: median of all pairs (the middle half of them)"]
    return markdown_table(heads, [[row["where"], format_bytes(row["nbytes"]), *_cells(row)] for row in rows])


def _contender(name: str, env: Mapping[str, str]) -> Contender:
    fixed = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)}
    return Contender(name, "openmpi", [sys.executable, str(_PROGRAM)], {**fixed, **env})


def _in_turns(contest: Contest, case: CostCase, nbytes: int) -> dict[str, list[float]]:
    """Return the times of both, block by block; who begins a pair changes."""
    times: dict[str, list[float]] = {_ON: [], _OFF: []}
    begun = time.monotonic()
    while len(times[_ON]) < 5 or (time.monotonic() - begun < case.seconds and len(times[_ON]) < 60):
        order = (_ON, _OFF) if len(times[_ON]) % 2 else (_OFF, _ON)
        for name in order:
            times[name].append(contest.call(name, "seconds_of_a_call", nbytes=nbytes)[0])
    return {"on": times[_ON], "off": times[_OFF]}


def _difference(row: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return median and quartiles of what comes on top, of pairs of neighbours."""
    pairs = sorted(on - off for on, off in zip(row["on"], row["off"], strict=True))
    lower, middle, upper = statistics.quantiles(pairs, n=4)
    return middle, lower, upper


def _is_cheap(row: Mapping[str, Any]) -> bool:
    added = _difference(row)[0]
    if row["nbytes"] == 8 and row["ranks"] == 2:
        return added <= MOST_SECONDS
    return added <= MOST_SHARE * statistics.median(row["off"])


def _added(row: Mapping[str, Any]) -> str:
    middle, lower, upper = _difference(row)
    off = statistics.median(row["off"])
    if row["nbytes"] <= 128:
        return f"{middle * 1e6:+.2f} µs ({lower * 1e6:+.2f} to {upper * 1e6:+.2f}), {middle / off:+.1%}"
    return f"{middle / off:+.1%} ({lower / off:+.1%} to {upper / off:+.1%})"


def _cells(row: Mapping[str, Any]) -> list[str]:
    return [format_seconds(statistics.median(row["off"])), format_seconds(statistics.median(row["on"])), _added(row)]
