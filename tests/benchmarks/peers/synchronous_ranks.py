"""Synchronous training of ours, for comparison with parameter servers: steps that all-reduce a gradient; rank 0 prints."""

from __future__ import annotations

import json
import sys
import time

import numpy as np

import mpistrat


def main() -> None:
    """Measure; ``sys.argv`` has the bytes of each model and how many steps are made, as JSON."""
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    found = {}
    for nbytes, times in json.loads(sys.argv[1]):
        rate = strategy.local(strategy.run(_steps_per_second, args=(nbytes, times)))
        found[f"step {nbytes}"] = rate * strategy.num_replicas_in_sync
    if strategy.rank == 0:
        print(json.dumps(found))


def _steps_per_second(nbytes: int, times: int) -> float:
    weights, gradient = np.zeros(nbytes // 4, np.float32), np.ones(nbytes // 4, np.float32)
    context, started = mpistrat.get_replica_context(), 0.0
    for step in range(-3, times):
        if step == 0:
            started = time.perf_counter()
        weights -= context.all_reduce("mean", gradient)
    assert (weights == -(times + 3)).all(), "a step is missing"
    return times / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
