"""Strategies that are opened, used and closed again, two at a time now and then: nothing of them is left.

    mpistrat run -n 2 -m tests.gpu.open_close --report FILE

Their buffers grow from 64 KiB to 64 MiB and begin small again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

import mpistrat
from mpistrat.arrays import to_host
from mpistrat.launch.bootstrap import start
from tests.gpu.holding import Holding, growth, holding

ROUNDS, SETTLED = 100, 12
SIZES = tuple(1 << power for power in range(16, 27))


def main(argv: Sequence[str] | None = None) -> None:
    """Open and close strategies; let rank 0 write what they left. A collective call."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="how often")
    parser.add_argument("--report", type=Path, required=True, help="where rank 0 writes the figures")
    arguments = parser.parse_args(argv)
    comm = start()
    begun = time.monotonic()
    figures = open_and_close(arguments.rounds)
    if comm.Get_rank() == 0:
        arguments.report.write_text(json.dumps(figures | {"seconds": round(time.monotonic() - begun, 1)}))


def open_and_close(
    rounds: int = ROUNDS,
    settled: int = SETTLED,
    sizes: Sequence[int] = SIZES,
    held: Holding = holding,
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
    return {"rounds": rounds} | growth(noted[0], noted[-1])


def _use(strategy: mpistrat.Strategy, nbytes: int) -> None:
    """Add arrays, in a plain call and in a started one."""

    def run() -> None:
        context = mpistrat.get_replica_context()
        size, values = context.num_replicas_in_sync, np.arange(nbytes // 4, dtype=np.float32) % 1000
        array = strategy.array_module.asarray(values + context.replica_id_in_sync_group)
        for result in (context.all_reduce("sum", array), context.start_all_reduce("sum", array).wait()):
            if not np.array_equal(to_host(result), values * size + sum(range(size))):
                raise AssertionError(f"{nbytes} bytes: not what NumPy makes of it")

    strategy.run(run)


if __name__ == "__main__":
    main()
