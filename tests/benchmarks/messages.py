"""One array of float32, summed by several programs, in several labs: the experiments on message sizes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mpistrat.text import format_bytes
from tests.benchmarks.contest import KINDS, NAMES, OURS, WRAPPED, Measured, competing
from tests.benchmarks.pages import Table
from tests.benchmarks.session import Session
from tests.hosts.lab import Lab

KIB, MIB = 1 << 10, 1 << 20
MPIS, FEW, TWO = (OURS, "Open MPI", "Open MPI, no HAN"), (OURS, "Open MPI", "gloo"), (OURS, "Open MPI")
LARGE = (MIB, 4 * MIB, 16 * MIB)
SMALL = (8, 128, KIB, 8 * KIB, 32 * KIB, 128 * KIB, 256 * KIB)
SHARED = (8, KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
LOCAL = (OURS, "Open MPI", "MPICH", "gloo", "TensorFlow")
USERS = ("Open MPI", WRAPPED, OURS)  # of mpi4py


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

    @property
    def name(self) -> str:
        """As ``--only`` has it."""
        return f"{self.hosts}x{self.ranks}-{self.placement}"

    @property
    def shape(self) -> str:
        """As tables have it."""
        return shape_of(self.hosts, self.ranks, self.placement)


@dataclass(frozen=True)
class Row:
    """What each program took for a size, and the least time in which the links, or memory, can do it."""

    case: Case
    nbytes: int
    least_seconds: float
    programs: dict[str, Measured]


def large_messages(session: Session) -> dict[str, Table]:
    """Large messages between hosts: how much of the wire an all-reduce uses, by placement and number of hosts."""
    # Open MPI hangs at random placement and on 16 hosts; gloo gives no answer at 16 MiB where neighbours in its ring sit
    # on different hosts
    cases = (
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
    )
    quick = (
        Case(4, 8, "block", "1gbit", LARGE[:2], FEW, 0.3),
        Case(2, 4, "3+1", "1gbit", (4 * MIB,), TWO, 0.3),
        Case(8, 8, "block", "500mbit", (4 * MIB,), TWO, 0.3),
    )
    return {"": table_of_cases(measure(session, cases, quick), shares=True)}


def small_messages(session: Session) -> dict[str, Table]:
    """Small messages between hosts: from 8 B to 256 KiB, against the best peer at each size."""
    places = ((4, 8, "cyclic", "1gbit"), (4, 8, "4+2+1+1", "1gbit"), (2, 2, "block", "1gbit"), (8, 8, "block", "500mbit"))
    cases = [
        Case(4, 8, "block", "1gbit", SMALL, NAMES, 0.5, launches=3),
        *(Case(*place, SMALL, (*MPIS, "MPICH"), 0.5, launches=3) for place in places),
    ]
    quick = (
        Case(4, 8, "block", "1gbit", (8, 8 * KIB, 128 * KIB), NAMES, 0.3),
        Case(2, 2, "block", "1gbit", (8,), (*MPIS, "MPICH"), 0.3),
    )
    return {"": table_of_cases(measure(session, cases, quick))}


def one_host(session: Session) -> dict[str, Table]:
    """One host: shared memory against what others do, and against a copy of the array."""
    cases = (Case(1, 2, "block", "unlimited", SHARED, LOCAL), Case(1, 4, "block", "unlimited", SHARED[3:], LOCAL[:3]))
    quick = (Case(1, 2, "block", "unlimited", (8, 64 * KIB, 16 * MIB), LOCAL, 0.3),)
    return {"": table_of_cases(measure(session, cases, quick))}


def from_mpi4py(session: Session) -> dict[str, Table]:
    """From mpi4py: what a program gains that wraps its communicator, and changes nothing else."""
    places = ((1, 2, "block", "unlimited"), (1, 4, "block", "unlimited"), (2, 4, "block", "1gbit"))
    cases = [Case(*place, (8, 64 * KIB, MIB, 16 * MIB), USERS) for place in places]
    lines = [["hosts × ranks", "size", "mpi4py", "wrapped", "`Communicator.all_reduce`", "mpi4py / wrapped"]]
    for row in measure(session, cases, (Case(1, 2, "block", "unlimited", (8, MIB), USERS, 0.3),)):
        plain, wrapped, ours = (row.programs[name] for name in USERS)
        ratio = f"{plain.seconds / wrapped.seconds:.2f}"
        lines.append([row.case.shape, format_bytes(row.nbytes), str(plain), str(wrapped), str(ours), ratio])
    return {"": lines}


def programs_of(rows: Iterable[Row]) -> list[str]:
    """Return who took part in any of the rows, in the order of tables."""
    there = {name for row in rows for name in row.programs}
    return [name for name in KINDS if name in there]


def table_of_cases(rows: Sequence[Row], shares: bool = False) -> Table:
    """Return the time of each program, ours against the best of the others, and, where asked for, our share of the link."""
    names = programs_of(rows)
    lines = [["hosts × ranks", "placement", "size", *names, "best other / mpistrat", *["share of the link"] * shares]]
    for row in rows:
        ours = row.programs[OURS].seconds
        others = [measured.seconds for name, measured in row.programs.items() if name != OURS]
        cells = [str(row.programs.get(name, "–")) for name in names]
        ratio = f"{min(others) / ours:.2f}" if others else "–"
        share = [f"{row.least_seconds / ours:.2f}"] * shares
        lines.append([row.case.shape, row.case.placement, format_bytes(row.nbytes), *cells, ratio, *share])
    return lines


def measure(session: Session, cases: Sequence[Case], quick: Sequence[Case]) -> list[Row]:
    """Measure every case, or the placements that were asked for, such as ``4x8-block``; quick ones with ``--quick``."""
    chosen = quick if session.quick else [case for case in cases if not session.only or case.name in session.only]
    return [row for case in chosen for row in _measure(session, case)]


def _measure(session: Session, case: Case) -> list[Row]:
    """Return a row for each size; bytes that went round the links are an error."""
    with Lab(case.hosts, case.rate) as lab:
        goodput = lab.goodput_bits(rounds=3, seconds=1.5) if case.hosts > 1 else 0.0
        launches = [_launch(session, case, lab, goodput) for _ in range(case.launches)]
    return [_middle(rows) for rows in zip(*launches, strict=True)]


def _launch(session: Session, case: Case, lab: Lab, goodput: float) -> list[Row]:
    rows = []
    with competing(session, lab, case.ranks, case.placement, case.names) as contest:
        for nbytes in case.sizes:
            task = {"kind": "all_reduce", "nbytes": nbytes}
            measured = contest.alternate({name: (name, task) for name in contest.names}, case.seconds)
            if case.hosts > 1:  # each host sends and receives 2 (n - 1) / n of an array
                least = 2 * (case.hosts - 1) / case.hosts * nbytes * 8 / goodput
            else:  # each byte is read, and written
                least = 2 * nbytes / contest.call(OURS, "copy_bytes_per_second", nbytes=nbytes)[0]
            rows.append(Row(case, nbytes, least, measured))
            session.say(", ".join(table_of_cases(rows[-1:])[1]))
    return rows


def _middle(rows: Sequence[Row]) -> Row:
    """Return one row for several launches: of each program the one with the median time."""
    programs = {}
    for name in programs_of(rows):
        found = sorted((row.programs[name] for row in rows if name in row.programs), key=lambda one: one.seconds)
        programs[name] = found[(len(found) - 1) // 2]
    return Row(rows[0].case, rows[0].nbytes, rows[0].least_seconds, programs)


def shape_of(hosts: int, ranks: int, placement: str = "block") -> str:
    """Return hosts × ranks on each; or the ranks of each host, where they differ."""
    return placement if "+" in placement else f"{hosts}×{ranks // hosts}"
