"""What is timed of parameter servers, by a coordinator of ours or of TensorFlow: it needs the standard library alone."""

import statistics
import time
from collections.abc import Callable
from typing import Any

ROWS, WIDTH, BATCH = 1_000_000, 32, 64  # of a table; and how many of its rows go at a time


def rate(coordinator: Any, fn: Callable[..., Any], times: int, num_workers: int, number: Callable[[int], Any] = int) -> float:
    """Return how many pulls or pushes all workers make in a second together."""
    for count in (3, times):
        started = time.perf_counter()
        for _ in range(num_workers):
            coordinator.schedule(fn, args=(number(count),))
        coordinator.join()
    return num_workers * times / (time.perf_counter() - started)


def functions(coordinator: Any, empty: Callable[[], None], times: int, together: int) -> dict[str, float]:
    """Return the median time from scheduling an empty function to its end, and how many run in a second together."""
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        coordinator.schedule(empty)
        coordinator.join()
        seconds.append(time.perf_counter() - started)
    started = time.perf_counter()
    for _ in range(together):
        coordinator.schedule(empty)
    coordinator.join()
    return {"seconds": statistics.median(seconds), "functions": together / (time.perf_counter() - started)}
