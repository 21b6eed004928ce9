"""Benchmark every algorithm on the ranks of this job."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import numpy as np

from mpistrat.algorithms.choose import PLANNERS
from mpistrat.arrays import Array
from mpistrat.errors import TransportError
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.reduction import ReduceOp
from mpistrat.topology.world import World
from mpistrat.tuning.model import ITEM_BYTES, Measurement

if TYPE_CHECKING:
    from mpi4py import MPI

MAX_BYTES = 2**24
_MIN_BYTES, _STEP_FACTOR = 16, 4
BUDGET_SECONDS = 1.0  # of one size
MIN_BLOCKS, MAX_BLOCKS = 3, 20
MIN_ROUNDS, MAX_ROUNDS = 3, 20  # in a block; a third as many come first, untimed

Times = dict[str, float]
Run = Callable[[], object]


class Measured(Protocol):
    """A communicator, as far as it is measured."""

    def all_reduce(self, op: ReduceOp, arrays: list[Array], options: None, out: list[Array], /) -> object:
        """Combine arrays across ranks."""

    def close(self) -> None:
        """Free its memory."""


Make = Callable[[Hierarchy, str], Measured]


def measure(
    comm: MPI.Intracomm,
    world: World,
    make: Make,
    max_bytes: int | None = None,
    report: Callable[[int, Times], None] | None = None,
) -> list[Measurement]:
    """Return the time of each algorithm on a world, from 16 bytes up. A collective call.

    Sizes increase by a factor of 4; where the fastest algorithm changes, the size between is measured too. Algorithms are timed
    in alternating blocks of repeated calls.

    `comm` has the ranks of `world`, in order, and is only duplicated. `make` returns a communicator over a hierarchy that uses
    the algorithm with a name. The largest size is `max_bytes`, rounded down to a power of two; MAX_BYTES by default. `report`
    is called with each size and the seconds of each algorithm, the same on all ranks.
    """
    measured = {name: make(Hierarchy(comm, world), name) for name in PLANNERS}

    def runs(num_bytes: int) -> dict[str, Run]:
        arrays: list[Array] = [np.ones(num_bytes // ITEM_BYTES, np.float32)]
        targets: list[Array] = [np.empty_like(arrays[0])]
        return {name: partial(each.all_reduce, ReduceOp.SUM, arrays, None, targets) for name, each in measured.items()}

    sizes = _sizes(max_bytes or MAX_BYTES)
    found = _measure_sizes(comm, runs, sizes, report)
    crossings = [2 * smaller for smaller, larger in pairwise(sizes) if _fastest(found[smaller]) != _fastest(found[larger])]
    found |= _measure_sizes(comm, runs, crossings, report)
    for each in measured.values():
        each.close()
    return [
        Measurement(world, name, num_bytes, seconds)
        for num_bytes in sorted(found)
        for name, seconds in found[num_bytes].items()
    ]


def _measure_sizes(
    comm: MPI.Intracomm,
    runs: Callable[[int], dict[str, Run]],
    sizes: list[int],
    report: Callable[[int, Times], None] | None,
) -> dict[int, Times]:
    """Return the seconds of each algorithm that runs, by name, at some sizes."""
    possible = {num_bytes: {name: run for name, run in runs(num_bytes).items() if _works(run)} for num_bytes in sizes}
    races = {num_bytes: Race(comm, [*found.values()]) for num_bytes, found in possible.items()}
    while going := [race for race in races.values() if not race.is_over]:  # all sizes in turn: drift favours none
        for race in going:
            race.run_block()
    times = {num_bytes: dict(zip(possible[num_bytes], race.medians(), strict=True)) for num_bytes, race in races.items()}
    if report is not None:
        for num_bytes in sizes:
            report(num_bytes, times[num_bytes])
    return times


def _works(run: Run) -> bool:
    try:
        run()
    except TransportError:  # raised on all ranks: too little shared memory for this algorithm
        return False
    return True


class Race:
    """Times collective calls that do the same in alternating blocks, so that drift of the machine favours none.

    A block begins with untimed calls: a real program repeats one call, and finds its own data in the cache. It has `min_rounds`
    or more; with less than 3 there are no untimed ones. Making one makes each call once, and is a collective call.
    """

    def __init__(self, comm: MPI.Intracomm, calls: Sequence[Run], min_rounds: int = MIN_ROUNDS) -> None:
        self._comm, self._calls = comm, calls
        self._times: list[list[float]] = [[] for _ in calls]
        [spent] = slowest_seconds(comm, lambda: [call() for call in calls], 1)
        self._rounds = int(min(max(BUDGET_SECONDS / MIN_BLOCKS / spent, min_rounds), MAX_ROUNDS))

    @property
    def rounds(self) -> int:
        """How many calls of each were timed."""
        return len(self._times[0])

    @property
    def is_over(self) -> bool:
        """Whether enough was timed; the same on all ranks."""
        blocks, seconds = self.rounds // self._rounds, sum(map(sum, self._times))
        return blocks >= MIN_BLOCKS and (blocks >= MAX_BLOCKS or seconds >= BUDGET_SECONDS)

    def run_block(self) -> None:
        """Time a block of each call. A collective call."""
        for call, found in zip(self._calls, self._times, strict=True):
            for _ in range(self._rounds // 3):
                self._comm.Barrier()
                call()
            found += slowest_seconds(self._comm, call, self._rounds)

    def medians(self) -> list[float]:
        """Return the median time of each call, over all rounds; the same on all ranks."""
        return [statistics.median(found) for found in self._times]

    def run(self) -> list[float]:
        """Time all blocks, and return the medians. A collective call."""
        while not self.is_over:
            self.run_block()
        return self.medians()


def slowest_seconds(comm: MPI.Intracomm, call: Run, rounds: int) -> list[float]:
    """Return the time of the slowest rank in each of some rounds of a collective call. A collective call."""
    from mpi4py import MPI

    mine, slowest = np.empty(rounds), np.empty(rounds)
    for index in range(rounds):
        comm.Barrier()
        started = time.perf_counter()
        call()
        mine[index] = time.perf_counter() - started
    comm.Allreduce(mine, slowest, MPI.MAX)
    return [float(seconds) for seconds in slowest]


def _sizes(max_bytes: int) -> list[int]:
    sizes = [1 << max(max_bytes.bit_length() - 1, _MIN_BYTES.bit_length() - 1)]
    while sizes[-1] // _STEP_FACTOR >= _MIN_BYTES:
        sizes.append(sizes[-1] // _STEP_FACTOR)
    return sizes[::-1]


def _fastest(times: Times) -> str:
    return min(times, key=lambda name: times[name])
