"""One array of float32, summed by several programs, in several labs: the experiments on message sizes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mpistrat.text import format_bytes
from tests.benchmarks.contenders import KINDS, NAMES, OURS, WRAPPED, contenders
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
    has_cores: bool = False  # each rank has a core: it need not give it up to others

    @property
    def name(self) -> str:
        """As ``--only`` has it."""
        return f"{self.hosts}x{self.ranks}-{self.placement}"


class Messages:
    """An experiment: its caption, its cases, and what is tried with ``--quick``."""

    def __init__(self, caption: str, cases: Sequence[Case], quick: Sequence[Case], shares: bool = False) -> None:
        self.__doc__, self._cases, self._quick, self._shares = caption, cases, quick, shares

    def run(self, session: Session) -> dict[str, Any]:
        """Measure every case, or the placements that were asked for, such as ``4x8-block``."""
        chosen = [case for case in self._cases if not session.only or case.name in session.only]
        return {"rows": [row for case in (self._quick if session.quick else chosen) for row in _measure(session, case)]}

    def tables(self, result: dict[str, Any]) -> dict[str, Table]:
        """Return the times of all cases."""
        return {"": table_of_cases(result["rows"], self._shares)}


class FromMpi4py(Messages):
    """What a program gains that wraps its communicator, and changes nothing else."""

    NAMES = ("Open MPI", WRAPPED, OURS)

    def tables(self, result: dict[str, Any]) -> dict[str, Table]:
        """Return the times, under the names that a user of mpi4py knows."""
        lines = []
        for row in result["rows"]:
            plain, wrapped, ours = (row["programs"][name] for name in self.NAMES)
            ratio = f"{plain['seconds'] / wrapped['seconds']:.2f}"
            lines.append([shape_of(row), format_bytes(row["nbytes"]), *map(spread, (plain, wrapped, ours)), ratio])
        return {"": [["hosts × ranks", "size", "mpi4py", "wrapped", "`Communicator.all_reduce`", "mpi4py / wrapped"], *lines]}


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


def _measure(session: Session, case: Case) -> list[dict[str, Any]]:
    """Return a row for each size; bytes that went round the links are an error."""
    with Lab(case.hosts, case.rate) as lab:
        goodput = lab.goodput_bits(rounds=3, seconds=1.5) if case.hosts > 1 else 0.0
        launches = [_launch(session, case, lab, goodput) for _ in range(case.launches)]
    return [_middle(rows) for rows in zip(*launches, strict=True)]


def _launch(session: Session, case: Case, lab: Lab, goodput: float) -> list[dict[str, Any]]:
    """Start all programs, and measure every size."""
    rows, env = [], {"OMPI_MCA_mpi_yield_when_idle": "0"} if case.has_cores else None
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


KIB, MIB = 1 << 10, 1 << 20
MPIS, FEW, TWO = (OURS, "Open MPI", "Open MPI, no HAN"), (OURS, "Open MPI", "gloo"), (OURS, "Open MPI")
LARGE = (MIB, 4 * MIB, 16 * MIB)
SMALL = (8, 128, KIB, 8 * KIB, 32 * KIB, 128 * KIB, 256 * KIB)
SHARED = (8, KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
WRAPPED_SIZES = (8, 64 * KIB, MIB, 16 * MIB)
LOCAL = (OURS, "Open MPI", "MPICH", "gloo", "TensorFlow")

MESSAGES = {
    "large_messages": Messages(
        "Large messages between hosts: how much of the wire an all-reduce uses, by placement and number of hosts.",
        # Open MPI hangs at random placement and on 16 hosts; gloo gives no answer at 16 MiB where neighbours in its ring sit
        # on different hosts
        (
            Case(4, 8, "block", "1gbit", LARGE, (*MPIS, "MPICH", "gloo")),
            Case(4, 8, "block", "1gbit", (32 * MIB, 64 * MIB), FEW),
            Case(4, 8, "cyclic", "1gbit", LARGE, MPIS),
            Case(4, 8, "random", "1gbit", LARGE[1:], (OURS,)),
            Case(4, 8, "4+2+1+1", "1gbit", LARGE, TWO),
            Case(2, 4, "3+1", "1gbit", LARGE, TWO),
            Case(2, 4, "block", "1gbit", LARGE, TWO),
            # slower links, so that two cores keep up with all that is sent
            Case(8, 8, "block", "500mbit", LARGE, TWO),
            Case(16, 16, "block", "250mbit", LARGE[1:], (OURS,)),
        ),
        (
            Case(4, 8, "block", "1gbit", LARGE[:2], FEW, 0.3),
            Case(2, 4, "3+1", "1gbit", (4 * MIB,), TWO, 0.3),
            Case(8, 8, "block", "500mbit", (4 * MIB,), TWO, 0.3),
        ),
        shares=True,
    ),
    "small_messages": Messages(
        "Small messages between hosts: from 8 B to 256 KiB, against the best peer at each size.",
        (
            Case(4, 8, "block", "1gbit", SMALL, NAMES, 0.5, launches=3),
            Case(4, 8, "cyclic", "1gbit", SMALL, (*MPIS, "MPICH"), 0.5, launches=3),
            Case(4, 8, "4+2+1+1", "1gbit", SMALL, (*MPIS, "MPICH"), 0.5, launches=3),
            Case(2, 2, "block", "1gbit", SMALL, (*MPIS, "MPICH"), 0.5, launches=3),
            Case(8, 8, "block", "500mbit", SMALL, (*MPIS, "MPICH"), 0.5, launches=3),
        ),
        (
            Case(4, 8, "block", "1gbit", (8, 8 * KIB, 128 * KIB), NAMES, 0.3),
            Case(2, 2, "block", "1gbit", (8,), (*MPIS, "MPICH"), 0.3),
        ),
    ),
    "one_host": Messages(
        "One host: shared memory against what others do, and against a copy of the array.",
        (
            Case(1, 2, "block", "unlimited", SHARED, LOCAL, has_cores=True),
            Case(1, 4, "block", "unlimited", SHARED[3:], LOCAL[:3]),
        ),
        (Case(1, 2, "block", "unlimited", (8, 64 * KIB, 16 * MIB), LOCAL, 0.3, has_cores=True),),
    ),
    "from_mpi4py": FromMpi4py(
        "From mpi4py: what a program gains that wraps its communicator, and changes nothing else.",
        (
            Case(1, 2, "block", "unlimited", WRAPPED_SIZES, FromMpi4py.NAMES, has_cores=True),
            Case(1, 4, "block", "unlimited", WRAPPED_SIZES, FromMpi4py.NAMES),
            Case(2, 4, "block", "1gbit", WRAPPED_SIZES, FromMpi4py.NAMES),
        ),
        (Case(1, 2, "block", "unlimited", (8, MIB), FromMpi4py.NAMES, 0.3, has_cores=True),),
    ),
}
