"""Deterministic mode: what adding in the order of the replicas costs, and that bits do not depend on the nodes."""

from __future__ import annotations

import json
import statistics
from typing import Any

from mpistrat.text import format_bytes, format_seconds
from tests.benchmarks.contenders import OURS, contenders
from tests.benchmarks.contest import Contest, Measured
from tests.benchmarks.pages import Table
from tests.benchmarks.session import Session, answers_of
from tests.hosts.lab import Lab

KIB, MIB = 1 << 10, 1 << 20
DEFAULT, IN_ORDER = "default", "deterministic"
KINDS: dict[str, dict[str, Any]] = {DEFAULT: {}, IN_ORDER: {"deterministic": True}}
# hosts, ranks, link, sizes
CASES = ((1, 2, "unlimited", (64 * KIB, MIB, 16 * MIB)), (4, 8, "1gbit", (64 * KIB, MIB, 16 * MIB)))
QUICK = ((1, 2, "unlimited", (MIB,)),)
SHAPES, NUM_RANKS, ROUNDS = ("1x4", "2x2", "2x2:cyclic", "3+1", "4x1"), 4, 2


def run(session: Session) -> dict[str, Any]:
    """Time both ways in each place, and take the digests of sums on nodes of several shapes."""
    rows = [row for case in (QUICK if session.quick else CASES) for row in _measure(session, *case)]
    [digests] = answers_of(NUM_RANKS, "deterministic_ranks.py", json.dumps(SHAPES), json.dumps(KINDS))
    return {"rows": rows, "digests": digests}


def tables(result: dict[str, Any]) -> dict[str, Table]:
    """Return the times, and the digests."""
    times = [
        [
            f"{row['hosts']}×{row['ranks'] // row['hosts']}",
            format_bytes(row["nbytes"]),
            *(f"{format_seconds(row['seconds'][name])} ({row['plan'][name]})" for name in KINDS),
            f"{_cost(row):.2f}",
        ]
        for row in result["rows"]
    ]
    hashes = [[shape, *(f"`{found[name][:16]}`" for name in KINDS)] for shape, found in result["digests"].items()]
    return {
        "": [["hosts × ranks", "size", *KINDS, "deterministic / default"], *times],
        "bits": [["nodes of the same four replicas", *(f"SHA-256, {name}" for name in KINDS)], *hashes],
    }


def _measure(session: Session, hosts: int, ranks: int, rate: str, sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    rows = []
    with Lab(hosts, rate) as lab, Contest(lab, ranks, "block", contenders(session, (OURS,))) as contest:
        session.versions.update(contest.versions)
        for nbytes in sizes:
            found: dict[str, list[Measured]] = {name: [] for name in KINDS}
            for turn in range(ROUNDS):
                for name in KINDS if turn % 2 == 0 else reversed(KINDS):
                    task = {"kind": "all_reduce", "nbytes": nbytes, "options": KINDS[name]}
                    found[name] += contest.compare(task, 0.4).values()
            rows.append(
                {
                    "hosts": hosts,
                    "ranks": ranks,
                    "rate": rate,
                    "nbytes": nbytes,
                    "seconds": {name: statistics.median(one.seconds for one in some) for name, some in found.items()},
                    "plan": {name: some[0].facts["plan"] for name, some in found.items()},
                }
            )
            session.say(f"{ranks} ranks on {hosts}, {format_bytes(nbytes)}: {_cost(rows[-1]):.2f} times the default")
    return rows


def _cost(row: dict[str, Any]) -> float:
    return float(row["seconds"][IN_ORDER] / row["seconds"][DEFAULT])
