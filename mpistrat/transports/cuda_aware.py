"""cuda_aware: a segmented ring over Isend and Irecv of device memory, summed by the device. See `ring` for its order.

MPI moves bytes between GPUs and does nothing else: its own reductions of device memory take the way through the host's
processor, where they work at all.

File law: MPI knows no streams. What is sent has been written, which the host has seen by an event; what was received is read
by work that is put on a stream afterwards. MPI is told address, count and datatype, never an array: it would sum the bytes of
a bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat import settings
from mpistrat.device.abstract import Device, DeviceArray, Event, Stream, address
from mpistrat.device.binding import bound_device
from mpistrat.device.cuda import CudaDevice
from mpistrat.device.kernels import fold_into_kernel
from mpistrat.device.segments import PACKET_BYTES, THREADS
from mpistrat.errors import DeadlineExceededError, TransportError
from mpistrat.groups.group import Group
from mpistrat.launch.cuda_awareness import agreed_verdict
from mpistrat.reduction import ReduceOp
from mpistrat.transports.base import Operation, Part, Transport
from mpistrat.transports.ring import Ring
from mpistrat.transports.steps import WAITING, WORKED, Steps, drive, leave_to_peers

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["CudaAwareRing", "segment_bytes"]

SEGMENT_BYTES = (
    1 << 22
)  # the fragments in which UCX pipelines memory of NVIDIA GPUs; each message of MPI is matched and registered
SMALL_SEGMENT_BYTES = 1 << 20
SEGMENTS_OF_A_PART = 4  # if they are not too small: one is summed while others are sent
RECEIVES_AHEAD = 4

_FIRST_COUNT = 1 << 12
_FIRST_SECONDS = 60.0


class CudaAwareRing(Transport):
    """The ring verbs on device memory, for an MPI that takes it.

    Parameters
    ----------
    group : Group
        Ranks with a GPU each; between nodes, for the ranks of one node have better ways.
    device : Device, optional
        This rank's GPU.
    segment_bytes : int
        The longest message; a multiple of 16.
    """

    name = "cuda_aware"

    def __init__(self, group: Group, device: Device | None = None, segment_bytes: int = SEGMENT_BYTES) -> None:
        super().__init__(group)
        self.device = self._device = device or CudaDevice()
        self._stream = self._device.stream()
        self._segment_bytes = segment_bytes
        self._landings: dict[int, DeviceArray] = {}

    @classmethod
    def probe(cls, group: Group) -> str:
        """Return why MPI is not to be handed device memory, or an empty text: also where it should do well, and did not."""
        verdict = agreed_verdict(group.comm)
        return cls(group, bound_device()).first_exchange() if verdict.is_aware else verdict.reason

    def first_exchange(self) -> str:
        """Return what was wrong with a first sum of known values, or an empty text. A collective call.

        Raises
        ------
        TransportError
            On all ranks of the group, if it did not end within a minute on one of them, or one has no memory for it.
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

    def allocate(self, nbytes: int) -> DeviceArray:
        """Return memory of the device."""
        return self._device.allocate(nbytes)

    def all_reduce(self, buffer: DeviceArray, op: ReduceOp, channel: int = 0) -> Operation:
        """Bind a ring reduce-scatter followed, without a pause, by a ring all-gather."""
        size = self.group.size
        ring = Ring.all_reduce(self.group.rank, size, buffer.size, self._limit(buffer, -(-buffer.size // size)))
        return self._operation(buffer, ring, op, channel)

    def reduce_scatter(self, buffer: DeviceArray, bounds: Sequence[int], op: ReduceOp) -> Operation:
        """Bind the first half of the ring, shifted so that rank r ends with part r."""
        ring = Ring.reduce_scatter(self.group.rank, self.group.size, bounds, self._limit(buffer, _longest(bounds)))
        return self._operation(buffer, ring, op)

    def all_gather(self, buffer: DeviceArray, bounds: Sequence[int]) -> Operation:
        """Bind the second half of the ring."""
        ring = Ring.all_gather(self.group.rank, self.group.size, bounds, self._limit(buffer, _longest(bounds)))
        return self._operation(buffer, ring, ReduceOp.SUM)

    def reduce(self, buffer: DeviceArray, op: ReduceOp, root: int = 0) -> Operation:
        """Bind a reduce-scatter in which all is the root's."""
        return self.reduce_scatter(buffer, self._all_of(root, buffer), op)

    def broadcast(self, buffer: DeviceArray, root: int = 0) -> Operation:
        """Bind an all-gather in which all is the root's."""
        return self.all_gather(buffer, self._all_of(root, buffer))

    @property
    def scratch_bytes(self) -> int:
        """Where segments land: as many for each channel as are received ahead."""
        return sum(memory.nbytes for memory in self._landings.values())

    def _sums_rightly(self) -> bool:
        rank, size = self.group.rank, self.group.size
        values = np.arange(_FIRST_COUNT, dtype=np.int32)
        with self._device.activate():
            buffer = self.allocate(values.nbytes).view(np.int32)
            self._device.put(buffer, values + rank)
            drive(self.all_reduce(buffer, ReduceOp.SUM).run(), lambda: "the first exchange of device memory", _FIRST_SECONDS)
            return np.array_equal(self._device.get(buffer), values * size + sum(range(size)))

    def _all_of(self, root: int, buffer: DeviceArray) -> list[int]:
        return [0 if rank <= root else buffer.size for rank in range(self.group.size + 1)]

    def _limit(self, buffer: DeviceArray, longest_part: int) -> int:
        """Return the elements of the longest segment, if a part has up to `longest_part` of them."""
        itemsize = int(buffer.dtype.itemsize)
        longest = segment_bytes(longest_part * itemsize, self._segment_bytes)
        return min(longest, settings.MAX_MESSAGE_BYTES.read()) // itemsize

    def _operation(self, buffer: DeviceArray, ring: Ring, op: ReduceOp, channel: int = 0) -> Operation:
        if channel not in self._landings:
            self._landings[channel] = self._device.allocate(RECEIVES_AHEAD * self._segment_bytes)
        bound = _DeviceRing(self.group, self._device, self._stream, buffer, ring, op, self._landings[channel], channel)
        return Operation(bound.run, [Part(0, buffer.size, (buffer,))])


def segment_bytes(part_bytes: int, longest: int = SEGMENT_BYTES) -> int:
    """Return the bytes of the segments that a part is sent in: large ones of a large part, several of a part of middle size."""
    return min(longest, max(SMALL_SEGMENT_BYTES, -(-part_bytes // SEGMENTS_OF_A_PART)))


class _DeviceRing:
    """A ring bound to its buffer."""

    def __init__(
        self,
        group: Group,
        device: Device,
        stream: Stream,
        buffer: DeviceArray,
        ring: Ring,
        op: ReduceOp,
        landing: DeviceArray,
        channel: int,
    ) -> None:
        self._comm, self._call, self._channel, self._device, self._stream = group.comm, group.call, channel, device, stream
        self._left, self._right = (group.rank - 1) % group.size, (group.rank + 1) % group.size
        self._memory = (buffer, landing)  # held as long as MPI may write there
        self._segments, self._sent_before = ring.segments, ring.sent_before()
        itemsize, start = int(buffer.dtype.itemsize), address(buffer)
        slot_bytes = landing.nbytes // RECEIVES_AHEAD
        self._sends = [_message(start, part, itemsize) for part in ring.sends]
        self._receives: list[list[Any]] = []
        self._folds: list[tuple[str, int, tuple[Any, ...]] | None] = []
        kernel = fold_into_kernel(buffer.dtype, op) if any(ring.reduces) else ""
        if kernel:
            device.prepare(kernel)
        for index, (target, reduces) in enumerate(zip(ring.targets, ring.reduces, strict=True)):
            if not reduces:
                self._receives.append(_message(start, target, itemsize))
                self._folds.append(None)
                continue
            count, slot = target.stop - target.start, address(landing) + index % RECEIVES_AHEAD * slot_bytes
            self._receives.append(_message(slot, slice(0, count), itemsize))
            num_blocks = -(-count * itemsize // (THREADS * PACKET_BYTES))
            self._folds.append((kernel, num_blocks, (start + target.start * itemsize, slot, count)) if count else None)

    def run(self) -> Steps:
        count = len(self._sends)
        if not count:
            return
        before = self._device.current_stream().record()
        while not before.done():  # the buffer is written, and nobody reads what will be overwritten
            yield WAITING
        self._tag = self._call.tag(self._channel)
        sent = [self._comm.Isend(message, self._right, self._tag) for message in self._sends[: self._segments]]
        arriving: list[MPI.Request] = []
        folding: list[Event | None] = []  # of each message that has arrived, until it is there
        passed_on = 0
        try:
            while passed_on < count:
                worked = self._receive_ahead(arriving, sent, passed_on)
                if len(folding) < len(arriving) and arriving[len(folding)].Test():
                    folding.append(self._fold(len(folding)))
                    worked = True
                if passed_on < len(folding) and _is_over(folding[passed_on]):
                    if passed_on + self._segments < count:
                        sent.append(self._comm.Isend(self._sends[passed_on + self._segments], self._right, self._tag))
                    folding[passed_on] = None
                    passed_on += 1
                    worked = True
                yield WORKED if worked else WAITING
            for request in sent:
                while not request.Test():
                    yield WAITING
        except GeneratorExit:
            leave_to_peers((self, sent, arriving))  # MPI may still write there
            raise

    def _receive_ahead(self, arriving: list[MPI.Request], sent: list[MPI.Request], passed_on: int) -> bool:
        """Post the next receive if its slot is free, or if what it overwrites has left; return whether it was posted."""
        index = len(arriving)
        if index >= min(passed_on + RECEIVES_AHEAD, len(self._receives)):
            return False
        before = self._sent_before[index]
        if before is not None and (before >= len(sent) or not sent[before].Test()):
            return False
        arriving.append(self._comm.Irecv(self._receives[index], self._left, self._tag))
        return True

    def _fold(self, index: int) -> Event | None:
        """Let the device fold a message that has arrived; return what tells when that is done."""
        fold = self._folds[index]
        if fold is None:
            return None
        kernel, num_blocks, arguments = fold
        self._stream.launch(kernel, num_blocks, arguments)
        return self._stream.record()


def _longest(bounds: Sequence[int]) -> int:
    return max(stop - start for start, stop in pairwise(bounds))


def _is_over(event: Event | None) -> bool:
    return event is None or event.done()


def _message(start: int, part: slice, itemsize: int) -> list[Any]:
    from mpi4py import MPI

    nbytes = (part.stop - part.start) * itemsize
    return [MPI.buffer.fromaddress(start + part.start * itemsize, nbytes), nbytes, MPI.BYTE]
