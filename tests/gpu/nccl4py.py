"""nccl4py on a GPU: what its all-reduce costs the host beside CuPy's, and sums in a window on memory of NCCL.

mpiexec -n 2 python -m tests.gpu.nccl4py --report FILE
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from mpistrat.device.abstract import Device, address
from mpistrat.groups.group import Group
from mpistrat.launch.bootstrap import start
from mpistrat.reduction import ReduceOp
from mpistrat.steps import drive
from mpistrat.transports.nccl import NcclTransport
from mpistrat.transports.nccl_bindings import BINDINGS
from tests.gpu.host_time import bare_all_reduce
from tests.gpu.program import settle, the_gpu, write_report

COUNTS = (1, 1000, 1 << 18, 1 << 24)
SUM_SECONDS = 20.0


def measure() -> dict[str, Any]:
    """Return what is found on this rank's GPU."""
    return compare(start(), the_gpu())


def compare(comm: Any, device: Device) -> dict[str, Any]:
    """Return microseconds of the host by binding, what became of a window, and how many sums in windows were right."""
    found = {f"{name}'s allReduce": bare_all_reduce(comm, device, make()) for name, make in BINDINGS.items()}
    return {**found, "window": _window(comm, device), **_sums(comm, device)}


def _window(comm: Any, device: Device) -> str:
    """Return what NCCL answers to a rank alone that registers memory, and sums there."""
    library = BINDINGS["nccl4py"]()
    alone = library.NcclCommunicator(1, library.get_unique_id(), 0)
    memory = device.allocate(1 << 20, library.allocator)
    values = np.arange(memory.nbytes // 4, dtype=np.float32)
    device.put(memory.view(np.float32), values)
    try:
        window = alone.register(address(memory), memory.nbytes)
    except Exception as error:
        return f"{error}"
    start, stream = address(memory), device.current_stream().pointer
    alone.allReduce(start, start, values.size, library.NCCL_FLOAT32, library.NCCL_SUM, stream)
    assert np.array_equal(device.get(memory.view(np.float32)), values), "one rank's sum is not what it gave"
    if window:
        alone.deregister(window)
    alone.destroy()
    return "registered" if window else "none: NCCL has returned a null window"


def _sums(comm: Any, device: Device) -> dict[str, Any]:
    """Return whether all ranks have windows, sums that were right there, and how long it took to give memory up and back."""
    transport = NcclTransport(Group(comm.Dup(), "world", tuple(range(comm.Get_size()))), device, BINDINGS["nccl4py"]())
    size, rank, sums = comm.Get_size(), comm.Get_rank(), 0
    for count in COUNTS:
        for dtype in (np.dtype(np.float32), np.dtype(np.float16), np.dtype(np.int64)):
            buffer = transport.allocate(count * dtype.itemsize).view(dtype)
            operation = transport.all_reduce(buffer, ReduceOp.SUM)
            for turn in range(3):
                given = [(np.arange(count) * (peer + 1) + turn) % 17 for peer in range(size)]
                device.put(buffer, given[rank].astype(dtype))
                drive(operation.run(), lambda: "a sum in a window", SUM_SECONDS)
                assert np.array_equal(device.get(buffer), sum(given).astype(dtype)), f"{count} of {dtype}"
                sums += 1
            settle(device)
            transport.close()
    has_windows, begun = transport.has_windows, time.monotonic()
    transport.dispose()
    return {"has_windows": int(has_windows), "sums": sums, "dispose_seconds": round(time.monotonic() - begun, 2)}


if __name__ == "__main__":
    write_report(measure)
