"""All verbs again and again, and strategies that come and go: all results right, and nothing is lost.

Strategies are opened, used and closed, two at a time now and then; their buffers grow from 64 KiB to 64 MiB and begin small
again. Values are whole numbers, of which every order of adding makes the same.
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import mpistrat
from mpistrat.arrays import to_host
from mpistrat.device import cuda
from mpistrat.launch.bootstrap import start
from tests.gpu import verbs_rank
from tests.gpu.program import with_strategy, write_report

TURNS, SETTLED_TURNS = 10, 2
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


def soak(strategy: Any, turns: int = TURNS, settled: int = SETTLED_TURNS, held: Holding = holding) -> dict[str, float]:
    """Try all verbs so often; their arrays need more plans than are kept, so that these come and go. A collective call.

    Returns ``compared``, how many results were, and how much more is held at the end than after `settled` turns.
    """
    noted, compared = list[Mapping[str, float]](), 0
    for turn in range(1, turns + 1):
        compared += verbs_rank.check(strategy)["compared"]
        if turn in (settled, turns):
            noted.append(held(strategy.extended.communicator.barrier))
    return {"compared": compared, "device_mib": round(noted[-1].get("device_mib", 0), 1), **_growth(noted)}


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


def _use(strategy: mpistrat.Strategy, nbytes: int) -> None:
    """Add arrays in memory of `empty`, in a plain call and in a started one."""

    def run() -> None:
        context = mpistrat.get_replica_context()
        size, values = context.num_replicas_in_sync, np.arange(nbytes // 4, dtype=np.float32) % 1000
        array = strategy.communicator.empty(values.shape, values.dtype)
        array[...] = strategy.array_module.asarray(values + context.replica_id_in_sync_group)
        for result in (context.all_reduce("sum", array), context.start_all_reduce("sum", array).wait()):
            if not np.array_equal(to_host(result), values * size + sum(range(size))):
                raise AssertionError(f"a sum of {nbytes} bytes is not what NumPy makes of it")

    strategy.run(run)


def main(what: str, rounds: str = "") -> Mapping[str, float]:
    """Try all verbs, or open and close strategies so often."""
    return with_strategy(soak) if what == "verbs" else open_and_close(int(rounds))


if __name__ == "__main__":
    write_report(main)
