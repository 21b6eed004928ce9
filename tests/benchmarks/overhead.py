"""Overhead: what a call costs on top of bare MPI, for nests of 1 to 161 arrays and in every form, and where the time goes."""

from __future__ import annotations

import statistics

from mpistrat.text import format_bytes
from tests.benchmarks.contenders import OURS, competing
from tests.benchmarks.pages import Table, spread
from tests.benchmarks.session import Session
from tests.hosts.lab import Lab

LEAVES = (1, 10, 161)  # of the nest
FORM_SIZES = (8, 1 << 10, 1 << 16, 1 << 20)
RANKS = 2


def run(session: Session) -> dict[str, Table]:
    """Measure nests of several sizes and every form of a call on one host, several times over."""
    times = 2 if session.quick else 7
    nests = [["arrays", "bare MPI_Allreduce of the bytes", "context.all_reduce", "on top (least to most of the runs)"]]
    forms: dict[str, list[str]] = {}
    with Lab(1, "unlimited") as lab, competing(session, lab, RANKS) as contest:
        for leaves in LEAVES:
            runs = [contest.call(OURS, "overhead", leaves=leaves, calls=20)[0] for _ in range(times)]
            medians = [f"{statistics.median(run[name] for run in runs) * 1e6:.1f} µs" for name in ("bare", "ours")]
            added = [(run["ours"] - run["bare"]) * 1e6 for run in runs]
            on_top = f"{statistics.median(added):.1f} µs ({min(added):.1f} to {max(added):.1f})"
            nests.append([f"{leaves} of 8 bytes", *medians, on_top])
            session.say(", ".join(nests[-1]))
        for nbytes in FORM_SIZES:
            runs = [contest.call(OURS, "forms", nbytes=nbytes, calls=20)[0] for _ in range(min(times, 5))]
            for form in runs[0]:
                forms.setdefault(form, []).append(spread([run[form] for run in runs]))
            session.say(f"every form of a call with {format_bytes(nbytes)}")
    return {
        "": nests,
        "forms": [["call", *map(format_bytes, FORM_SIZES)], *([form, *cells] for form, cells in forms.items())],
    }
