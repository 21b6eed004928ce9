"""Every verb on arrays of some kind, through a strategy, compared with what NumPy makes of the arrays of all ranks.

Where ranks compute on GPUs the arrays are of their memory, and go the way through all layers: strategies, buckets, plans and
transports. Values are whole numbers, of which every order of adding makes the same.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import mpistrat
from mpistrat.arrays import is_on_device
from mpistrat.device.binding import bound_device
from tests.gpu.program import with_strategy, write_report
from tests.reference import of_verb

DTYPES = ("float32", "float64", "int32", "int64", "int16", "complex64", "float16", ml_dtypes.bfloat16)
SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (3, 5), (0, 4), (257, 129), (300_001,))
SMALL_SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (3, 5), (0, 4), (33, 17), (5001,))  # in their place, where that is slow
OPS = ("sum", "mean", "min", "max")
LARGEST = 7  # sums of the narrowest dtype stay exact

Case = tuple[str, Callable[[], Sequence[Any]], Sequence[NDArray[Any]]]
"""What is called, what calls it and returns arrays, and what these should be."""


def check(strategy: mpistrat.Strategy) -> dict[str, Any]:
    """Try the verbs; return how many results were compared, and on what. A collective call."""
    [compared] = strategy.experimental_local_results(strategy.run(_try_all, args=(strategy,)))
    path = strategy.extended.communicator.path or "arrays in host memory"
    return {"compared": compared, "replicas": strategy.num_replicas_in_sync, "path": path}


def _try_all(strategy: mpistrat.Strategy) -> int:
    """Return how many results were compared."""
    compared = 0
    for dtype in map(np.dtype, DTYPES):
        for what, call, expected in cases(strategy, dtype, strategy.array_module.asarray):
            for turn in range(2):  # the second call finds its plan
                compared += compare(f"{what}, call {turn}", call(), expected, _on_host)
    return compared


def compare(what: str, found: Sequence[Any], expected: Sequence[NDArray[Any]], read: Callable[[Any], NDArray[Any]]) -> int:
    """Compare arrays, which are read first, and return how many."""
    for array, wanted in zip(map(read, found), expected, strict=True):
        if array.shape != wanted.shape or array.dtype != wanted.dtype or array.tobytes() != wanted.tobytes():
            raise AssertionError(f"{what}: got {array.dtype} {array.shape}, and not what NumPy makes of it")
    return len(expected)


def cases(
    strategy: mpistrat.Strategy, dtype: np.dtype[Any], make: Callable[[NDArray[Any]], Any], can_be_written: bool = True
) -> Iterator[Case]:
    """Return cases of all verbs in a replica context; each makes its arrays when it is called."""
    context, communicator = mpistrat.get_replica_context(), strategy.communicator
    size, me = strategy.num_replicas_in_sync, context.replica_id_in_sync_group
    every, last = [_rows(dtype, shape, size, seed) for seed, shape in enumerate(SHAPES)], size - 1
    small, large = every[2], every[4]
    in_order = mpistrat.experimental.CommunicationOptions(deterministic=True)
    # rank r gathers r + 1 columns, and sends r + i rows to rank i
    columns = [rows[:, : rank + 1] for rank, rows in enumerate(large)]
    sent = [rows[: me + rank] for rank, rows in enumerate(large)]

    def has(verb: str, rows: Sequence[NDArray[Any]], place: int | None = None, op: str = "") -> Any:
        """Return what this replica has after a verb."""
        return of_verb(verb, list(rows), place, me, op.upper())[0]

    def mine(rows: Sequence[NDArray[Any]] | NDArray[Any]) -> Any:
        return make(np.array(rows[me]))  # a copy, which calls may write to

    def all_mine() -> list[Any]:
        return [mine(rows) for rows in every]

    def into(call: Callable[[Any], Any], *targets: Any) -> Sequence[Any]:
        for found, target in zip(call(list(targets)), targets, strict=True):
            assert found is target, "another array came back"
        return targets

    def reduced(op: str, axis: int) -> Iterator[Case]:
        expected, part = [has("all_reduce", rows, None, op) for rows in every], has("reduce_scatter", large, axis, op)
        yield f"all_reduce({op}, {dtype})", lambda: context.all_reduce(op, all_mine()), expected
        yield f"start_all_reduce({op}, {dtype})", lambda: context.start_all_reduce(op, all_mine()).wait(), expected
        yield f"reduce_scatter({op}, {dtype}, {axis})", lambda: [context.reduce_scatter(op, mine(large), axis)], [part]

    def of_root(root: int) -> Iterator[Case]:
        gathered = has("gather", small, root) or []
        yield f"broadcast({dtype}, {root})", lambda: [context.broadcast(mine(large), root)], [has("broadcast", large, root)]
        yield f"gather({dtype}, {root})", lambda: communicator.gather(mine(small), root) or [], gathered

    for index, op in enumerate(OPS if dtype.kind != "c" else ("sum", "mean")):
        yield from reduced(op, index % 2)
    for root in {0, last}:
        yield from of_root(root)
    sums = [has("all_reduce", rows, None, "sum") for rows in every]
    whole, together = has("all_gather", small, 0), has("all_gather", columns, 1)
    yield f"all_reduce({dtype}), deterministic", lambda: [context.all_reduce("sum", mine(large), in_order)], [sums[4]]
    yield f"all_gather({dtype})", lambda: [context.all_gather(mine(small), 0)], [whole]
    yield f"all_gather({dtype}) of unequal arrays", lambda: [context.all_gather(mine(columns), 1)], [together]
    yield f"all_to_all({dtype})", lambda: context.all_to_all([make(large[me][: me + peer]) for peer in range(size)]), sent
    yield f"all_to_all({dtype}) of one array", lambda: [communicator.all_to_all(mine(large))], [has("all_to_all", large)]
    if not can_be_written:
        return
    in_place = lambda arrays: communicator.all_reduce("sum", arrays, out=arrays)  # noqa: E731
    gather = lambda targets: communicator.all_gather([mine(columns)], 1, out=targets)  # noqa: E731
    receive = lambda arrays: communicator.broadcast(arrays, last, out=arrays)  # noqa: E731
    yield f"all_reduce({dtype}) in place", lambda: into(in_place, *all_mine()), sums
    yield f"all_gather({dtype}) into an array", lambda: into(gather, make(np.zeros_like(together))), [together]
    yield f"broadcast({dtype}) in place", lambda: into(receive, mine(large)), [large[last]]


def _on_host(array: Any) -> NDArray[Any]:
    device = bound_device()
    return device.get(array) if device and is_on_device(array) else np.asarray(array)


def _rows(dtype: np.dtype[Any], shape: tuple[int, ...], size: int, seed: int) -> NDArray[Any]:
    """Return whole numbers, a row for each replica."""
    return np.random.default_rng(seed).integers(-LARGEST, LARGEST + 1, (size, *shape)).astype(dtype)


if __name__ == "__main__":
    write_report(lambda: with_strategy(check))
