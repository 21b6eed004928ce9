"""One array of float32, summed by several programs, in several labs: what the experiments on message sizes have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mpistrat.text import format_bytes
from tests.benchmarks.contenders import KINDS, NAMES, OURS, contenders
from tests.benchmarks.contest import Contest
from tests.benchmarks.pages import Table, spread
from tests.benchmarks.session import Session
from tests.hosts.lab import Lab


@dataclass(frozen=True)
class Case:
    """Ranks in a lab, and what they sum."""

    # how many
    hosts: int
    ranks: int
    # as `Lab` takes them
    placement: str
    rate: str
    sizes: Sequence[int]  # bytes of the array
    names: tuple[str, ...] = NAMES  # who competes
    seconds: float = 1.0  # for the repetitions of each program at each size in each launch, about
    # how often the programs are started anew: where ranks share cores, a time also depends on how a launch has fallen out
    launches: int = 1


def measure_cases(session: Session, cases: Iterable[Case], env: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """Return a row for each case and size; bytes that went round the links are an error."""
    return [row for case in cases for row in _measure(session, case, env)]


def wire_seconds(hosts: int, nbytes: int, goodput_bits: float) -> float:
    """Return the least time in which hosts with such links can sum arrays: each sends and receives 2 (n - 1) / n of one."""
    return 2 * (hosts - 1) / hosts * nbytes * 8 / goodput_bits


def programs_of(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Return who took part in any of the rows, in the order of tables."""
    there = {name for row in rows for name in row["programs"]}
    return [name for name in KINDS if name in there]


def table_of_cases(rows: Sequence[dict[str, Any]], shares: bool = False) -> Table:
    """Return the time of each program, ours against the best of the others, and, where asked for, our share of the link."""
    names = programs_of(rows)
    lines = [["hosts × ranks", "placement", "size", *names, "best other / mpistrat", *["share of the link"] * shares]]
    for row in rows:
        programs = row["programs"]
        others = [programs[name]["seconds"] for name in programs if name != OURS]
        cells = [spread(programs[name]) if name in programs else "–" for name in names]
        ratio = f"{min(others) / programs[OURS]['seconds']:.2f}" if others else "–"
        share = [f"{programs[OURS]['share']:.2f}"] * shares
        lines.append([shape_of(row), row["placement"], format_bytes(row["nbytes"]), *cells, ratio, *share])
    return lines


def _measure(session: Session, case: Case, env: dict[str, str] | None) -> list[dict[str, Any]]:
    with Lab(case.hosts, case.rate) as lab:
        goodput = lab.goodput_bits(rounds=3, seconds=1.5) if case.hosts > 1 else 0.0
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
            session.say(", ".join(table_of_cases(rows[-1:])[1]))
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


def shape_of(row: dict[str, Any]) -> str:
    """Return hosts × ranks on each; or the ranks of each host, where they differ."""
    return row["placement"] if "+" in row["placement"] else f"{row['hosts']}×{row['ranks'] // row['hosts']}"
