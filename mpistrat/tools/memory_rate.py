"""The memory bandwidth of all ranks that copy at once: the limit of a collective inside a node."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import numpy as np

from mpistrat.arrays import Array

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["copy_bytes_per_second"]

BUDGET_SECONDS = 0.3
MIN_ROUNDS, MAX_ROUNDS = 5, 100


def copy_bytes_per_second(comm: MPI.Intracomm, nbytes: int) -> float:
    """Return the bytes that each rank reads and writes per second while all copy arrays of their own. A collective call.

    Parameters
    ----------
    comm : MPI.Intracomm
        The ranks that copy at the same time; the slowest of them counts.
    nbytes : int
        Bytes of the array that each rank copies; if it fits the caches, their bandwidth is measured.

    Returns
    -------
    float
        Twice `nbytes`, read once and written once, over the median time of the slowest rank; the same on all ranks.

    Notes
    -----
    This is the copy kernel of McCalpin's STREAM: Sustainable Memory Bandwidth in High Performance Computers.
    """
    from mpi4py import MPI

    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    affordable: float = comm.allreduce(BUDGET_SECONDS / _copy_seconds(comm, source, target), MPI.MIN)
    rounds = int(min(max(affordable, MIN_ROUNDS), MAX_ROUNDS))
    mine = [_copy_seconds(comm, source, target) for _ in range(rounds)]
    slowest: list[float] = [max(times) for times in zip(*comm.allgather(mine), strict=True)]
    return 2 * nbytes / statistics.median(slowest)


def _copy_seconds(comm: MPI.Intracomm, source: Array, target: Array) -> float:
    comm.Barrier()
    started = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - started
