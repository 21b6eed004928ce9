"""Steps, and strategies that come and go, by the thousand: all results right, and nothing is lost.

Steps mix started and plain collectives of arrays whose sizes come in a cycle that holds more plans than are kept, so that plans
come and go. Strategies are opened, used and closed, two at a time now and then; their buffers grow from 64 KiB to 64 MiB and
begin small again. Values are whole numbers, of which every order of adding makes the same.
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mpistrat
from mpistrat.arrays import to_host
from mpistrat.device import cuda
from mpistrat.launch.bootstrap import start
from tests.gpu.program import with_strategy, write_report

STEPS, SETTLED_STEPS, CYCLE = 2000, 200, 100
LARGEST = 2_000_000
DTYPES = ("float32", "int32", "float64")
SETTLED_ROUNDS = 12
SIZES = tuple(1 << power for power in range(16, 27))

Holding = Callable[[Callable[[], None]], Mapping[str, float]]
"""Returns what is held, given a barrier."""

_SELF = Path("/proc/self")


def holding(barrier: Callable[[], None]) -> dict[str, float]:
    """Return what is held after all that is under way, and without what CuPy keeps for later. A collective call.

    Returns ``device_mib``: memory of the GPU, of all processes on it; ``allocations``: those of this library, and what it
    has mapped of others'; and the ``threads``, open ``files`` and ``mappings`` of this process.
    """
    import cupy

    gc.collect()
    cupy.cuda.runtime.deviceSynchronize()
    cupy.get_default_memory_pool().free_all_blocks()
    cupy.get_default_pinned_memory_pool().free_all_blocks()
    barrier()
    free, total = cupy.cuda.runtime.memGetInfo()
    barrier()
    return {
        "device_mib": (total - free) / (1 << 20),
        "allocations": sum(type(found) is cuda._Memory for found in gc.get_objects()),
        "threads": len(list((_SELF / "task").iterdir())),
        "files": len(list((_SELF / "fd").iterdir())),
        "mappings": len((_SELF / "maps").read_text().splitlines()),
    }


def soak(
    strategy: Any, steps: int = STEPS, settled: int = SETTLED_STEPS, largest: int = LARGEST, held: Holding = holding
) -> dict[str, float]:
    """Take steps, and compare every result. A collective call.

    Returns ``steps``, ``compared``, and how much more is held at the end than after `settled` steps.
    """
    noted: list[Mapping[str, float]] = []

    def run() -> int:
        compared = 0
        for step in range(steps):
            compared += _step(step, largest)
            if step + 1 in (settled, steps):
                noted.append(held(strategy.extended.communicator.barrier))
        return compared

    [compared] = strategy.experimental_local_results(strategy.run(run))
    return {"steps": steps, "compared": compared, "device_mib": round(noted[-1].get("device_mib", 0), 1), **_growth(noted)}


def open_and_close(
    rounds: int, settled: int = SETTLED_ROUNDS, sizes: Sequence[int] = SIZES, held: Holding = holding
) -> dict[str, float]:
    """Open and close strategies, every third time two together. A collective call.

    Returns ``rounds``, and how much more is held at the end than after `settled` rounds.
    """
    comm = start().Dup()
    noted: list[Mapping[str, float]] = []
    for index in range(rounds):
        strategies = [mpistrat.MultiWorkerMirroredStrategy() for _ in range(2 if index % 3 == 2 else 1)]
        for turn in range(2):
            for strategy in strategies:
                _use(strategy, sizes[index % len(sizes)] >> turn)
        for strategy in strategies:
            strategy.close()
        del strategies, strategy
        if index + 1 in (settled, rounds):
            noted.append(held(comm.Barrier))
    comm.Free()
    return {"rounds": rounds, **_growth(noted)}


def _growth(noted: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {f"{name}_growth": round(noted[-1][name] - noted[0][name], 1) for name in noted[0]}


def _step(step: int, largest: int) -> int:
    """Combine a few batches of arrays; return how many results were compared."""
    context = mpistrat.get_replica_context()
    random = np.random.default_rng(step % CYCLE)
    batches = [_batch(random, step, largest) for _ in range(3)]
    mine = [[context.strategy.array_module.asarray(_of(rows, context)) for rows in batch] for batch in batches]
    first = context.start_all_reduce("sum", mine[0])
    if step % 2:
        found = [first.wait(), context.all_reduce("sum", mine[1]), context.start_all_reduce("sum", mine[2]).wait()]
    else:
        second, plain = context.start_all_reduce("sum", mine[1]), context.all_reduce("sum", mine[2])
        found = [first.wait(), second.wait(), plain]
    size = context.num_replicas_in_sync
    for batch, results in zip(batches, found, strict=True):
        for rows, result in zip(batch, results, strict=True):
            _check(result, rows * (size * (size + 1) // 2), rows.dtype, f"step {step}")
    return sum(map(len, batches))


def _batch(random: np.random.Generator, step: int, largest: int) -> list[NDArray[Any]]:
    """Return what each replica multiplies to get its arrays."""
    counts = np.exp(random.uniform(0, np.log(largest), random.integers(1, 4))).astype(int)
    return [(np.arange(count) % 101 + step % 89).astype(random.choice(DTYPES)) for count in counts]


def _of(rows: NDArray[Any], context: mpistrat.ReplicaContext) -> NDArray[Any]:
    """Return a replica's array."""
    return rows * (context.replica_id_in_sync_group + 1)


def _use(strategy: mpistrat.Strategy, nbytes: int) -> None:
    """Add arrays in memory of `empty`, in a plain call and in a started one."""

    def run() -> None:
        context = mpistrat.get_replica_context()
        size, values = context.num_replicas_in_sync, np.arange(nbytes // 4, dtype=np.float32) % 1000
        array = strategy.communicator.empty(values.shape, values.dtype)
        array[...] = strategy.array_module.asarray(values + context.replica_id_in_sync_group)
        for result in (context.all_reduce("sum", array), context.start_all_reduce("sum", array).wait()):
            _check(result, values * size + sum(range(size)), values.dtype, f"{nbytes} bytes")

    strategy.run(run)


def _check(result: Any, expected: NDArray[Any], dtype: np.dtype[Any], what: str) -> None:
    array = to_host(result)
    if array.dtype != dtype or not np.array_equal(array, expected):
        raise AssertionError(f"{what}: {expected.size} elements of {dtype}: not what NumPy makes of it")


def main(what: str, rounds: str = "") -> Mapping[str, float]:
    """Take steps, or open and close strategies so often."""
    return with_strategy(soak) if what == "steps" else open_and_close(int(rounds))


if __name__ == "__main__":
    write_report(main)
