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
from tests.benchmarks.cases import verdict
from tests.benchmarks.contest import Contender, Contest
from tests.benchmarks.pages import markdown_table
from tests.benchmarks.session import Session
from tests.hosts.lab import Lab

__all__ = ["PAGE", "SIZES", "draw", "program", "run", "table", "take_turns"]

PAGE = "safety"

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
    seconds: float = 2.0
    launches: int = 4

    @property
    def where(self) -> str:
        """As tables have it."""
        return f"{self.hosts} hosts x {self.ranks // self.hosts}" if self.hosts > 1 else f"1 host, {self.ranks} ranks"


CASES = (CostCase(1, 2), CostCase(1, 4), CostCase(4, 8))
QUICK = (CostCase(1, 2, (8, 64 * KIB, 4 * MIB), 1.0, 2),)


def run(session: Session) -> dict[str, Any]:
    """Measure in every place."""
    return {"cost": _measure(session, QUICK if session.quick else CASES)}


def table(result: dict[str, Any]) -> str:
    """Return whether the check is cheap, and the times."""
    cost = result["cost"]
    dear = [f"{row['where']} {format_bytes(row['nbytes'])} {_added(row)}" for row in cost if not _is_cheap(row)]
    limits = "at most 0.4 µs at 8 B on one host with 2 ranks, and 3 % elsewhere"
    heads = ["where", "size", "check off", "check on", "on top: median of all pairs (the middle half of them)"]
    rows = [[row["where"], format_bytes(row["nbytes"]), *_cells(row)] for row in cost]
    return f"{verdict(limits, len(cost) - len(dear), dear)}\n{markdown_table(heads, rows)}"


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


def _measure(session: Session, cases: Sequence[CostCase]) -> list[dict[str, Any]]:
    """Return a row for each case and size."""
    rows = []
    for case in cases:
        # two ranks have a core each: they need not give it up to each other
        env = {"OMPI_MCA_mpi_yield_when_idle": "0"} if case.ranks == 2 else {}
        rate = "1gbit" if case.hosts > 1 else "unlimited"
        contenders = [program(_ON, _ROOT, env), program(_OFF, _ROOT, {**env, "MPISTRAT_CHECK": "off"})]
        times: dict[int, dict[str, list[float]]] = {nbytes: {"on": [], "off": []} for nbytes in case.sizes}
        with Lab(case.hosts, rate) as lab:
            for launch in range(case.launches):
                # which cores the ranks of a job get is luck, and who starts first may have it more often
                with Contest(lab, case.ranks, "block", contenders[:: -1 if launch % 2 else 1]) as contest:
                    for nbytes in case.sizes:
                        found = take_turns(contest, (_ON, _OFF), "seconds_of_a_call", case.seconds, nbytes=nbytes)
                        times[nbytes]["on"] += found[_ON]
                        times[nbytes]["off"] += found[_OFF]
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
    while len(first) < 5 or (time.monotonic() - begun < seconds and len(first) < 60):
        for name in names if len(first) % 2 else names[::-1]:
            times[name].append(contest.call(name, task, **request)[0])
    return times


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
