"""Benchmark every algorithm on the ranks of this job."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
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
_MIN_PASSES, _MAX_PASSES = 3, 8  # over all sizes in turn, so that drift of the machine favours none
_PASS_SECONDS, _ENOUGH_SECONDS = 0.06, 0.5  # of one size: about the time of a pass, and the total after which there is none
_MIN_ROUNDS, _MAX_ROUNDS = 2, 30
_HOPELESS = 1.5  # times the fastest: slower algorithms are tried once in each pass, and not timed in rounds
_SHORT_SECONDS, _TRIES = 0.005, 6

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
    found = race(comm, runs, sizes, report)
    crossings = [2 * smaller for smaller, larger in pairwise(sizes) if _fastest(found[smaller]) != _fastest(found[larger])]
    found |= race(comm, runs, crossings, report)
    for each in measured.values():
        each.close()
    return [
        Measurement(world, name, num_bytes, seconds)
        for num_bytes in sorted(found)
        for name, seconds in found[num_bytes].items()
    ]


class _Race:
    """What is timed at one size: seconds of the best try by name, and of each round of those that are not hopelessly slow."""

    def __init__(self, comm: MPI.Intracomm, runs: dict[str, Run]) -> None:
        self._comm, self._runs = comm, runs
        self.tried: Times = {}
        for name in runs:
            self._try(name)
        self.samples: dict[str, list[float]] = {}
        self._admit()
        affordable = _PASS_SECONDS / sum(self.tried[name] for name in self.samples)
        self._rounds = int(min(max(affordable, _MIN_ROUNDS), _MAX_ROUNDS))

    def _try(self, name: str) -> None:
        try:
            self._runs[name]()
        except TransportError:  # raised on all ranks: too little shared memory for this algorithm
            return
        [seconds] = slowest_seconds(self._comm, self._runs[name], 1)
        if seconds < _SHORT_SECONDS:  # short calls reach their speed only after some repetitions
            seconds = min(slowest_seconds(self._comm, self._runs[name], _TRIES))
        self.tried[name] = min(seconds, self.tried.get(name, seconds))

    def _admit(self) -> None:
        """Let those take part in the rounds that are not hopelessly slow."""
        limit = _HOPELESS * min(self.tried.values())
        for name, seconds in self.tried.items():
            if seconds < limit:
                self.samples.setdefault(name, [])

    @property
    def seconds(self) -> float:
        """Total time of all rounds so far, the same on all ranks."""
        return sum(map(sum, self.samples.values()))

    def run(self) -> None:
        """Time one pass. A collective call."""
        for name in [name for name in self.tried if name not in self.samples]:
            self._try(name)  # the machine may have been busy when it was slow
        self._admit()
        for name, sample in self.samples.items():
            self._runs[name]()
            sample += slowest_seconds(self._comm, self._runs[name], self._rounds)

    def times(self) -> Times:
        """Return the seconds of each algorithm: the median of its rounds, or the best try of slow ones."""
        return {**self.tried, **{name: statistics.median(sample) for name, sample in self.samples.items() if sample}}


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


def race(
    comm: MPI.Intracomm,
    runs: Callable[[int], dict[str, Run]],
    sizes: list[int],
    report: Callable[[int, Times], None] | None = None,
) -> dict[int, Times]:
    """Return the seconds of each way to do one thing, by name, at some sizes. A collective call."""
    racing = {num_bytes: _Race(comm, runs(num_bytes)) for num_bytes in sizes}
    for count in range(_MAX_PASSES):
        for each in racing.values():
            if count < _MIN_PASSES or each.seconds < _ENOUGH_SECONDS:
                each.run()
    found = {num_bytes: each.times() for num_bytes, each in racing.items()}
    for num_bytes, times in found.items():
        if report is not None:
            report(num_bytes, times)
    return found


def _sizes(max_bytes: int) -> list[int]:
    sizes = [1 << max(max_bytes.bit_length() - 1, _MIN_BYTES.bit_length() - 1)]
    while sizes[-1] // _STEP_FACTOR >= _MIN_BYTES:
        sizes.append(sizes[-1] // _STEP_FACTOR)
    return sizes[::-1]


def _fastest(times: Times) -> str:
    return min(times, key=lambda name: times[name])
