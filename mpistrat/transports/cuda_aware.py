"""cuda_aware: a ring over Isend and Irecv of device memory, summed by the device; `ring` has its schedule.

MPI moves bytes between GPUs and does nothing else: its own reductions of device memory run on the host's processor, where
they work at all.

Invariant: MPI knows no streams. What is sent has been written, which the host has seen by an event; what was received is read
by work that is put on a stream afterwards. MPI gets address, count and datatype, never an array: it would sum the bytes of a
bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpistrat import settings
from mpistrat.device.abstract import Device, DeviceArray, Event, address
from mpistrat.device.binding import bound_device
from mpistrat.device.kernels import fold_into_kernel, num_blocks
from mpistrat.errors import DeadlineExceededError, TransportError
from mpistrat.groups.agreement import bcast_or_raise
from mpistrat.groups.group import Group
from mpistrat.launch.cuda_awareness import find_verdict
from mpistrat.reduction import ReduceOp
from mpistrat.steps import Steps, drive, until
from mpistrat.transports.base import DeviceTransport, Operation
from mpistrat.transports.ring import RingTransport

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
        self._stream, self.segment_bytes = self.device.stream(), segment_bytes

    @classmethod
    def probe(cls, group: Group) -> str:
        """Return why MPI is not used on device memory, or an empty text: its build says so, or a first sum was wrong."""
        verdict = bcast_or_raise(group.comm, find_verdict)
        return cls(group, bound_device()).first_exchange() if verdict.is_aware else verdict.reason

    def first_exchange(self) -> str:
        """Return what was wrong with a first sum of known values, or an empty text. A collective call.

        Raises TransportError on all ranks of the group, if it did not end within a minute on one of them, or one has no
        memory for it.
        """
        try:
            is_right, failure = self._sums_rightly(), ""
        except (DeadlineExceededError, TransportError) as error:
            is_right, failure = False, str(error)
        answers = self.group.comm.allgather((is_right, failure))
        failure = next((text for _, text in answers if text), "")
        if failure:  # what is under way would be taken for messages of others
            raise TransportError(f"{self.group.name}: {failure}; {settings.MPI_GPU.name}=off goes through memory of the host")
        return "" if all(right for right, _ in answers) else "a first sum of device memory gave wrong values"

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

    def _bind(
        self, buffer: DeviceArray, bounds: Sequence[int], op: ReduceOp, halves: Sequence[tuple[int, bool]], channel: int = 0
    ) -> Operation:
        bound = super()._bind(buffer, bounds, op, halves, channel)

        def run() -> Steps:
            # the buffer is written, and nobody reads what will be overwritten
            yield from until(self.device.current_stream().record().done)
            yield from bound.run()

        return Operation(run, bound.parts)

    def _message(self, part: DeviceArray) -> list[Any]:
        from mpi4py import MPI

        return [MPI.buffer.fromaddress(address(part), part.nbytes), part.nbytes, MPI.BYTE]

    def _folding(
        self, dtype: np.dtype[Any], op: ReduceOp, folds: Sequence[tuple[DeviceArray, DeviceArray] | None]
    ) -> Callable[[int], Event | None]:
        kernel, stream = fold_into_kernel(dtype, op) if any(folds) else "", self._stream
        if kernel:
            self.device.prepare(kernel)
        launches = [pair and (num_blocks(pair[0].size, dtype.itemsize), (*map(address, pair), pair[0].size)) for pair in folds]

        def fold(index: int) -> Event | None:
            if (launch := launches[index]) is None:
                return None
            stream.launch(kernel, *launch)
            return stream.record()

        return fold
