"""What a warm call costs the host, on a GPU and an NCCL that do nothing, or on a real one beside CuPy's own call of NCCL.

    mpistrat run -n 2 -m tests.gpu.host_time null --report FILE
    mpistrat run -n 2 -m tests.gpu.host_time real --report FILE

Times are of the calling thread, of which the quickest tenth is told: other processes disturb it least.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy as np

import mpistrat
from mpistrat.device.abstract import Device, address
from mpistrat.launch.bootstrap import start
from mpistrat.reduction import ReduceOp
from mpistrat.transports.nccl_bindings import cupy_binding
from tests.gpu import null_device
from tests.gpu.calls import raw_nccl
from tests.gpu.program import settle, the_gpu, write_report

SUM, MEAN = ReduceOp.SUM, ReduceOp.MEAN
ARRAYS, SHAPES, COUNT, CALLS = 161, 100, 1000, 2000
REAL_CALLS = 200  # no more than a GPU queues: the host would wait for ranks that take turns on it


def measure(where: str) -> dict[str, Any]:
    """Return microseconds of the host by call."""
    comm = start()
    if where == "null":
        with null_device.bound(comm.size) as null:
            return of_calls(comm, null)
    assert where == "real", "null or real"
    device = the_gpu()
    return {**of_calls(comm, device, REAL_CALLS), "CuPy's allReduce": bare_all_reduce(comm, device, cupy_binding())}


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


def bare_all_reduce(comm: Any, device: Device, nccl: Any) -> float:
    """Return the time of a binding's own call of NCCL."""
    x, stream = device.array_module.empty(COUNT, np.float32), device.current_stream().pointer
    pointer = address(x)
    with raw_nccl(comm, nccl) as raw:
        return _microseconds(lambda: raw(pointer, pointer, COUNT, stream), REAL_CALLS, device, comm.Barrier)


if __name__ == "__main__":
    write_report(measure)
    sys.exit(0)
