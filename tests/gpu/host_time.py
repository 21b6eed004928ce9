"""What calls on a GPU cost, beside CuPy's own call of NCCL: the host's time of a warm one, and the time until all is done.

`null` is a GPU and an NCCL that do nothing. The host's time is of the calling thread, of which the quickest tenth is told:
other processes disturb it least. `overhead` waits for the end of each sum.

Ranks that share a GPU take turns on it: how fast NCCL is there says nothing of GPUs of their own, but both ways have the same
turns, so that whatever a call takes beyond NCCL's is ours.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from statistics import median
from typing import Any

import numpy as np

import mpistrat
from mpistrat.communicator.interface import BaseCommunicator
from mpistrat.device.cuda import Device, address
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.launch.bootstrap import start
from mpistrat.topology.world import World
from mpistrat.transports.nccl_bindings import cupy_binding
from tests.gpu import null_device
from tests.gpu.program import settle, the_gpu, write_report

SUM, MEAN = mpistrat.ReduceOp.SUM, mpistrat.ReduceOp.MEAN
ARRAYS, SHAPES, COUNT, CALLS = 161, 100, 1000, 2000
REAL_CALLS = 200  # no more than a GPU queues: the host would wait for ranks that take turns on it
SIZES = {"8B": 8, "4KiB": 1 << 12, "64KiB": 1 << 16, "1MiB": 1 << 20, "16MiB": 1 << 24, "256MiB": 1 << 28, "1GiB": 1 << 30}
ROUNDS, CHECKED = 50, 1000
ROUND_BYTES = 4 << 30  # of an array, in all rounds, but for the least number of these

Raw = Callable[[int, int, int, int], None]
"""Sums floats: the address of what is read, of what is written, how many, and the stream."""


def measure(what: str) -> Mapping[str, Any]:
    """Return microseconds: of the host by call, where that is ``null`` or ``real``, or until sums are there."""
    comm = start()
    if what == "null":
        with null_device.bound(comm.size) as null:
            return of_calls(comm, null)
    device = the_gpu()
    if what == "overhead":
        world = World.from_shape(f"1x{comm.size}")
        with mpistrat.Communicator(Hierarchy(comm, world)) as communicator, raw_nccl(comm, cupy_binding()) as raw:
            return overhead(communicator, device, raw)
    assert what == "real", "null, real or overhead"
    found, x = of_calls(comm, device, REAL_CALLS), device.array_module.empty(COUNT, np.float32)
    with raw_nccl(comm, cupy_binding()) as raw:
        bare = partial(raw, address(x), address(x), COUNT, device.current_stream().pointer)
        return {**found, "CuPy's allReduce": _microseconds(bare, REAL_CALLS, device, comm.Barrier)}


def of_calls(comm: Any, device: Device, num_calls: int = CALLS) -> dict[str, Any]:
    """Return the time of each kind of call, made so often."""
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    communicator = strategy.extended.communicator
    found: dict[str, Any] = {"path": communicator.path}
    for name, call in calls(communicator, device).items():
        found[name] = _microseconds(call, _times(name, num_calls), device, comm.Barrier)
    for name, call in _in_context(device).items():
        measured = strategy.run(_microseconds, (call, _times(name, num_calls), device, comm.Barrier))
        [found[name]] = strategy.experimental_local_results(measured)
    strategy.close()
    return found


def calls(communicator: Any, device: Device) -> dict[str, Callable[[], object]]:
    new = device.array_module.empty
    x, out, part = new(COUNT, np.float32), new(COUNT, np.float32), new(COUNT * communicator.size, np.float32)
    many, turns = [[new(COUNT, np.float32) for _ in range(ARRAYS)] for _ in range(2)], [0]
    square = new((communicator.size, communicator.size), np.float32)
    shapes = cycle([new(COUNT + extent, np.float32) for extent in range(SHAPES)])

    def other_addresses() -> object:
        turns[0] ^= 1
        return communicator.all_reduce(SUM, many[turns[0]], out=many[turns[0]])

    return {
        "all_reduce, one array": lambda: communicator.all_reduce(SUM, x),
        "all_reduce, one array, out=": lambda: communicator.all_reduce(SUM, x, out=out),
        "all_reduce, one array, in place": lambda: communicator.all_reduce(SUM, x, out=x),
        "all_reduce, mean of one array": lambda: communicator.all_reduce(MEAN, x),
        f"all_reduce, one array of {SHAPES} shapes in turn": lambda: communicator.all_reduce(SUM, next(shapes)),
        f"all_reduce, {ARRAYS} arrays": lambda: communicator.all_reduce(SUM, many[0]),
        f"all_reduce, {ARRAYS} arrays, in place": lambda: communicator.all_reduce(SUM, many[0], out=many[0]),
        f"all_reduce, {ARRAYS} arrays, other addresses": other_addresses,
        "reduce_scatter": lambda: communicator.reduce_scatter(SUM, part),
        "reduce_scatter, along axis 1": lambda: communicator.reduce_scatter(SUM, square, 1),
        "all_gather": lambda: communicator.all_gather(x),
        "all_gather, along axis 1": lambda: communicator.all_gather(square, 1),
        "broadcast": lambda: communicator.broadcast(x),
        "start_all_reduce, wait": lambda: communicator.start_all_reduce(SUM, x, out=out).wait(),
    }


def _in_context(device: Device) -> dict[str, Callable[[], object]]:
    new = device.array_module.empty
    x, many = new(COUNT, np.float32), [new(COUNT, np.float32) for _ in range(ARRAYS)]
    context = mpistrat.get_replica_context
    return {
        "context.all_reduce, one array": lambda: context().all_reduce("sum", x),
        f"context.all_reduce, {ARRAYS} arrays": lambda: context().all_reduce("sum", many),
    }


def _times(name: str, calls: int) -> int:
    return max(calls // 10, 1) if f"{ARRAYS} arrays" in name else calls


def _microseconds(call: Callable[[], object], times: int, device: Device, barrier: Callable[[], None]) -> float:
    """Return the host's time of a warm call, on this thread."""
    for _ in range(max(20, times // 10)):
        call()
    settle(device)
    barrier()
    spent = []
    for _ in range(times):
        begun = time.thread_time_ns()
        call()
        spent.append(time.thread_time_ns() - begun)
    settle(device)
    barrier()
    return round(float(np.percentile(spent, 10)) / 1e3, 1)


def overhead(
    communicator: BaseCommunicator, device: Device, raw: Raw, sizes: Mapping[str, int] = SIZES, rounds: int = ROUNDS
) -> dict[str, float]:
    """Return the median microseconds of each way to sum floats, and how ours compare with NCCL's. A collective call.

    Returns for each size ``nccl_us``, ``call_us`` and, with ``out=``, ``out_us``; ``ratio`` and ``ratio_out`` divide ours by
    NCCL's.
    """
    figures: dict[str, float] = {}
    for name, nbytes in sizes.items():
        taken = _beside_nccl(communicator, device, raw, nbytes // 4, min(rounds, max(10, ROUND_BYTES // nbytes)))
        figures |= {f"{way}_us_{name}": us for way, us in taken.items()}
        figures |= {f"ratio_{name}": round(taken["call"] / taken["nccl"], 3)}
        figures |= {f"ratio_out_{name}": round(taken["out"] / taken["nccl"], 3)}
    return figures


def _beside_nccl(communicator: BaseCommunicator, device: Device, raw: Raw, count: int, rounds: int) -> dict[str, float]:
    """Return the median microseconds of each way; they take turns."""
    values = np.arange(count, dtype=np.float32) % 97
    stream, source = device.current_stream(), device.array_module.asarray(values)
    summed, target = (device.array_module.zeros(count, np.float32) for _ in range(2))
    ways: dict[str, Callable[[], Any]] = {
        "nccl": lambda: raw(address(source), address(summed), count, stream.pointer) or summed,
        "call": lambda: communicator.all_reduce(mpistrat.ReduceOp.SUM, [source])[0],
        "out": lambda: communicator.all_reduce(mpistrat.ReduceOp.SUM, [source], out=[target])[0],
    }
    expected = values[:CHECKED] * np.float32(communicator.size)
    samples: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(2 + rounds):
        for way, run in ways.items():
            communicator.barrier()
            begun = time.perf_counter()
            found = run()
            settle(device)
            if turn > 1:  # the first ones make plans and compile kernels
                samples[way].append(time.perf_counter() - begun)
            elif not np.array_equal(device.get(found[:CHECKED]), expected):
                raise AssertionError(f"{way} of {count} elements of float32 gave a wrong result")
    return {way: round(1e6 * median(seconds), 1) for way, seconds in samples.items()}


@contextmanager
def raw_nccl(comm: Any, nccl: Any) -> Iterator[Raw]:
    """Give a binding's own call, of a communicator that it has for itself. A collective call."""
    bare = nccl.NcclCommunicator(comm.size, comm.bcast(nccl.get_unique_id() if comm.rank == 0 else None), comm.rank)
    kind, op = nccl.NCCL_FLOAT32, nccl.NCCL_SUM
    yield lambda source, target, count, stream: bare.allReduce(source, target, count, kind, op, stream)
    bare.destroy()


if __name__ == "__main__":
    write_report(measure)
    sys.exit(0)
