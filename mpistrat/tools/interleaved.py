"""Time several calls alternately: each is checked, then timed in alternating blocks, so that drift of the machine favours none.

A block begins with untimed warm-up calls: a real program repeats one call, and finds its own data in the cache.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpistrat.arrays import Array
from mpistrat.errors import CollectiveError

if TYPE_CHECKING:
    from mpi4py import MPI

BUDGET_SECONDS = 1.0
MIN_BLOCKS, MAX_BLOCKS = 3, 20
MIN_ROUNDS, MAX_ROUNDS = 3, 20  # in a block; a third as many come first, untimed


def check_sum(comm: MPI.Intracomm, run: Callable[[], object], target: Array) -> None:
    """Run once on a target filled with NaN, and compare with the exact sum of 1 to the number of ranks. A collective call.

    If an element is wrong on any rank, a CollectiveError is raised on every one.
    """
    from mpi4py import MPI

    target.fill(np.nan)
    run()
    expected = comm.Get_size() * (comm.Get_size() + 1) // 2
    if not comm.allreduce(bool((target == expected).all()), MPI.LAND):
        raise CollectiveError(f"a wrong sum of {target.nbytes} bytes: not every element is {expected} on every rank")


def time_interleaved(
    comm: MPI.Intracomm, calls: Sequence[Callable[[], object]], min_rounds: int = MIN_ROUNDS
) -> tuple[list[float], int]:
    """Time collective calls, each of which has run before. A collective call.

    A block has `min_rounds` or more; with less than 3 there is no warm-up. For each call the median over all rounds of the
    slowest rank's seconds is returned, the same on all ranks, and how many rounds were timed.
    """
    blocks, rounds = _fit(comm, calls, min_rounds)
    times = np.empty((blocks * rounds, len(calls)))
    for block in range(blocks):
        for index, call in enumerate(calls):
            for turn in range(-(rounds // 3), rounds):
                comm.Barrier()
                started = time.perf_counter()
                call()
                if turn >= 0:
                    times[block * rounds + turn, index] = time.perf_counter() - started
    slowest = _slowest(comm, times)
    return [statistics.median(column) for column in slowest.T], blocks * rounds


def _fit(comm: MPI.Intracomm, calls: Sequence[Callable[[], object]], min_rounds: int) -> tuple[int, int]:
    """Return how many blocks, of how many rounds, fit the budget; the same on all ranks."""
    from mpi4py import MPI

    started = time.perf_counter()
    for call in calls:
        call()
    spent: float = comm.allreduce(time.perf_counter() - started, MPI.MAX)
    affordable = BUDGET_SECONDS / spent
    rounds = int(min(max(affordable / MIN_BLOCKS, min_rounds), MAX_ROUNDS))
    return int(min(max(affordable / rounds, MIN_BLOCKS), MAX_BLOCKS)), rounds


def _slowest(comm: MPI.Intracomm, times: Array) -> Array:
    from mpi4py import MPI

    slowest = np.empty_like(times)
    comm.Allreduce(times, slowest, MPI.MAX)
    return slowest
