"""Race: collective calls that do the same, timed in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI

BUDGET_SECONDS = 1.0
MIN_BLOCKS, MAX_BLOCKS = 3, 20
MIN_ROUNDS, MAX_ROUNDS = 3, 20  # in a block; a third as many come first, untimed


class Race:
    """Times collective calls that do the same in alternating blocks, so that drift of the machine favours none.

    A block begins with untimed calls: a real program repeats one call, and finds its own data in the cache. It has `min_rounds`
    or more; with less than 3 there are no untimed ones. Making one makes each call once, and is a collective call.
    """

    def __init__(self, comm: MPI.Intracomm, calls: Sequence[Callable[[], object]], min_rounds: int = MIN_ROUNDS) -> None:
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


def slowest_seconds(comm: MPI.Intracomm, call: Callable[[], object], rounds: int) -> list[float]:
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
