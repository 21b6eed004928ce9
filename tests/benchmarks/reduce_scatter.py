"""Reduce-scatter: against our all-reduce of the same array, and against MPI's own, with the bytes that cross the links."""

from __future__ import annotations

from mpistrat.text import format_bytes
from tests.benchmarks.contenders import OURS, competing
from tests.benchmarks.contest import Measured
from tests.benchmarks.messages import shape_of
from tests.benchmarks.pages import Table
from tests.benchmarks.session import Session
from tests.hosts.lab import Lab

MIB = 1 << 20
PEER = "Open MPI"
SCATTER, WHOLE = "reduce_scatter", "all_reduce"
ENTRIES = {SCATTER: (OURS, SCATTER), WHOLE: (OURS, WHOLE), PEER: (PEER, SCATTER)}
SIZES = (MIB, 4 * MIB, 16 * MIB)
# hosts, ranks, link
CASES = ((1, 2, "unlimited"), (1, 4, "unlimited"), (2, 4, "1gbit"))
SECONDS, HALF = 1.0, 0.5


def run(session: Session) -> dict[str, Table]:
    """Time the three in turns in each place, with how many bytes crossed the links over the least possible."""
    heads = ["hosts × ranks", "size", "`reduce_scatter`", "`all_reduce`", "`MPI_Reduce_scatter`"]
    lines = [[*heads, "all_reduce / reduce_scatter", f"{PEER} / reduce_scatter"]]
    for hosts, ranks, rate in CASES[:1] if session.quick else CASES:
        with Lab(hosts, rate) as lab, competing(session, lab, ranks, names=(OURS, PEER)) as contest:
            for nbytes in SIZES:
                entries = {name: (program, {"kind": kind, "nbytes": nbytes}) for name, (program, kind) in ENTRIES.items()}
                found = contest.alternate(entries, SECONDS, HALF)
                times = [_time(found[name], hosts) if name in found else "–" for name in ENTRIES]
                ratios = [
                    f"{found[name].seconds / found[SCATTER].seconds:.2f}" if name in found else "–" for name in (WHOLE, PEER)
                ]
                lines.append([shape_of(hosts, ranks), format_bytes(nbytes), *times, *ratios])
                session.say(", ".join(lines[-1]))
    return {"": lines}


def _time(measured: Measured, hosts: int) -> str:
    """Return the time, and how many bytes crossed the links, over the least that a reduce-scatter must send."""
    return f"{measured}, {measured.sent_share:.2f} of the bytes" if hosts > 1 else str(measured)
