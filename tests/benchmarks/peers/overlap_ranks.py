"""One rank of the experiment on overlap: compute, communicate, and both at once; rank 0 prints what each took."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

import mpistrat
from mpistrat.reduction import ReduceOp

TURNS = 5


def main() -> None:
    """Time sums of ``sys.argv[1]`` bytes in ``sys.argv[2]`` buckets, and as much computing of the kind ``sys.argv[3]``."""
    nbytes, num_buckets, kind = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    communicator = mpistrat.MultiWorkerMirroredStrategy().extended.communicator
    comm = MPI.COMM_WORLD.Dup()
    buckets = [np.ones(nbytes // 4 // num_buckets, np.float32) for _ in range(num_buckets)]
    totals = [np.empty_like(bucket) for bucket in buckets]
    piece = _piece(kind)

    def seconds(run: Callable[[], None]) -> float:
        comm.Barrier()
        started = time.perf_counter()
        run()
        return float(comm.allreduce(time.perf_counter() - started, MPI.MAX))

    def compute() -> None:
        for _ in range(num_buckets * pieces):
            piece()

    def communicate() -> None:
        for bucket, total in zip(buckets, totals, strict=True):
            communicator.all_reduce(ReduceOp.SUM, [bucket], out=[total])

    def overlap() -> None:
        works = []
        for bucket, total in zip(buckets, totals, strict=True):
            for _ in range(pieces):
                piece()
            works.append(communicator.start_all_reduce(ReduceOp.SUM, [bucket], out=[total]))
        for work in works:
            work.wait()

    pieces = 1
    overlap()
    assert all((total == comm.size).all() for total in totals), "the sums are wrong"
    a_piece = statistics.median(seconds(compute) for _ in range(2 * TURNS)) / num_buckets
    both = statistics.median(seconds(communicate) for _ in range(TURNS))
    pieces = max(1, round(both / a_piece / num_buckets))
    found: dict[str, list[float]] = {"compute": [], "communicate": [], "overlap": []}
    for _ in range(TURNS):
        for name, run in (("compute", compute), ("communicate", communicate), ("overlap", overlap)):
            found[name].append(seconds(run))
    if comm.rank == 0:
        print(json.dumps({name: statistics.median(times) for name, times in found.items()}))


def _piece(kind: str) -> Callable[[], object]:
    """Return a piece of computing that takes some tens to hundreds of microseconds."""
    if kind == "matmul":
        matrix = np.random.default_rng(0).random((192, 192), np.float32)
        product = np.empty_like(matrix)
        return lambda: np.matmul(matrix, matrix, out=product)
    line = np.ones(1 << 16, np.float32)
    return lambda: np.multiply(line, np.float32(1), out=line)


if __name__ == "__main__":
    main()
