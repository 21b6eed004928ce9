"""One array of float32, summed by several programs, in several labs: what the experiments on message sizes have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpistrat.text import format_bytes, format_seconds
from tests.benchmarks.contenders import KINDS, NAMES, OURS, contenders
from tests.benchmarks.contest import Contest
from tests.benchmarks.pages import markdown_table
from tests.benchmarks.session import Session
from tests.hosts.lab import Lab

__all__ = ["Case", "best_peer", "draw_cases", "measure_cases", "programs_of", "table_of_cases", "verdict", "wire_seconds"]


@dataclass(frozen=True)
class Case:
    """Ranks in a lab, and what they sum.

    Attributes
    ----------
    hosts, ranks : int
        How many.
    placement, rate : str
        As `Lab` takes them.
    sizes : sequence of int
        Bytes of the array.
    names : tuple of str
        Who competes.
    seconds : float
        For the repetitions of each program at each size in each launch, about.
    launches : int
        How often the programs are started anew: where ranks share cores, a time also depends on how a launch has fallen out.
    """

    hosts: int
    ranks: int
    placement: str
    rate: str
    sizes: Sequence[int]
    names: tuple[str, ...] = NAMES
    seconds: float = 1.0
    launches: int = 1


def measure_cases(session: Session, cases: Iterable[Case], env: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """Return a row for each case and size; bytes that went round the links are an error."""
    return [row for case in cases for row in _measure(session, case, env)]


def wire_seconds(hosts: int, nbytes: int, goodput_bits: float) -> float:
    """Return the least time in which hosts with such links can sum arrays: each sends and receives 2 (n - 1) / n of one."""
    return 2 * (hosts - 1) / hosts * nbytes * 8 / goodput_bits


def best_peer(row: dict[str, Any]) -> str:
    """Return who was the fastest of a row beside us."""
    return min((name for name in row["programs"] if name != OURS), key=lambda name: row["programs"][name]["seconds"])


def programs_of(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Return who took part in any of the rows, in the order of tables."""
    there = {name for row in rows for name in row["programs"]}
    return [name for name in KINDS if name in there]


def table_of_cases(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table: the time of each program, its share of the wire, and ours against the best peer."""
    names = programs_of(rows)
    lines = []
    for row in rows:
        cells = [_cell(row, name) for name in names]
        ratio = "–"
        if len(row["programs"]) > 1:
            ratio = f"{row['programs'][best_peer(row)]['seconds'] / row['programs'][OURS]['seconds']:.2f}"
        plan = row["programs"][OURS]["facts"].get("plan", "")
        lines.append([_where(row), format_bytes(row["nbytes"]), *cells, plan, ratio])
    return markdown_table(["hosts, ranks, placement, link", "size", *names, "our plan", "x best peer"], lines)


def verdict(goal: str, reached: int, misses: Sequence[str]) -> str:
    """Return the line that says whether a goal was reached."""
    total = reached + len(misses)
    if not misses:
        return f"**Goal reached** in {'all ' if total > 1 else ''}{total}: {goal}.\n"
    return f"**Goal missed** in {len(misses)} of {total}: {goal}. Missed: {'; '.join(misses)}.\n"


def draw_cases(rows: Sequence[dict[str, Any]], path: Path, shares: bool) -> None:
    """Draw each case in a field of its own: the share of the wire, or the time, over the size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    places = list(dict.fromkeys(_where(row) for row in rows))
    columns = min(len(places), 3)
    lines = -(-len(places) // columns)
    figure, fields = plt.subplots(lines, columns, figsize=(4.6 * columns, 3.6 * lines), squeeze=False, layout="constrained")
    for axes in fields.flat[len(places) :]:
        axes.set_visible(False)
    for axes, place in zip(fields.flat, places, strict=False):
        there = [row for row in rows if _where(row) == place]
        for name in programs_of(there):
            points = [(row["nbytes"], row["programs"][name]) for row in there if name in row["programs"]]
            values = [program["share" if shares else "seconds"] for _, program in points]
            style = {"color": "black", "linewidth": 2.2, "zorder": 3} if name == OURS else {"linewidth": 1.2}
            axes.plot([nbytes for nbytes, _ in points], values, "o-", markersize=4, label=name, **style)
        axes.set_xscale("log", base=2)
        axes.set_title(place, fontsize=9)
        axes.set_xlabel("bytes")
        axes.set_ylabel("share of what is possible" if shares else "seconds")
        axes.grid(alpha=0.3)
        if shares:
            axes.set_ylim(0, 1.05)
        else:
            axes.set_yscale("log")
    fields.flat[0].legend(fontsize=7)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _measure(session: Session, case: Case, env: dict[str, str] | None) -> list[dict[str, Any]]:
    with Lab(case.hosts, case.rate) as lab:
        goodput = lab.goodput_bits(rounds=2, seconds=1.2) if case.hosts > 1 else 0.0
        launches = [_launch(session, case, env, lab, goodput) for _ in range(case.launches)]
    return [_middle(rows) for rows in zip(*launches, strict=True)]


def _launch(session: Session, case: Case, env: dict[str, str] | None, lab: Lab, goodput: float) -> list[dict[str, Any]]:
    """Start all programs, and measure every size."""
    rows = []
    with Contest(lab, case.ranks, case.placement, contenders(session, case.names, env)) as contest:
        session.versions.update(contest.versions)
        for nbytes in case.sizes:
            measured = contest.compare({"kind": "all_reduce", "nbytes": nbytes}, case.seconds)
            least = wire_seconds(case.hosts, nbytes, goodput) if case.hosts > 1 else _copy_seconds(contest, nbytes)
            rows.append(_row(case, goodput, nbytes, least, {name: done.document() for name, done in measured.items()}))
            session.say(f"{_where(rows[-1])}, {format_bytes(nbytes)}: {_line(rows[-1])}")
        left_out = {f"{name} on {case.hosts} hosts {case.placement}": why for name, why in contest.missing.items()}
        session.environments.missing.update(left_out)
    return rows


def _middle(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one row for several launches: of each program the one with the median time."""
    programs = {}
    for name in programs_of(rows):
        found = sorted((row["programs"][name] for row in rows if name in row["programs"]), key=lambda one: one["seconds"])
        programs[name] = found[(len(found) - 1) // 2]
    return {**rows[0], "programs": programs}


def _copy_seconds(contest: Contest, nbytes: int) -> float:
    """Return how long all ranks take to copy such an array at the same time: each byte is read, and written."""
    [bytes_per_second, *_] = contest.call(OURS, "copy_bytes_per_second", nbytes=nbytes)
    return 2 * nbytes / float(bytes_per_second)


def _row(case: Case, goodput: float, nbytes: int, least: float, programs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    for program in programs.values():
        program["share"] = least / program["seconds"]
    return {
        "hosts": case.hosts,
        "ranks": case.ranks,
        "placement": case.placement,
        "rate": case.rate,
        "goodput_bits": goodput,
        "nbytes": nbytes,
        "least_seconds": least,
        "programs": programs,
    }


def _where(row: dict[str, Any]) -> str:
    link = f", {row['goodput_bits'] / 1e6:.0f} Mbit/s" if row["goodput_bits"] else ""
    return f"{row['hosts']}, {row['ranks']}, {row['placement']}{link}"


def _line(row: dict[str, Any]) -> str:
    return ", ".join(f"{name} {_cell(row, name)}" for name in row["programs"])


def _cell(row: dict[str, Any], name: str) -> str:
    program = row["programs"].get(name)
    if program is None:
        return "–"
    share = f" ({program['share']:.2f})" if program["share"] and row["nbytes"] >= 1 << 20 else ""
    return f"{format_seconds(program['seconds'])}{share}"
