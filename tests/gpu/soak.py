"""Thousands of steps whose arrays differ in size, started and plain collectives mixed: all results right, and no memory lost.

    MPISTRAT_VIRTUAL_NODES=2x2 MPISTRAT_CHUNK_BYTES=1MiB mpistrat run -n 4 -m tests.gpu.soak --report FILE

Sizes come in a cycle that holds more plans than are kept, so that plans come and go. Values are whole numbers, of which every
order of adding makes the same.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mpistrat
from mpistrat.arrays import to_host
from tests.gpu.holding import Holding, growth, holding

STEPS, SETTLED, CYCLE = 2000, 200, 100
LARGEST = 2_000_000
DTYPES = ("float32", "int32", "float64")


def main(argv: Sequence[str] | None = None) -> None:
    """Take the steps; let rank 0 write what was held. A collective call."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS, help="how many")
    parser.add_argument("--report", type=Path, required=True, help="where rank 0 writes the figures")
    arguments = parser.parse_args(argv)
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    begun = time.monotonic()
    figures = soak(strategy, arguments.steps) | {"seconds": round(time.monotonic() - begun, 1)}
    chief = strategy.extended.should_save_summary
    strategy.close()
    if chief:
        arguments.report.write_text(json.dumps(figures))


def soak(
    strategy: mpistrat.Strategy,
    steps: int = STEPS,
    settled: int = SETTLED,
    largest: int = LARGEST,
    held: Holding = holding,
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
    return {"steps": steps, "compared": compared, "device_mib": round(noted[-1].get("device_mib", 0), 1)} | growth(
        noted[0], noted[-1]
    )


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
        second = context.start_all_reduce("sum", mine[1])
        plain = context.all_reduce("sum", mine[2])
        found = [first.wait(), second.wait(), plain]
    size = context.num_replicas_in_sync
    for batch, results in zip(batches, found, strict=True):
        for rows, result in zip(batch, results, strict=True):
            array = to_host(result)
            if array.dtype != rows.dtype or not np.array_equal(array, rows * (size * (size + 1) // 2)):
                raise AssertionError(f"step {step}: {rows.size} elements of {rows.dtype}: not what NumPy makes of it")
    return sum(map(len, batches))


def _batch(random: np.random.Generator, step: int, largest: int) -> list[NDArray[Any]]:
    """Return what each replica multiplies to get its arrays."""
    counts = np.exp(random.uniform(0, np.log(largest), random.integers(1, 4))).astype(int)
    return [(np.arange(count) % 101 + step % 89).astype(random.choice(DTYPES)) for count in counts]


def _of(rows: NDArray[Any], context: mpistrat.ReplicaContext) -> NDArray[Any]:
    """Return a replica's array."""
    return rows * (context.replica_id_in_sync_group + 1)


if __name__ == "__main__":
    main()
