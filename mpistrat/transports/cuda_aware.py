"""cuda_aware: a ring over Isend and Irecv of device memory, summed by the device; `ring` has its schedule.

MPI moves bytes between GPUs and does nothing else: its own reductions of device memory run on the host's processor, where
they work at all.

Invariant: MPI knows no streams. What is sent has been written, which the host has seen by an event; what was received is read
by work that is put on a stream afterwards. MPI gets address, count and datatype, never an array: it would sum the bytes of a
bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np

from mpistrat import settings
from mpistrat.device.cuda import Device, DeviceArray, Event, Stream, address
from mpistrat.device.kernels import fold_into_kernel, num_blocks
from mpistrat.errors import MpistratError, TransportError
from mpistrat.groups.agreement import gather_or_raise
from mpistrat.groups.group import Group
from mpistrat.lazy import MPI
from mpistrat.reduction import ReduceOp
from mpistrat.steps import drive, until
from mpistrat.transports.base import DeviceTransport, Operation, in_turn
from mpistrat.transports.ring import Folds, Halves, Pairs, RingTransport

# MPI matches each message, and registers its memory where it must; UCX pipelines memory of NVIDIA GPUs in fragments of 4 MiB
SEGMENT_BYTES = 1 << 22
SMALL_SEGMENT_BYTES = 1 << 20
SEGMENTS_OF_A_PART = 4  # if they are not too small: one is summed while others are sent

_FIRST_COUNT = 1 << 12
_FIRST_SECONDS = 60.0


class CudaAwareTransport(RingTransport, DeviceTransport):
    """Rings on device memory, for an MPI that takes it."""

    name = "cuda_aware"
    receives_ahead = 4

    def __init__(self, group: Group, device: Device | None = None, segment_bytes: int = SEGMENT_BYTES) -> None:
        super().__init__(group, device)
        self.segment_bytes = segment_bytes

    @cached_property
    def _stream(self) -> Stream:  # made when a verb is bound: all ranks are told if that fails on one
        return self.device.stream()

    def first_exchange(self) -> str:
        """Return what was wrong with a first sum of known values, or an empty text. A collective call.

        Raises TransportError on all ranks of the group, if it did not end within a minute on one of them, or one has no
        memory for it.
        """
        try:
            answers = gather_or_raise(self.group, self._sums_rightly)
        except MpistratError as error:  # what is under way would be taken for messages of others
            text = f"{self.group.name}: {error}; {settings.MPI_GPU.name}=off goes through memory of the host"
            raise TransportError(text) from error
        return "" if all(answers) else "a first sum of device memory gave wrong values"

    def _sums_rightly(self) -> bool:
        rank, size = self.group.rank, self.group.size
        values = np.arange(_FIRST_COUNT, dtype=np.int32)
        with self.device.activate():
            buffer = self.allocate(values.nbytes).view(np.int32)
            self.device.put(buffer, values + rank)
            drive(self.all_reduce(buffer, ReduceOp.SUM).run(), lambda: "the first exchange of device memory", _FIRST_SECONDS)
            return np.array_equal(self.device.get(buffer), values * size + sum(range(size)))

    def _segment_bytes(self, part_bytes: int) -> int:
        """Return the bytes of the segments of a part: large ones of a large part, several of a part of middle size."""
        return min(self.segment_bytes, max(SMALL_SEGMENT_BYTES, -(-part_bytes // SEGMENTS_OF_A_PART)))

    def _bind(self, buffer: DeviceArray, bounds: Sequence[int], op: ReduceOp, halves: Halves, channel: int = 0) -> Operation:
        bound = super()._bind(buffer, bounds, op, halves, channel)
        # the buffer is written, and nobody reads what will be overwritten
        return in_turn(bound.parts, lambda: until(self.device.current_stream().record().done), bound.run)

    def _message(self, part: DeviceArray) -> list[Any]:
        return [MPI.buffer.fromaddress(address(part), part.nbytes), part.nbytes, MPI.BYTE]

    def _folds(self, dtype: np.dtype[Any], op: ReduceOp, pairs: Pairs) -> Folds:
        kernel, stream = fold_into_kernel(dtype, op) if any(pairs) else "", self._stream
        if kernel:
            self.device.prepare(kernel)

        def fold(num_blocks: int, arguments: tuple[int, ...]) -> Event:
            stream.launch(kernel, num_blocks, arguments)
            return stream.record()

        return [
            pair and partial(fold, num_blocks(pair[0].size, dtype.itemsize), (*map(address, pair), pair[0].size))
            for pair in pairs
        ]
