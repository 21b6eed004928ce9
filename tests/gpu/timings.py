"""How fast one GPU does our work, beside what a copy reaches in the same process.

Bandwidths count what is read and what is written. Work is put on the stream while copies keep the GPU busy, and their time is
taken away again: so a kernel is measured, and not how fast Python launches it, which is told beside it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from statistics import median
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mpistrat.device.cuda import Device, DeviceArray, address
from mpistrat.device.kernels import MAX_BLOCKS, fold_kernel
from mpistrat.groups.group import Group
from mpistrat.launch.bootstrap import start
from mpistrat.packing import DeviceCopyIn, DeviceCopyOut, Layout
from mpistrat.reduction import ReduceOp
from mpistrat.steps import drive
from mpistrat.transports.staged import StagedTransport
from tests.gpu.program import STUCK_SECONDS, settle, write_report
from tests.gradients import resnet50

F32, BF16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
GIGA = 1e9
PEERS = 4
CHECKED = 10_000


@dataclass(frozen=True)
class Sizes:
    nbytes: int = 1 << 29  # of large arrays: far more than the caches of a GPU hold
    shapes: Sequence[tuple[int, ...]] = ()  # of the gradients
    sets: int = 4  # copies of all gradients that take turns, so that none is found in a cache
    # runs of a kernel in a round, copies that keep the GPU busy before them, and rounds; the median of these counts
    runs: int = 10
    fillers: int = 16
    rounds: int = 7


class _Bench:
    """A device with a large copy that sets its ceiling."""

    def __init__(self, device: Device, sizes: Sizes) -> None:
        self.device, self.sizes = device, sizes
        self.source, self.target = self.random(sizes.nbytes), device.allocate(sizes.nbytes)
        self._stream = device.current_stream()

    def random(self, nbytes: int) -> DeviceArray:
        """Return memory with random float32 in it."""
        memory = self.device.allocate(nbytes)
        tile = np.random.default_rng(0).standard_normal(min(nbytes, 1 << 24) // 4, np.float32).view(np.uint8)
        for first in range(0, nbytes, tile.size):
            part = memory[first : first + tile.size]
            self.device.put(part, tile[: part.size])
        return memory

    def floats(self, counts: Sequence[int]) -> list[DeviceArray]:
        """Return arrays of float32, each aligned as CuPy's are."""
        starts = np.cumsum([0, *(-(-4 * count // 512) * 512 for count in counts)])
        memory = self.random(int(starts[-1]))
        return [memory[first : first + 4 * count].view(F32) for first, count in zip(starts, counts, strict=False)]

    def measure(self, run: Callable[[int], None], nbytes: int) -> dict[str, float]:
        """Return the bandwidth of a run that moves so many bytes, the copy's, and what Python takes to launch it."""
        run(0)
        settle(self.device)
        copies, runs = [], []
        for _ in range(self.sizes.rounds):
            copies.append(self._seconds_of(run, 0))
            runs.append(self._seconds_of(run, self.sizes.runs) - copies[-1])
        copy, taken = median(copies) / self.sizes.fillers, median(runs) / self.sizes.runs
        ceiling, reached = 2 * self.sizes.nbytes / copy, nbytes / max(taken, 1e-9)
        return {
            "gbs": round(reached / GIGA, 1),
            "ceiling_gbs": round(ceiling / GIGA, 1),
            "fraction": round(reached / ceiling, 3),
            "us": round(1e6 * taken, 1),
            "python_us": round(1e6 * self.seconds(run, 10 * self.sizes.runs, waits=False), 1),
        }

    def seconds(self, run: Callable[[int], object], times: int, waits: bool = True) -> float:
        """Return the median time of a run, until the GPU is through, or else until all of it has been launched."""
        samples = []
        for turn in range(times):
            settle(self.device)
            begun = time.perf_counter()
            run(turn)
            if waits:
                settle(self.device)
            samples.append(time.perf_counter() - begun)
        settle(self.device)
        return median(samples)

    def expect(self, found: DeviceArray, expected: NDArray[Any]) -> None:
        """Check that what was timed is right: what moves nothing is fast."""
        if not np.array_equal(self.device.get(found), expected):
            raise AssertionError("what was timed gave a wrong result")

    def _seconds_of(self, run: Callable[[int], None], num_runs: int) -> float:
        """Return what the copies take, and that many runs behind them."""
        settle(self.device)
        begun = time.perf_counter()
        for _ in range(self.sizes.fillers):
            self._stream.copy(address(self.target), address(self.source), self.sizes.nbytes)
        for turn in range(num_runs):
            run(turn)
        settle(self.device)
        return time.perf_counter() - begun


def pack(bench: _Bench) -> dict[str, float]:
    """Fuse eight large arrays of float32 into a bucket of bfloat16."""
    arrays, layout, bucket = _large(bench)
    copy = DeviceCopyIn(bench.device, layout, bucket, [F32] * len(arrays))
    figures = bench.measure(lambda turn: _exhaust(copy, arrays), 6 * layout.count)
    expected = bench.device.get(arrays[0][:CHECKED]).astype(BF16)
    bench.expect(bucket[: expected.size], expected)
    return figures


def unpack(bench: _Bench) -> dict[str, float]:
    """Take a bucket of bfloat16 apart into eight large arrays of float32, halved."""
    arrays, layout, bucket = _large(bench)
    bench.device.put(bucket[:CHECKED], np.arange(bucket[:CHECKED].size, dtype=F32).astype(BF16))
    copy = DeviceCopyOut(bench.device, layout, [(0, layout.count, bucket)], 2, [F32] * len(arrays))
    figures = bench.measure(lambda turn: _exhaust(copy, arrays), 6 * layout.count)
    bench.expect(arrays[0][:CHECKED], bench.device.get(bucket[: arrays[0][:CHECKED].size]).astype(F32) / F32.type(2))
    return figures


def gradients(bench: _Bench) -> dict[str, float]:
    """Fuse the gradients of ResNet-50 into a bucket, all in one launch."""
    counts = [prod(shape) for shape in bench.sizes.shapes or resnet50()]
    layout = Layout(counts)
    sets = []
    for _ in range(bench.sizes.sets):
        bucket = bench.device.allocate(4 * layout.count).view(F32)
        sets.append((DeviceCopyIn(bench.device, layout, bucket, [F32] * len(counts)), bench.floats(counts)))
    figures = bench.measure(lambda turn: _exhaust(*sets[turn % len(sets)]), 8 * layout.count)
    bench.expect(bucket, np.concatenate([bench.device.get(array) for array in sets[-1][1]]))
    return figures


def sum_of_peers(bench: _Bench) -> dict[str, float]:
    """Sum the arenas of four ranks in one pass, as cuda_ipc does; here all four are of this GPU and this process."""
    arenas = [bench.random(bench.sizes.nbytes // 2) for _ in range(PEERS)]
    table = bench.device.allocate(8 * PEERS)
    bench.device.put(table, np.array([address(arena) for arena in arenas], np.uint64).view(np.uint8))
    target, count = bench.device.allocate(bench.sizes.nbytes // 2), bench.sizes.nbytes // 8
    arguments = address(table), np.int32(PEERS), 0, address(target), count, np.int32(1)
    kernel, stream = fold_kernel(F32, ReduceOp.SUM), bench.device.current_stream()
    bench.device.prepare(kernel)
    figures = bench.measure(lambda turn: stream.launch(kernel, MAX_BLOCKS, arguments), 4 * count * (PEERS + 1))
    expected = reduce(np.add, [bench.device.get(arena.view(F32)[:CHECKED]) for arena in (*arenas[1:], arenas[0])])
    bench.expect(target.view(F32)[:CHECKED], expected)
    return figures


def staged(bench: _Bench) -> dict[str, float]:
    """Take an array down to pinned memory and up again, chunk by chunk, with nobody to wait for; and each way alone."""
    from mpi4py import MPI

    start()
    nbytes = bench.sizes.nbytes // 2
    buffer, pinned = bench.target[:nbytes], bench.device.pinned(nbytes)
    host, stream = int(pinned.__array_interface__["data"][0]), bench.device.current_stream()
    rounds = bench.sizes.rounds
    down = nbytes / bench.seconds(lambda _: stream.copy(host, address(buffer), nbytes), rounds)
    up = nbytes / bench.seconds(lambda _: stream.copy(address(buffer), host, nbytes), rounds)
    group = Group(MPI.COMM_SELF.Dup(), "alone")
    operation = StagedTransport(group, bench.device).all_reduce(buffer.view(F32), ReduceOp.SUM)
    both = nbytes / bench.seconds(lambda _: drive(operation.run(), lambda: "staged", STUCK_SECONDS), rounds)
    group.close()
    rates = {"gbs": both, "down_gbs": down, "up_gbs": up}
    return {name: round(rate / GIGA, 2) for name, rate in rates.items()} | {"fraction": round(both / min(down, up), 3)}


TIMINGS: dict[str, Callable[[_Bench], dict[str, float]]] = {
    function.__name__: function for function in (pack, unpack, gradients, sum_of_peers, staged)
}


def main(timing: str) -> dict[str, float]:
    device = Device(0)
    with device.activate(device.stream()):
        return TIMINGS[timing](_Bench(device, Sizes()))


def _large(bench: _Bench) -> tuple[list[DeviceArray], Layout, DeviceArray]:
    """Return eight arrays of float32, how they lie in a bucket, and the bucket, of bfloat16."""
    layout = Layout([bench.sizes.nbytes // 32] * 8)
    return bench.floats([bench.sizes.nbytes // 32] * 8), layout, bench.device.allocate(2 * layout.count).view(BF16)


def _exhaust(copy: DeviceCopyIn | DeviceCopyOut, arrays: Sequence[DeviceArray]) -> None:
    for _ in copy.run(arrays):
        pass


if __name__ == "__main__":
    write_report(main)
