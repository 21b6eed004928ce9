"""An all-reduce of GPU memory that adds in the order of the ranks, of an exchange and an all-gather.

As `ordered` on the host: each rank gets its part of the buffers of all others, one kernel adds them in the order of the ranks,
and all gather the sums. So the bits depend on the values and on the number of ranks alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from mpistrat.device.abstract import Device, DeviceArray, address
from mpistrat.device.kernels import PACKET_BYTES, fold_kernel, num_blocks
from mpistrat.reduction import ReduceOp
from mpistrat.transports.base import Operation
from mpistrat.transports.steps import Steps

Exchange = Callable[[Sequence[DeviceArray], Sequence[DeviceArray]], Steps]


def ordered_on_device(
    device: Device,
    rank: int,
    buffer: DeviceArray,
    bounds: Sequence[int],
    op: ReduceOp,
    exchange: Exchange,
    gather: Operation,
) -> Operation:
    """Bind: fold the buffers of all ranks in the order of the ranks; every rank gets the same bits."""
    size, itemsize = len(bounds) - 1, int(buffer.dtype.itemsize)
    parts = [buffer[start:stop] for start, stop in pairwise(bounds)]
    own = parts[rank]
    stride = -(-own.nbytes // PACKET_BYTES) * PACKET_BYTES
    received = device.allocate(max((size - 1) * stride, 1))
    places = iter(range(size - 1))
    # the addends of all ranks, in their order: this rank's own one lies in the buffer
    addends = [own if peer == rank else _at(received, next(places) * stride, own) for peer in range(size)]
    kernel, table = fold_kernel(buffer.dtype, op), device.allocate(8 * size)
    device.prepare(kernel)
    device.put(table, np.array([address(addend) for addend in addends], np.uint64).view(np.uint8))
    in_order = np.int32(0), max(own.size, 1), 0  # from rank 0 on, in one part
    arguments = address(table), np.int32(size), 0, address(own), own.size, *in_order

    def run() -> Steps:
        yield from exchange(parts, addends)
        if own.size:
            device.current_stream().launch(kernel, num_blocks(own.size, itemsize), arguments)
        yield from gather.run()

    return Operation(run, gather.parts, received.nbytes + table.nbytes)


def _at(memory: DeviceArray, offset: int, like: DeviceArray) -> DeviceArray:
    return memory[offset : offset + like.nbytes].view(like.dtype)
