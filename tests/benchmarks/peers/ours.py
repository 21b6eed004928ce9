"""Our all-reduce, as a library calls it that hands in arrays and takes arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from turns import Task, serve

import mpistrat
from mpistrat.cross_device.options import CommunicationOptions
from mpistrat.reduction import ReduceOp

strategy = mpistrat.MultiWorkerMirroredStrategy()
collectives = strategy.extended.collectives
comm = collectives.hierarchy.world_group.comm
expected = comm.size * (comm.size + 1) // 2


def all_reduce(request: dict[str, Any]) -> Task:
    """Sum one array; ``dtype`` and ``options`` may be said."""
    dtype = np.dtype(request.get("dtype", "float32"))
    return _task([request["nbytes"] // dtype.itemsize], dtype, request.get("options"))


def many(request: dict[str, Any]) -> Task:
    """Sum arrays of float32: ``how`` is ``batch`` or ``each``."""
    return _task(request["counts"], np.dtype(np.float32), request.get("options"), request["how"] == "each")


def _task(counts: list[int], dtype: np.dtype[Any], fields: dict[str, Any] | None, each: bool = False) -> Task:
    options = CommunicationOptions(**fields) if fields else None
    sources = [np.full(count, comm.rank + 1, dtype) for count in counts]
    targets = [np.empty_like(source) for source in sources]

    def batch() -> None:
        collectives.all_reduce(ReduceOp.SUM, sources, options, targets)

    def one_by_one() -> None:
        for source, target in zip(sources, targets, strict=True):
            collectives.all_reduce(ReduceOp.SUM, [source], options, [target])

    plan = collectives.choose(sum(counts), dtype, options).plan.algorithm
    return Task(one_by_one if each else batch, lambda: is_right(targets), comm.Barrier, {"plan": plan})


def is_right(targets: list[np.ndarray]) -> bool:
    """Return whether every element is the sum, and spoil them."""
    right = all(bool((target == expected).all()) for target in targets)
    for target in targets:
        target.fill(np.nan)
    return right


def copy_bytes_per_second(nbytes: int) -> float:
    """Return how fast the ranks copy memory."""
    from mpistrat.tools.memory_rate import copy_bytes_per_second

    return copy_bytes_per_second(comm, nbytes)


if __name__ == "__main__":
    serve(
        comm.rank,
        {"mpistrat": mpistrat.__version__},
        {"all_reduce": all_reduce, "many": many},
        {"copy_bytes_per_second": copy_bytes_per_second},
    )
