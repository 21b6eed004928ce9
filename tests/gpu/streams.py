"""Arrays written late on a stream of the caller's: a collective must not read them before, nor hand out its result too early.

    mpistrat run -n 2 -m tests.gpu.streams --report FILE

A kernel delays the stream of one rank before its arrays are written there; the collective is called with that stream current,
and the results are read on it. That nothing went wrong shows little, unless it goes wrong where one wait is taken away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np

import mpistrat
from mpistrat.device.abstract import Device, Stream, address
from tests.gpu.program import settle, the_gpu, with_strategy, write_report

COUNTS = (1 << 20, 1 << 18)
MILLISECONDS = 100
STALE = -1.0
TURNS = 5

DELAY = r"""
extern "C" __global__ void delay(unsigned long long nanoseconds) {
    unsigned long long begun, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begun));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    while (now - begun < nanoseconds);
}
"""


def main() -> dict[str, float]:
    """Try both kinds of call. A collective call."""
    return with_strategy(lambda strategy: check(strategy, the_gpu(), delay, drain))


def check(
    strategy: mpistrat.Strategy,
    device: Device,
    delay: Callable[[Stream], None],
    drain: Callable[[], None],
    counts: Sequence[int] = COUNTS,
) -> dict[str, float]:
    """Call collectives on arrays that are written late. A collective call.

    `drain` waits for all streams of the GPU, after a call without a wait: what that left under way would still work on the
    bucket of the next call, which nothing orders behind it.

    Returns ``right``: the calls, all of which gave the right results; ``wrong_without_event`` and ``wrong_without_wait``:
    those that did not after a wait was taken away, of the verb where there were fewer. No event is waited for where the
    work of NCCL is only enqueued.
    """
    late = _Late(strategy, device, delay, drain, counts)
    communicator = strategy.communicator
    # on one node NCCL's work is enqueued, and the host waits for no event
    is_enqueued = communicator.world.num_nodes == 1 and communicator.path.startswith("nccl")
    verbs: dict[str, tuple[Callable[[Any], Any], str]] = {
        "all_reduce": (
            lambda arrays: mpistrat.get_replica_context().all_reduce("sum", arrays),
            "wait" if is_enqueued else "event",
        ),
        "start_all_reduce": (lambda arrays: mpistrat.get_replica_context().start_all_reduce("sum", arrays).wait(), "wait"),
    }

    def run() -> dict[str, float]:
        found: dict[str, float] = {"right": 0}
        for name, (verb, wait) in verbs.items():
            late.is_right(verb)  # plans are made, and kernels compiled
            for _ in range(TURNS):
                if not late.is_right(verb):
                    raise AssertionError(f"{name} read an array before it was written, or gave out its result too early")
                found["right"] += 1
            wrong = sum(not late.is_right(verb, wait) for _ in range(TURNS))
            found[f"wrong_without_{wait}"] = min(wrong, found.get(f"wrong_without_{wait}", TURNS))
            if not wrong:
                raise AssertionError(f"{name} gave the right result without the {wait}: the delay proves nothing")
            if not late.is_right(verb):
                raise AssertionError(f"{name} gave a wrong result after one whose {wait} was missing")
        return found

    [found] = strategy.experimental_local_results(strategy.run(run))
    return found


class _Late:
    """Arrays that one rank writes late, on a stream that is not the one it computes on otherwise."""

    def __init__(
        self,
        strategy: mpistrat.Strategy,
        device: Device,
        delay: Callable[[Stream], None],
        drain: Callable[[], None],
        counts: Sequence[int],
    ) -> None:
        self._communicator, self._device, self._delay, self._drain = strategy.extended.communicator, device, delay, drain
        self._side = device.stream()
        self._turn = 0
        module = device.array_module
        self._arrays = [module.asarray(np.full(count, STALE, np.float32)) for count in counts]
        self._stale = [module.asarray(np.full(count, STALE, np.float32)) for count in counts]

    def is_right(self, verb: Callable[[Any], Any], removed: str = "") -> bool:
        """Return whether a verb gives the right results on all ranks, with a kind of wait removed. A collective call."""
        self._turn += 1
        rank, size = self._communicator.rank, self._communicator.size
        with self._device.activate(self._side):
            fresh = [
                self._device.array_module.asarray(np.arange(array.size, dtype=np.float32) % 97 + rank + self._turn)
                for array in self._arrays
            ]
            self._write(self._stale)
            settle(self._device)
            self._communicator.barrier()
            if rank == size - 1:
                self._delay(self._side)
            self._write(fresh)
            with without(removed, self._side):
                results = verb(self._arrays)
            added = sum(range(size)) + size * self._turn
            right = all(
                np.array_equal(self._device.get(result), np.arange(result.size, dtype=np.float32) % 97 * size + added)
                for result in results
            )
            settle(self._device)
            if removed:
                self._drain()
        return self._all(right)

    def _write(self, values: Sequence[Any]) -> None:
        for array, value in zip(self._arrays, values, strict=True):
            self._side.copy(address(array), address(value), array.nbytes)

    def _all(self, right: bool) -> bool:
        """Return whether all ranks found the right results. A collective call."""
        [total] = self._communicator.all_reduce("sum", [np.array(int(right))])
        return int(total) == self._communicator.size


def without(removed: str, stream: Stream) -> Any:
    """Return a context in which streams do not wait, or every event counts as done; nothing is removed by an empty text."""
    if removed == "wait":
        return patch.object(type(stream), "wait", lambda self, event: None)
    if removed == "event":
        return patch.object(type(stream.record()), "done", lambda self: True)
    return nullcontext()


def delay(_: Stream) -> None:
    """Let a kernel take its time on the current stream, which is this one."""
    _delay()((1,), (1,), (np.uint64(MILLISECONDS * 1_000_000),))


def drain() -> None:
    """Wait for all streams of the GPU."""
    import cupy

    cupy.cuda.Device().synchronize()


@cache
def _delay() -> Any:
    import cupy

    return cupy.RawKernel(DELAY, "delay")


if __name__ == "__main__":
    write_report(main)
