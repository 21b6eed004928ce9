"""Arrays that a stream writes late, and the program drops at once: calls read them when they are written, and not afterwards.

A kernel delays the stream of one rank before its array is written there. CuPy's pools give memory that an array leaves to the
next array of its stream at once, the default pool or its MemoryAsyncPool: inputs and results are dropped as soon as the call
has returned, and new arrays are made and written to on the same stream and on another one. Neither may the collective read what
is written there, nor write over it. That nothing went wrong shows little, unless it goes wrong where one wait is taken away.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

import mpistrat
from mpistrat.device.cuda import Device, Stream, address
from tests.gpu.program import settle, the_gpu, with_strategy, write_report

COUNT = 1 << 20
MILLISECONDS = 100
NEW_ARRAYS = 6  # of each stream: nearly all that its pool has of that size, whichever of these it gives first
FILL = -1.0
TURNS = 3  # in the first one plans are made, which may take longer than the delay

DELAY = r"""
extern "C" __global__ void delay(unsigned long long nanoseconds) {
    unsigned long long begun, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begun));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    while (now - begun < nanoseconds);
}
"""


def main(pool: str) -> dict[str, float]:
    """Try the memory of a pool. A collective call."""

    def measure(strategy: mpistrat.Strategy) -> dict[str, float]:
        if pool == "async":
            import cupy

            cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool().malloc)
        return check(strategy.extended.communicator, the_gpu(), delay, drain)

    assert pool in ("blocks", "async"), "blocks or async"
    return with_strategy(measure)


def check(
    communicator: Any, device: Device, delay: Callable[[Stream], None], drain: Callable[[], None], count: int = COUNT
) -> dict[str, float]:
    """Make calls on arrays that are written late, drop these, and write to their memory. A collective call.

    `drain` waits for all streams of the GPU: what a collective writes too late is to be seen.

    Returns ``right``: the calls, all of which left and gave the right values; ``reused``: the new arrays that lay where an
    input had been; ``wrong_without_wait``, or ``wrong_without_event`` where the host waits for the GPU: the kinds of call that
    went wrong when the stream of the caller no longer waited, or every event counted as done.
    """
    # on one node NCCL's work is enqueued, and the host waits for no event
    removed = "wait" if communicator.world.num_nodes == 1 and communicator.path.startswith("nccl") else "event"
    found: dict[str, float] = {"right": 0, "reused": 0, f"wrong_without_{removed}": 0}
    default, side = device.current_stream(), device.stream()
    with ThreadPoolExecutor(1) as thread:
        for caller, other in ((default, side), (side, default)):
            trial = _Trial(communicator, device, (delay, drain), (caller, other), thread, count)
            without_wait = _without_wait(caller) if removed == "wait" else without(removed, caller)
            for name, case in CASES.items():
                for _ in range(TURNS):
                    if not trial.is_right(case):
                        raise AssertionError(f"{name}: an array was read too early, or its memory given to another one")
                    found["right"] += 1
                found[f"wrong_without_{removed}"] += not trial.is_right(case, without_wait)
            found["reused"] += trial.reused
    if not found[f"wrong_without_{removed}"]:
        raise AssertionError(f"everything was right without the {removed}: the delay proves nothing")
    return found


class _Trial:
    """Calls on one stream, whose arrays are dropped."""

    def __init__(self, communicator: Any, device: Device, work: Any, streams: Any, thread: Any, count: int) -> None:
        self.communicator, self.device, (self._delay, self._drain) = communicator, device, work
        (self._caller, self._other), self._thread, self._turn, self.reused = streams, thread, 0, 0
        self.fill = device.array_module.asarray(np.full(count, FILL, np.float32))
        settle(device)

    def is_right(self, case: _Case, during_call: AbstractContextManager[Any] | None = None) -> bool:
        """Return whether its result, and what is written to new arrays, are right on all ranks. A collective call."""
        self._turn += 1
        rank, size = self.communicator.rank, self.communicator.size
        values = np.arange(self.fill.size, dtype=np.float32) % 97
        with self.device.activate(self._caller):
            fresh = self.device.array_module.asarray(values + rank + self._turn)
            given = [self.device.array_module.empty(values.size, np.float32)]
            left = address(given[0])
            settle(self.device)
            self.communicator.barrier()
            if rank == size - 1:
                self._delay(self._caller)
            self._caller.copy(left, address(fresh), fresh.nbytes)
            with during_call or nullcontext():
                read = case(self, given)
            written = self._written(self._caller), self._written(self._other)
            is_right = read is None or np.array_equal(read(), values * size + sum(range(size)) + size * self._turn)
            self.communicator.barrier()  # what was started has ended, or is enqueued
            self._drain()
        for stream, arrays in zip((self._caller, self._other), written, strict=True):
            with self.device.activate(stream):
                is_right = all([np.all(self.device.get(array) == FILL) for array in arrays]) and is_right
        self.reused += left in map(address, written[0])
        [total] = self.communicator.all_reduce("sum", [np.array(int(is_right))])
        return int(total) == size

    def on_other_stream(self, act: Callable[[], Any]) -> Any:
        """Act with the other stream current."""
        with self.device.activate(self._other):
            return act()

    def on_thread(self, act: Callable[[], Any]) -> Any:
        """Act on a thread, with its default stream current."""

        def run() -> Any:
            with self.device.activate():
                return act()

        return self._thread.submit(run).result()

    def read_where(self, where: Callable[..., Any], wait: Callable[[], Any]) -> Callable[[], NDArray[Any]]:
        """Wait for a result on another stream or thread; return what reads it there."""
        result = where(wait)
        return lambda: where(partial(self.device.get, result))

    def _written(self, stream: Stream) -> list[Any]:
        """Return new arrays of a stream, that are written to on it."""
        with self.device.activate(stream):
            made = [self.device.array_module.empty(self.fill.size, np.float32) for _ in range(NEW_ARRAYS)]
            for array in made:
                stream.copy(address(array), address(self.fill), array.nbytes)
        return made


_Case = Callable[[_Trial, list[Any]], Callable[[], NDArray[Any]] | None]
"""Makes a call on an array that it takes out of a list; returns what reads the result, or None if that is dropped."""


def _reduced(trial: _Trial, given: list[Any]) -> Any:
    return trial.communicator.all_reduce("sum", given.pop())


def _started(trial: _Trial, given: list[Any]) -> Any:
    return trial.communicator.start_all_reduce("sum", given.pop())


def _started_and_waited_for(trial: _Trial, given: list[Any]) -> Callable[[], NDArray[Any]]:
    work = _started(trial, given)
    return lambda: trial.device.get(work.wait())


def _in_place(call: Callable[..., Any], given: list[Any]) -> Any:
    array = given.pop()
    return call("sum", array, out=array)


def _dropped(_: object) -> None:
    """Drop what a call has returned."""


CASES: dict[str, _Case] = {
    "all_reduce": lambda trial, given: partial(trial.device.get, _reduced(trial, given)),
    "all_reduce of two arrays": lambda trial, given: partial(
        trial.device.get, trial.communicator.all_reduce("sum", [given.pop(), trial.fill])[0]
    ),
    "all_reduce, its result dropped": lambda trial, given: _dropped(_reduced(trial, given)),
    "all_reduce in place, dropped": lambda trial, given: _dropped(_in_place(trial.communicator.all_reduce, given)),
    "start_all_reduce": _started_and_waited_for,
    "start_all_reduce, dropped": lambda trial, given: _dropped(_started(trial, given)),
    "start_all_reduce in place, dropped": lambda trial, given: _dropped(
        _in_place(trial.communicator.start_all_reduce, given).wait()
    ),
    "start_reduce_scatter, dropped": lambda trial, given: _dropped(trial.communicator.start_reduce_scatter("sum", given.pop())),
    "start_all_gather, dropped": lambda trial, given: _dropped(trial.communicator.start_all_gather(given.pop())),
    "waited for on another stream": lambda trial, given: trial.read_where(trial.on_other_stream, _started(trial, given).wait),
    "waited for on a thread": lambda trial, given: trial.read_where(trial.on_thread, _started(trial, given).wait),
}


def _without_wait(stream: Stream) -> AbstractContextManager[Any]:
    """Return a context in which one stream does not wait; all others do."""
    wait = type(stream).wait

    def unless_it_is(self: Stream, event: Any) -> None:
        if self.pointer != stream.pointer:
            wait(self, event)

    return patch.object(type(stream), "wait", unless_it_is)


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
