"""Reduce-scatter: against our all-reduce of the same array, and against MPI's own, with the bytes that cross the links."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mpistrat.text import format_bytes, format_seconds
from tests.benchmarks.cases import verdict
from tests.benchmarks.contenders import OURS, contenders
from tests.benchmarks.contest import Contest
from tests.benchmarks.pages import markdown_table
from tests.benchmarks.session import Session
from tests.hosts.lab import Lab

__all__ = ["draw", "run", "table"]

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


def table(result: dict[str, Any]) -> str:
    """Return the verdict, and the times; in brackets how many bytes crossed the links, over the least possible."""
    rows = result["rows"]
    misses = [f"{_place(row)}, {format_bytes(row['nbytes'])}" for row in rows if _ratio(row, WHOLE) < 1]
    head = ["hosts, ranks", "size", *(f"`{name}`" if name != PEER else f"`MPI_Reduce_scatter`, {PEER}" for name in ENTRIES)]
    lines = [
        [
            _place(row),
            format_bytes(row["nbytes"]),
            *(_time(row, name) if name in row["seconds"] else "-" for name in ENTRIES),
            *(f"{_ratio(row, name):.2f}" if name in row["seconds"] else "-" for name in (WHOLE, PEER)),
        ]
        for row in rows
    ]
    goal = "a reduce-scatter takes no longer than an all-reduce"
    ratios = ["all_reduce / reduce_scatter", f"{PEER} / reduce_scatter"]
    return f"{verdict(goal, len(rows) - len(misses), misses)}\n{markdown_table([*head, *ratios], lines)}"


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw how many times as long the others take, by size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = result["rows"]
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for place in dict.fromkeys(map(_place, rows)):
        there = [row for row in rows if _place(row) == place]
        for name, style in ((WHOLE, "o-"), (PEER, "s--")):
            timed = [row for row in there if name in row["seconds"]]
            ratios = [_ratio(row, name) for row in timed]
            axes.plot([row["nbytes"] for row in timed], ratios, style, label=f"{place}: {name}")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("bytes")
    axes.set_ylabel("time / that of reduce_scatter")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, title="hosts, ranks")
    figure.savefig(path, dpi=110)
    plt.close(figure)


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
                    "seconds": {name: one.seconds for name, one in found.items()},
                    "sent_share": {name: one.sent_share for name, one in found.items()},
                }
            )
            session.say(f"{_place(rows[-1])}, {format_bytes(nbytes)}: all_reduce takes {_ratio(rows[-1], WHOLE):.2f} times")
    return rows


def _ratio(row: dict[str, Any], name: str) -> float:
    return float(row["seconds"][name] / row["seconds"][SCATTER])


def _place(row: dict[str, Any]) -> str:
    return f"{row['hosts']}, {row['ranks']}"


def _time(row: dict[str, Any], name: str) -> str:
    """Return the time, and how many bytes crossed the links, over the least that a reduce-scatter must send."""
    sent = f" ({row['sent_share'][name]:.2f})" if row["hosts"] > 1 else ""
    return f"{format_seconds(row['seconds'][name])}{sent}"
