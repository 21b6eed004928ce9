"""Overlap: a step that reduces gradients while it computes, against computing and reducing alone."""

from __future__ import annotations

from mpistrat.text import format_bytes, format_seconds
from tests.benchmarks.contenders import OURS, competing
from tests.benchmarks.pages import Table
from tests.benchmarks.session import Session
from tests.hosts.lab import Lab

MIB = 1 << 20
# link, bytes, buckets, what is computed
CASES = (
    ("1gbit", 16 * MIB, 16, "matmul"),
    ("1gbit", 64 * MIB, 32, "matmul"),
    ("1gbit", 64 * MIB, 32, "elementwise"),
    ("500mbit", 64 * MIB, 32, "matmul"),
    ("250mbit", 16 * MIB, 16, "matmul"),
)
QUICK = (("1gbit", 4 * MIB, 8, "matmul"),)


def run(session: Session) -> dict[str, Table]:
    """Measure every case, on two hosts of one rank."""
    lines = [["link", "gradients", "computing", "computing alone", "reducing alone", "both", "both / the longer"]]
    for rate, nbytes, buckets, kind in QUICK if session.quick else CASES:
        with Lab(2, rate) as lab, competing(session, lab, 2) as contest:
            [times, *_] = contest.call(OURS, "overlap", nbytes=nbytes, num_buckets=buckets, kind=kind)
        ratio = f"{times[-1] / max(times[:-1]):.2f}"
        lines.append([rate, f"{format_bytes(nbytes)} in {buckets}", kind, *map(format_seconds, times), ratio])
        session.say(", ".join(lines[-1]))
    return {"": lines}
