"""Reduce-scatter: against our all-reduce of the same array, and against MPI's own, with the bytes that cross the links."""

from __future__ import annotations

from typing import Any

from mpistrat.text import format_bytes
from tests.benchmarks.contenders import OURS, contenders
from tests.benchmarks.contest import Contest
from tests.benchmarks.pages import Table, spread
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


def run(session: Session) -> dict[str, Any]:
    """Time the three in turns in each place."""
    return {"rows": [row for case in (CASES[:1] if session.quick else CASES) for row in _measure(session, *case)]}


def tables(result: dict[str, Any]) -> dict[str, Table]:
    """Return the times, with how many bytes crossed the links over the least possible."""
    heads = ["hosts × ranks", "size", *(f"`{name}`" if name != PEER else "`MPI_Reduce_scatter`" for name in ENTRIES)]
    lines = [
        [
            _place(row),
            format_bytes(row["nbytes"]),
            *(_time(row, name) if name in row["ways"] else "–" for name in ENTRIES),
            *(f"{_ratio(row, name):.2f}" if name in row["ways"] else "–" for name in (WHOLE, PEER)),
        ]
        for row in result["rows"]
    ]
    return {"": [[*heads, "all_reduce / reduce_scatter", f"{PEER} / reduce_scatter"], *lines]}


def _measure(session: Session, hosts: int, ranks: int, rate: str) -> list[dict[str, Any]]:
    rows = []
    # two ranks have a core each: they need not give it up to each other
    env = {"OMPI_MCA_mpi_yield_when_idle": "0"} if ranks == 2 else None
    with Lab(hosts, rate) as lab, Contest(lab, ranks, "block", contenders(session, (OURS, PEER), env)) as contest:
        session.versions.update(contest.versions)
        for nbytes in SIZES:
            entries = {name: (program, {"kind": kind, "nbytes": nbytes}) for name, (program, kind) in ENTRIES.items()}
            found = contest.alternate(entries, SECONDS, HALF)
            rows.append(
                {
                    "hosts": hosts,
                    "ranks": ranks,
                    "rate": rate,
                    "nbytes": nbytes,
                    "ways": {name: one.document() for name, one in found.items()},
                }
            )
            session.say(f"{_place(rows[-1])}, {format_bytes(nbytes)}: all_reduce takes {_ratio(rows[-1], WHOLE):.2f} times")
    return rows


def _ratio(row: dict[str, Any], name: str) -> float:
    return float(row["ways"][name]["seconds"] / row["ways"][SCATTER]["seconds"])


def _place(row: dict[str, Any]) -> str:
    return f"{row['hosts']}×{row['ranks'] // row['hosts']}"


def _time(row: dict[str, Any], name: str) -> str:
    """Return the time, and how many bytes crossed the links, over the least that a reduce-scatter must send."""
    sent = f", {row['ways'][name]['sent_share']:.2f} of the bytes" if row["hosts"] > 1 else ""
    return f"{spread(row['ways'][name])}{sent}"
