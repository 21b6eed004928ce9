"""Our reductions, as a library calls it that hands in arrays and takes arrays."""

import statistics
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI
from turns import Task, is_right, serve

import mpistrat
import mpistrat.mpi4py
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.reduction import ReduceOp
from mpistrat.tools.bench import Race, slowest_seconds

strategy = mpistrat.MultiWorkerMirroredStrategy()
communicator = strategy.extended.communicator
comm = communicator.hierarchy.world_group.comm
context = mpistrat.get_replica_context
expected = comm.size * (comm.size + 1) // 2


def all_reduce(request: dict[str, Any]) -> Task:
    """Sum one array; ``dtype`` and ``options`` may be said."""
    dtype = np.dtype(request.get("dtype", "float32"))
    return _task([request["nbytes"] // dtype.itemsize], dtype, request.get("options"))


def reduce_scatter(request: dict[str, Any]) -> Task:
    """Sum one array of float32, and get a part of it; the parts are equal."""
    source = np.full(request["nbytes"] // 4, comm.rank + 1, np.float32)
    target = np.empty(source.size // comm.size, np.float32)
    run = partial(communicator.reduce_scatter, ReduceOp.SUM, source, out=target)
    return Task(run, lambda: is_right([target], expected), comm.Barrier)


def many(request: dict[str, Any]) -> Task:
    """Sum arrays of float32: ``how`` is ``batch`` or ``each``."""
    return _task(request["counts"], np.dtype(np.float32), request.get("options"), request["how"] == "each")


def _task(counts: list[int], dtype: np.dtype[Any], fields: dict[str, Any] | None, each: bool = False) -> Task:
    options = CommunicationOptions(**fields) if fields else None
    sources = [np.full(count, comm.rank + 1, dtype) for count in counts]
    targets = [np.empty_like(source) for source in sources]

    def batch() -> None:
        communicator.all_reduce(ReduceOp.SUM, sources, options, targets)

    def one_by_one() -> None:
        for source, target in zip(sources, targets, strict=True):
            communicator.all_reduce(ReduceOp.SUM, [source], options, [target])

    plan = communicator.explain(sources, options).packs[0].choice.plan.algorithm
    return Task(one_by_one if each else batch, lambda: is_right(targets, expected), comm.Barrier, {"plan": plan})


def copy_bytes_per_second(nbytes: int) -> float:
    """Return the bytes that each rank reads and writes per second while all copy arrays of this size (as STREAM does)."""
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    [seconds] = Race(comm, [lambda: np.copyto(target, source)]).run()
    return 2 * nbytes / seconds


def overhead(leaves: int, calls: int) -> dict[str, float]:
    """Return the medians, in seconds, of a nest of arrays of 8 bytes, and of bare MPI_Allreduce of as many bytes, in turns."""
    value = [np.full(2, comm.rank + 1, np.float32) for _ in range(leaves)]
    value = value[0] if leaves == 1 else {f"leaf {index}": leaf for index, leaf in enumerate(value)}
    source = np.full(2 * leaves, comm.rank + 1, np.float32)
    target = np.empty_like(source)
    runs = {"bare": lambda: comm.Allreduce(source, target), "ours": lambda: context().all_reduce("sum", value)}
    medians = Race(comm, list(runs.values()), calls).run()
    return dict(zip(runs, medians, strict=True))


def forms(nbytes: int, calls: int) -> dict[str, float]:
    """Return the medians, in seconds, of every form of an all-reduce of float32 that was made before, in turns."""
    x, y = np.zeros(nbytes // 4, np.float32), np.zeros(nbytes // 4, np.float32)
    ten, others = ([np.zeros(nbytes // 4, np.float32) for _ in range(10)] for _ in range(2))
    packed, sums, wrapped = CommunicationOptions(num_packs=1), communicator.all_reduce, mpistrat.mpi4py.wrap(comm)
    copying = mpistrat.HierarchicalCopyAllReduce().all_reduce_options(communicator, None)
    whole, received = (np.zeros(comm.size * x.size, np.float32) for _ in range(2))
    typed, nest = ([x, MPI.FLOAT], [y, MPI.FLOAT]), dict(enumerate(ten))
    runs = {
        "bare `MPI_Allreduce`": lambda: comm.Allreduce(x, y),
        "one array": lambda: sums(ReduceOp.SUM, x),
        "`out=`": lambda: sums(ReduceOp.SUM, x, out=y),
        "in place": lambda: sums(ReduceOp.SUM, y, out=y),
        "maximum": lambda: sums(ReduceOp.MAX, x),
        "a number": lambda: sums(ReduceOp.SUM, 1.5),
        "mean": lambda: sums(ReduceOp.MEAN, x),
        "mean, `out=`": lambda: sums(ReduceOp.MEAN, x, out=y),
        "options of the call": lambda: sums(ReduceOp.SUM, x, packed),
        "`HierarchicalCopyAllReduce()`": lambda: sums(ReduceOp.SUM, x, copying),
        "`start_all_reduce` and `wait`": lambda: communicator.start_all_reduce(ReduceOp.SUM, x).wait(),
        "ten arrays": lambda: sums(ReduceOp.SUM, ten),
        "ten arrays, in place": lambda: sums(ReduceOp.SUM, others, out=others),
        "`context.all_reduce`": lambda: context().all_reduce("sum", x),
        "`context.all_reduce`, dict of ten": lambda: context().all_reduce("sum", nest),
        "`reduce_scatter`": lambda: communicator.reduce_scatter(ReduceOp.SUM, whole, out=y),
        "bare `MPI_Allgather`": lambda: comm.Allgather(x, whole),
        "`all_gather`": lambda: communicator.all_gather(x, out=whole),
        "bare `MPI_Bcast`": lambda: comm.Bcast(y),
        "`broadcast`": lambda: communicator.broadcast(x, out=y),
        "bare `MPI_Alltoall`": lambda: comm.Alltoall(whole, received),
        "`all_to_all`": lambda: communicator.all_to_all([x] * comm.size),
        "`barrier`": communicator.barrier,
        "wrapped `Allreduce`": lambda: wrapped.Allreduce(x, y),
        "wrapped `Allreduce`, `[x, MPI.FLOAT]`": lambda: wrapped.Allreduce(*typed),
        "wrapped `Allreduce`, `IN_PLACE`": lambda: wrapped.Allreduce(MPI.IN_PLACE, y),
        "wrapped `Iallreduce` and `Wait`": lambda: wrapped.Iallreduce(x, y).Wait(),
    }
    for run in runs.values():
        run()
    medians = Race(comm, list(runs.values()), calls).run()
    wrapped._communicator.close()
    return dict(zip(runs, medians, strict=True))


def memory(counts: list[int], options: dict[str, Any]) -> dict[str, Any]:
    """Sum arrays as one batch; return what is held afterwards, and what was then allocated by ten calls more."""
    sources = [np.full(count, comm.rank + 1, np.float32) for count in counts]
    targets = [np.empty_like(source) for source in sources]
    wanted = CommunicationOptions(**options)
    communicator.all_reduce(ReduceOp.SUM, sources, wanted, targets)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for _ in range(10):
        communicator.all_reduce(ReduceOp.SUM, sources, wanted, targets)
    after, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    report = strategy.memory_report()
    return {**asdict(report), "total_bytes": report.total_bytes, "grown_bytes": after - before, "peak_bytes": peak - before}


def overlap(nbytes: int, num_buckets: int, kind: str) -> list[float]:
    """Return the seconds of computing, of as long a sum of so many buckets, and of both at once."""
    buckets = [np.ones(nbytes // 4 // num_buckets, np.float32) for _ in range(num_buckets)]
    totals = [np.empty_like(bucket) for bucket in buckets]
    piece, pieces = _piece(kind), 1

    def compute() -> None:
        for _ in range(num_buckets * pieces):
            piece()

    def communicate() -> None:
        for bucket, total in zip(buckets, totals, strict=True):
            communicator.all_reduce(ReduceOp.SUM, [bucket], out=[total])

    def both() -> None:
        works = []
        for bucket, total in zip(buckets, totals, strict=True):
            for _ in range(pieces):
                piece()
            works.append(communicator.start_all_reduce(ReduceOp.SUM, [bucket], out=[total]))
        for work in works:
            work.wait()

    both()
    assert all((total == comm.size).all() for total in totals), "the sums are wrong"
    a_piece = statistics.median(slowest_seconds(comm, compute, 10)) / num_buckets
    pieces = max(1, round(statistics.median(slowest_seconds(comm, communicate, 5)) / a_piece / num_buckets))
    turns = [[slowest_seconds(comm, run, 1)[0] for run in (compute, communicate, both)] for _ in range(5)]
    return [statistics.median(times) for times in zip(*turns, strict=True)]


def _piece(kind: str) -> Callable[[], object]:
    """Return a piece of computing that takes some tens to hundreds of microseconds."""
    if kind == "matmul":
        matrix = np.random.default_rng(0).random((192, 192), np.float32)
        product = np.empty_like(matrix)
        return lambda: np.matmul(matrix, matrix, out=product)
    line = np.ones(1 << 16, np.float32)
    return lambda: np.multiply(line, np.float32(1), out=line)


def steps_per_second(nbytes: int, times: int) -> float:
    """Return how many steps of synchronous training a replica makes: each reduces a gradient, and changes the weights."""
    weights, gradient, started = np.zeros(nbytes // 4, np.float32), np.ones(nbytes // 4, np.float32), 0.0
    for step in range(-3, times):
        if step == 0:
            started = time.perf_counter()
        weights -= context().all_reduce("mean", gradient)
    assert (weights == -(times + 3)).all(), "a step is missing"
    return times / (time.perf_counter() - started)


CALLS = {call.__name__: call for call in (copy_bytes_per_second, forms, memory, overhead, overlap, steps_per_second)}

if __name__ == "__main__":
    tasks = {"all_reduce": all_reduce, "reduce_scatter": reduce_scatter, "many": many}
    strategy.run(lambda: serve(comm.rank, {"mpistrat": mpistrat.__version__}, tasks, CALLS))
