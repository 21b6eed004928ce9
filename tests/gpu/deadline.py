"""A collective of NCCL that one rank alone enters: its deadline must end it, and the GPU must be free again.

mpiexec -n 2 python -m tests.gpu.deadline --report FILE
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from mpistrat.errors import DeadlineExceededError
from mpistrat.groups.group import Group
from mpistrat.launch.bootstrap import start
from mpistrat.reduction import ReduceOp
from mpistrat.steps import drive
from mpistrat.transports.nccl import NcclTransport
from tests.gpu.program import write_report

DEADLINE_SECONDS = 2.0
FIRST_SECONDS = 40.0  # the first collective connects the ranks


def check(group: Group, make: Callable[[Group], NcclTransport], seconds: float = DEADLINE_SECONDS) -> dict[str, float]:
    """Let rank 0 alone enter a collective. A collective call.

    Returns ``seconds_late``: what passed between the deadline and the end of it, until the GPU had done other work.
    """
    transport = make(group)
    device = transport.device
    assert device is not None, "NCCL works on GPUs"
    operation = transport.all_reduce(transport.allocate(4096).view(np.float32), ReduceOp.SUM)
    drive(operation.run(), lambda: "the first sum", FIRST_SECONDS)
    begun = time.monotonic()
    if group.rank == 0:
        try:
            drive(operation.run(), lambda: "a sum that nobody else enters", seconds)
        except DeadlineExceededError:
            pass
        else:
            raise AssertionError("a sum ended although only one rank had entered it")
    group.comm.Barrier()
    transport.abort("rank 0 was left alone, as was meant")
    values, memory = np.arange(1024, dtype=np.float32), device.allocate(4096).view(np.float32)
    device.put(memory, values)
    if not np.array_equal(device.get(memory), values):
        raise AssertionError("the GPU does not do as it is told after a communicator was aborted")
    late = max(group.comm.allgather(time.monotonic() - begun)) - seconds
    return {"seconds_late": round(late, 2)}


def main() -> dict[str, float]:
    """Let a collective of all ranks pass its deadline."""
    comm = start()
    return check(Group(comm.Dup(), "world", tuple(range(comm.Get_size()))), NcclTransport)


if __name__ == "__main__":
    write_report(main)
