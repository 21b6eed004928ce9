"""Calls of one array, one after the other, as a program makes them that does nothing else: to see what a change costs."""

import os
import time
from typing import Any

import numpy as np
from mpi4py import MPI
from turns import serve

import mpistrat

strategy = mpistrat.MultiWorkerMirroredStrategy()
comm = MPI.COMM_WORLD.Dup()  # in terms that a library of any age has
context = mpistrat.get_replica_context
_LEAST_SECONDS, _MOST_CALLS = 0.03, 5000


def bind_to_core() -> None:
    """Bind this rank to one core if there are more ranks than cores.

    Otherwise the kernel may leave three of four ranks on one of two cores, where a call takes twice as long as with two each.
    """
    cores = sorted(os.sched_getaffinity(0))
    if comm.size > len(cores):
        os.sched_setaffinity(0, {cores[comm.rank * len(cores) // comm.size]})


def seconds_of_a_call(nbytes: int) -> float:
    """Return how long a call takes, as the mean of a block of calls, and as the slowest rank sees it."""
    value = np.full(nbytes // 8, comm.rank + 1.0)
    for _ in range(3):
        total = context().all_reduce("sum", value)
    if not (total == comm.size * (comm.size + 1) / 2).all():
        raise AssertionError(f"a wrong sum of {nbytes} bytes")
    return _seconds(value)


def seconds_of_a_nest(leaves: int) -> float:
    """Return how long a call takes with a dict of arrays of 8 bytes, in the same way."""
    value = {f"leaf {index}": np.full(2, comm.rank + 1, np.float32) for index in range(leaves)}
    for _ in range(3):
        context().all_reduce("sum", value)
    return _seconds(value)


def _seconds(value: Any) -> float:
    each = comm.allreduce(_block(value, 2), max)
    if each > _LEAST_SECONDS:
        return float(each)
    calls = min(max(int(_LEAST_SECONDS / each), 1), _MOST_CALLS)
    _block(value, min(calls, 50))
    return float(comm.allreduce(_block(value, calls), max))


def _block(value: Any, calls: int) -> float:
    comm.Barrier()
    begun = time.perf_counter()
    for _ in range(calls):
        context().all_reduce("sum", value)
    return (time.perf_counter() - begun) / calls


if __name__ == "__main__":
    bind_to_core()
    tasks = {"seconds_of_a_call": seconds_of_a_call, "seconds_of_a_nest": seconds_of_a_nest}
    strategy.run(lambda: serve(comm.rank, {"mpistrat": mpistrat.__version__}, {}, tasks))
