"""Parameter servers of ours: pulls, pushes and scheduled functions; the chief prints what each took."""

import json
import sys
from typing import Any

import numpy as np
from scheduling import BATCH, ROWS, WIDTH, functions, rate

import mpistrat


def main(coordinator: Any) -> None:
    """Measure; ``sys.argv`` has the number of workers, then the bytes of each array and how often it goes, as JSON."""
    num_workers, cases = int(sys.argv[1]), json.loads(sys.argv[2])
    found: dict[str, float] = {}
    with coordinator.strategy.scope():
        table = mpistrat.Variable(np.zeros((ROWS, WIDTH), np.float32)) if cases else None
    for nbytes, times in cases:
        with coordinator.strategy.scope():
            variable = mpistrat.Variable(np.zeros(nbytes // 4, np.float32))

        def pull(times: int, variable: Any = variable) -> float:
            return float(sum(variable.numpy()[0] for _ in range(times)))

        def push(times: int, variable: Any = variable) -> None:
            delta = np.ones(variable.shape, np.float32)
            for _ in range(times):
                variable.assign_add(delta, read_value=False)

        def step(times: int, variable: Any = variable) -> None:
            gradient = np.ones(variable.shape, np.float32)
            for _ in range(times):
                variable.numpy()
                variable.assign_sub(gradient, read_value=False)

        found |= {f"pull {nbytes}": rate(coordinator, pull, times, num_workers)}
        found |= {f"push {nbytes}": rate(coordinator, push, times, num_workers)}
        assert (variable.numpy() == (times + 3) * num_workers).all(), "a push is missing"
        found |= {f"step {nbytes}": rate(coordinator, step, times, num_workers)}

    def pull_rows(times: int) -> None:
        ids = np.random.default_rng(0).integers(0, ROWS, (times, BATCH))
        for wanted in ids:
            table.sparse_read(wanted)

    def push_rows(times: int) -> None:
        ids, rows = np.random.default_rng(0).integers(0, ROWS, (times, BATCH)), np.ones((BATCH, WIDTH), np.float32)
        for wanted in ids:
            table.scatter_add(mpistrat.IndexedSlices(rows, wanted))

    if cases:
        times = cases[0][1]
        found |= {
            "pull rows": rate(coordinator, pull_rows, times, num_workers),
            "push rows": rate(coordinator, push_rows, times, num_workers),
        }
    print(json.dumps(found | functions(coordinator, _empty, 1000, 5000)), flush=True)


def _empty() -> None:
    pass


if __name__ == "__main__":
    mpistrat.experimental.ParameterServerStrategy.main(main)
