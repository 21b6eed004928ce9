"""Every verb of a replica context on this rank's arrays, compared with what NumPy makes of the arrays of all ranks.

    mpistrat run -n 4 --nodes 2x2 -m tests.gpu.verbs_rank --report FILE

Where ranks compute on GPUs the arrays are of their memory, and go the way through all layers: strategies, buckets, plans and
transports. Values are whole numbers, of which every order of adding makes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import mpistrat
from mpistrat.arrays import is_on_device
from mpistrat.device.binding import bound_device
from mpistrat.experimental import CommunicationOptions
from tests.gpu.program import with_strategy, write_report

DTYPES = ("float32", "float64", "int32", "int64", "int16", "complex64", "float16", ml_dtypes.bfloat16)
SHAPES = ((), (1,), (3, 5), (0, 4), (257, 129), (300_001,))
OPS: dict[str, Callable[[NDArray[Any]], NDArray[Any]]] = {
    "sum": lambda rows: rows.sum(axis=0, dtype=rows.dtype),
    "mean": lambda rows: (rows.sum(axis=0, dtype=rows.dtype) / len(rows)).astype(rows.dtype),
    "min": lambda rows: rows.min(axis=0),
    "max": lambda rows: rows.max(axis=0),
}
LARGEST = 7  # sums of the narrowest dtype stay exact


def check(strategy: mpistrat.Strategy) -> dict[str, Any]:
    """Try the verbs; return how many results were compared, and on what. A collective call."""
    [compared] = strategy.experimental_local_results(strategy.run(_try_all, args=(strategy,)))
    return {"compared": compared, "replicas": strategy.num_replicas_in_sync, "path": _path(strategy)}


def _path(strategy: mpistrat.Strategy) -> str:
    """Return which way the arrays took."""
    communicator = strategy.extended.communicator
    return communicator.path or "arrays in host memory"


def _try_all(strategy: mpistrat.Strategy) -> int:
    """Return how many results were compared."""
    compared = 0
    for what, found, expected in _results(strategy):
        for array, wanted in zip(map(_on_host, found), expected, strict=True):
            compared += 1
            if array.shape != wanted.shape or array.dtype != wanted.dtype or array.tobytes() != wanted.tobytes():
                raise AssertionError(f"{what}: got {array.dtype} {array.shape}, and not what NumPy makes of it")
    return compared


def _results(strategy: mpistrat.Strategy) -> Iterator[tuple[str, Sequence[Any], Sequence[NDArray[Any]]]]:
    """Return what was called, what came, and what should have come, each as a list of arrays."""
    context, module = mpistrat.get_replica_context(), strategy.array_module
    size, me = strategy.num_replicas_in_sync, context.replica_id_in_sync_group
    for seed, kind in enumerate(DTYPES):
        dtype = np.dtype(kind)
        every = [_rows(dtype, shape, size, seed) for shape in SHAPES]
        mine = [module.asarray(rows[me]) for rows in every]
        for op, combine in OPS.items():
            if dtype.kind == "c" and op in ("min", "max"):
                continue
            expected = [combine(rows) for rows in every]
            for turn in range(2):  # the second call finds its plan
                yield f"all_reduce({op}, {dtype}), call {turn}", context.all_reduce(op, mine), expected
            yield f"start_all_reduce({op}, {dtype})", context.start_all_reduce(op, mine).wait(), expected
        last = size - 1
        yield f"broadcast({dtype})", [context.broadcast(mine[4], last)], [every[4][last]]
        yield f"all_gather({dtype})", [context.all_gather(mine[2], 0)], [np.concatenate(list(every[2]))]
        for op, rows in (("sum", every[4]), ("mean", every[2])):
            part = np.array_split(OPS[op](rows), size)[me]
            yield f"reduce_scatter({op}, {dtype})", [context.reduce_scatter(op, module.asarray(rows[me]))], [part]
        # rank r sends r + i rows to rank i
        sends = [module.asarray(every[4][me][: me + peer]) for peer in range(size)]
        yield f"all_to_all({dtype})", context.all_to_all(sends), [every[4][peer][: me + peer] for peer in range(size)]
        uneven = [every[4][peer][: peer + 1] for peer in range(size)]
        yield (
            f"all_gather({dtype}) of unequal arrays",
            [context.all_gather(module.asarray(uneven[me]), 0)],
            [np.concatenate(uneven)],
        )
        gathered = strategy.communicator.gather(mine[2], last)
        yield f"gather({dtype})", gathered or [], list(every[2]) if me == last else []
        targets = [module.asarray(array) for array in (every[4][me], every[5][me])]
        expected = [OPS["sum"](every[4]), OPS["sum"](every[5])]
        yield f"all_reduce({dtype}) in place", context.all_reduce("sum", targets, out=targets), expected
    options = CommunicationOptions(deterministic=True)
    rows = _rows(np.dtype(np.float32), (1001,), size, 99)
    found = context.all_reduce("sum", module.asarray(rows[me]), options)
    yield "all_reduce, deterministic", [found], [OPS["sum"](rows)]


def _on_host(array: Any) -> NDArray[Any]:
    device = bound_device()
    return device.get(array) if device and is_on_device(array) else np.asarray(array)


def _rows(dtype: np.dtype[Any], shape: tuple[int, ...], size: int, seed: int) -> NDArray[Any]:
    """Return whole numbers, a row for each replica."""
    return np.random.default_rng(seed).integers(-LARGEST, LARGEST + 1, (size, *shape)).astype(dtype)


if __name__ == "__main__":
    write_report(lambda: with_strategy(check))
