"""Deterministic mode: what adding in the order of the replicas costs."""

from __future__ import annotations

from typing import Any

from mpistrat.text import format_bytes, format_seconds
from tests.benchmarks.contenders import all_reduces, competing
from tests.benchmarks.messages import shape_of
from tests.benchmarks.pages import Table
from tests.benchmarks.session import Session
from tests.hosts.lab import Lab

KIB, MIB = 1 << 10, 1 << 20
DEFAULT, IN_ORDER = "default", "deterministic"
KINDS: dict[str, dict[str, Any]] = {DEFAULT: {}, IN_ORDER: {"deterministic": True}}
# hosts, ranks, link, sizes
CASES = ((1, 2, "unlimited", (64 * KIB, MIB, 16 * MIB)), (4, 8, "1gbit", (64 * KIB, MIB, 16 * MIB)))
QUICK = ((1, 2, "unlimited", (MIB,)),)


def run(session: Session) -> dict[str, Table]:
    """Time both ways in each place."""
    times = [["hosts × ranks", "size", *KINDS, "deterministic / default"]]
    for hosts, ranks, rate, sizes in QUICK if session.quick else CASES:
        with Lab(hosts, rate) as lab, competing(session, lab, ranks) as contest:
            for nbytes in sizes:
                found = contest.alternate(all_reduces(nbytes, KINDS), 0.8)
                cells = [f"{format_seconds(one.seconds)} ({one.facts['plan']})" for one in found.values()]
                ratio = f"{found[IN_ORDER].seconds / found[DEFAULT].seconds:.2f}"
                times.append([shape_of(hosts, ranks), format_bytes(nbytes), *cells, ratio])
                session.say(", ".join(times[-1]))
    return {"": times}
