"""CUDA graphs and collectives: others are captured undisturbed, and sums where that was asked for, and else refused.

In the default mode of a capture, some of what any other thread of the process asks CUDA makes it invalid. NCCL's watcher looks
every 20 ms whether the last call has ended, and the engine carries out started calls: so captures begin within 20 ms after a
call, or while one is under way, and last longer than that. A query as CuPy makes it should invalidate one: else this shows
little.
"""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mpistrat
from mpistrat.communicator.interface import BaseCommunicator
from tests.gpu.interop import Torch
from tests.gpu.program import the_gpu, with_strategy, write_report

COUNT = 1 << 22
TURNS, WARM_UPS, REPLAYS = 50, 4, 20
WITHIN_SECONDS, HELD_SECONDS = 0.02, 0.025


def main() -> dict[str, float]:
    """Try CuPy, and PyTorch where it sees the GPU. A collective call."""

    def measure(strategy: mpistrat.Strategy) -> dict[str, float]:
        cupy, torch = _Cupy(), _Torch()
        found = check(strategy, {"cupy": cupy} if torch.missing() else {"cupy": cupy, "torch": torch})
        return {**found, "disturbed_by_query": int(cupy.is_disturbed_by_query())}

    return with_strategy(measure)


def check(strategy: Any, libraries: Mapping[str, Any], count: int = COUNT, turns: int = TURNS) -> dict[str, float]:
    """Capture graphs after collectives, and try to capture collectives. A collective call.

    Of a library `make` returns an array of values and `read` its values. `capture` captures a sum in the default mode of CUDA,
    acts meanwhile, and returns whether the graph computes it; it raises RuntimeError if the capture became invalid. `graph`
    captures what is done, in that mode, and returns what replays it and waits until it has ended.

    Returns for each library how many graphs it captured, all of which computed the right values; how many collectives were
    refused, after each of which the next one was right; and by NCCL how often sums were replayed, and were right.
    """
    communicator = strategy.extended.communicator

    def run() -> dict[str, float]:
        found: dict[str, float] = {}
        for name, library in libraries.items():
            rank = _Rank(library, count)
            found[f"{name}_captured"] = rank.capture_beside_calls(name, turns)
            found[f"{name}_refused"] = rank.capture_calls()
            if communicator.path.startswith("nccl"):
                found[f"{name}_replayed"] = rank.replay_calls(communicator)
        return found

    [found] = strategy.experimental_local_results(strategy.run(run))
    return dict(found)


class _Rank:
    def __init__(self, library: Any, count: int) -> None:
        self._context, self._library = mpistrat.get_replica_context(), library
        values = np.arange(count, dtype=np.float32) % 97
        self._array = library.make(values + self._context.replica_id_in_sync_group)
        size = self._context.num_replicas_in_sync
        self._sum = values * size + sum(range(size))

    def capture_beside_calls(self, name: str, turns: int) -> int:
        failures = []
        for turn in range(-WARM_UPS, turns):
            work = self._context.start_all_reduce("sum", self._array) if turn % 2 else None
            result = None if work else self._context.all_reduce("sum", self._array)
            if turn >= 0:
                time.sleep(WITHIN_SECONDS * turn / turns)
                try:
                    if not self._library.capture(lambda: time.sleep(HELD_SECONDS)):
                        failures.append("it computed wrong values")
                except RuntimeError as error:
                    failures.append(f"{error}")
            self._require_sum(work.wait() if work else result)
        if failures:
            raise AssertionError(f"{len(failures)} of {turns} captures of {name} beside collectives failed: {failures[0]}")
        return turns

    def capture_calls(self) -> int:
        calls = self._context.all_reduce, self._context.start_all_reduce
        for call in calls:
            if not self._library.capture(lambda call=call: self._require_refusal(call)):
                raise AssertionError("a graph computed wrong values after a collective was refused")
            self._require_sum(self._context.all_reduce("sum", self._array))
        return len(calls)

    def replay_calls(self, communicator: BaseCommunicator) -> int:
        """Capture a sum in place and a mean of small arrays; replay them beside calls that are no part of the graph."""
        fresh = self._library.read(self._array)
        given, small = (self._library.make(np.zeros_like(values)) for values in (fresh, fresh[:10]))
        with communicator.capture():

            def act() -> None:
                communicator.all_reduce("sum", given, out=given)
                communicator.all_reduce("mean", [small], out=[small])

            replay = self._library.graph(act)
        for _ in range(REPLAYS):
            given[...], small[...] = self._array, self._array[:10]
            replay()
            self._require_sum(given)
            if not np.array_equal(self._library.read(small) * communicator.size, self._sum[:10]):
                raise AssertionError("a mean in a graph was wrong")
            self._require_sum(self._context.all_reduce("sum", self._array))
        return REPLAYS

    def _require_refusal(self, call: Callable[..., object]) -> None:
        try:
            call("sum", self._array)
        except mpistrat.errors.InvalidArgumentError as error:
            if "captur" not in f"{error}":
                raise
        else:
            raise AssertionError("a collective was captured")

    def _require_sum(self, result: Any) -> None:
        if not np.array_equal(self._library.read(result), self._sum):
            raise AssertionError("a sum beside captures was wrong")


class _Cupy:
    def __init__(self) -> None:
        import cupy

        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._source, self._target = cupy.arange(COUNT, dtype=np.float32), cupy.empty(COUNT, np.float32)
        self._add()  # compiles the kernel
        cupy.cuda.Device().synchronize()

    def make(self, values: NDArray[Any]) -> Any:
        return the_gpu().array_module.asarray(values)

    def read(self, array: Any) -> NDArray[Any]:
        return the_gpu().get(array)

    def capture(self, act: Callable[[], object]) -> bool:
        from cupy.cuda import runtime

        with self._stream:
            self._target.fill(0)
            self._stream.begin_capture(runtime.streamCaptureModeGlobal)
            try:
                self._add()
                act()
            finally:
                graph = self._stream.end_capture()
            graph.launch()
            return np.array_equal(self._target.get(), np.arange(1, COUNT + 1, dtype=np.float32))

    def graph(self, act: Callable[[], object]) -> Callable[[], object]:
        import cupy

        cupy.cuda.Device().synchronize()
        with self._stream:
            self._stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
            act()
            graph = self._stream.end_capture()

        def replay() -> None:
            cupy.cuda.get_current_stream().synchronize()  # on which the arrays are written
            graph.launch(self._stream)
            self._stream.synchronize()

        return replay

    def is_disturbed_by_query(self) -> bool:
        """Return whether a query of an event on another thread, in the mode that threads begin with, invalidates a capture."""
        import cupy

        event = cupy.cuda.Event(disable_timing=True)
        event.record()

        def query() -> None:
            thread = threading.Thread(target=lambda: cupy.cuda.runtime.eventQuery(event.ptr))
            thread.start()
            thread.join()

        try:
            self.capture(query)
        except RuntimeError:
            return True
        return False

    def _add(self) -> None:
        import cupy

        cupy.add(self._source, 1, out=self._target)


class _Torch(Torch):
    def capture(self, act: Callable[[], object]) -> bool:
        import torch

        torch.cuda.set_device(the_gpu().index)
        source = torch.arange(COUNT, dtype=torch.float32, device="cuda")
        target, graph = source + 1, torch.cuda.CUDAGraph()
        target.zero_()
        with torch.cuda.graph(graph):  # synchronizes before
            torch.add(source, 1, out=target)
            act()
        graph.replay()
        return np.array_equal(target.cpu().numpy(), np.arange(1, COUNT + 1, dtype=np.float32))

    def graph(self, act: Callable[[], object]) -> Callable[[], object]:
        import cupy
        import torch

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            act()

        def replay() -> None:
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()

        return replay


if __name__ == "__main__":
    write_report(main)
