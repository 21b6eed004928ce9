"""mpi_ring: a segmented ring over Isend and Irecv, bandwidth-optimal between nodes; `ring` has its schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat.arrays import Array
from mpistrat.groups.group import Group
from mpistrat.reduction import ReduceOp, combine
from mpistrat.settings import MAX_MESSAGE_BYTES
from mpistrat.transports.base import Operation, Part, Transport
from mpistrat.transports.mpi import MpiTransport, mpi_datatype
from mpistrat.transports.ring import Ring
from mpistrat.transports.steps import WAITING, WORKED, Steps

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MpiRingTransport"]

# with its header just below 64 KiB, MPI's eager limit over TCP: longer messages wait for the receiver to answer (rendezvous)
SEGMENT_BYTES = 63 << 10
RECEIVES_AHEAD = 8


class MpiRingTransport(Transport):
    """All-reduce, reduce-scatter and all-gather by rings."""

    name = "mpi_ring"

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._mpi = MpiTransport(group)
        self._scratch: dict[int, Array] = {}

    @classmethod
    def probe(cls, group: Group) -> str:
        """Return an empty text: host buffers always work."""
        return ""

    def allocate(self, nbytes: int) -> Array:
        """Return ordinary memory."""
        return self._mpi.allocate(nbytes)

    def all_reduce(self, buffer: Array, op: ReduceOp, channel: int = 0) -> Operation:
        """Bind a ring reduce-scatter, followed without a barrier by a ring all-gather."""
        ring = Ring.all_reduce(self.group.rank, self.group.size, buffer.size, self._limit(buffer))
        return _Ring(self.group, buffer, ring, op, self._receive_memory(channel), channel).operation()

    def reduce_scatter(self, buffer: Array, bounds: Sequence[int], op: ReduceOp) -> Operation:
        """Bind the first half of the ring, shifted so that rank r ends with part r."""
        ring = Ring.reduce_scatter(self.group.rank, self.group.size, bounds, self._limit(buffer))
        return _Ring(self.group, buffer, ring, op, self._receive_memory()).operation()

    def all_gather(self, buffer: Array, bounds: Sequence[int]) -> Operation:
        """Bind the second half of the ring."""
        ring = Ring.all_gather(self.group.rank, self.group.size, bounds, self._limit(buffer))
        return _Ring(self.group, buffer, ring, ReduceOp.SUM, self._receive_memory()).operation()

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the receive buffers of all channels."""
        return sum(memory.nbytes for memory in self._scratch.values())

    def _limit(self, buffer: Array) -> int:
        return min(SEGMENT_BYTES, self.group.settings[MAX_MESSAGE_BYTES]) // buffer.itemsize

    def _receive_memory(self, channel: int = 0) -> Array:
        """Return the receive buffers of a channel, shared by its operations, which run one after the other."""
        if channel not in self._scratch:
            self._scratch[channel] = np.empty(RECEIVES_AHEAD * SEGMENT_BYTES, np.uint8)
        return self._scratch[channel]


class _Ring:
    """A ring bound to its buffer."""

    def __init__(self, group: Group, buffer: Array, ring: Ring, op: ReduceOp, memory: Array, channel: int = 0) -> None:
        self.group, self.buffer, self.fold, self.channel = group, buffer, combine(op), channel
        self.segments, self.reduces, self.sent_before = ring.segments, ring.reduces, ring.sent_before()
        self.targets = [buffer[part] for part in ring.targets]
        scratch = memory.view(buffer.dtype)[: RECEIVES_AHEAD * ring.width].reshape(RECEIVES_AHEAD, ring.width)
        self.receive_buffers = [
            scratch[index % RECEIVES_AHEAD, : target.size] if reduces else target
            for index, (target, reduces) in enumerate(zip(self.targets, self.reduces, strict=True))
        ]
        self.datatype = mpi_datatype(buffer.dtype)
        self.sends = [self._message(buffer[part]) for part in ring.sends]
        self.receives = list(map(self._message, self.receive_buffers))
        self.digest, self.tag = group.call.digest, group.call.tag(channel)

    def operation(self) -> Operation:
        return Operation(self._run, [Part(0, self.buffer.size, (self.buffer,))])

    def _message(self, array: Array) -> list[Any]:
        return [array, array.size, self.datatype]

    def _run(self) -> Steps:
        comm, fold, segments, call, count = self.group.comm, self.fold, self.segments, self.group.call, len(self.sends)
        sends, receive_buffers, sent_before = self.sends, self.receive_buffers, self.sent_before
        if self.digest != call.digest:
            self.digest, self.tag = call.digest, call.tag(self.channel)
        tag = self.tag
        left, right = (self.group.rank - 1) % self.group.size, (self.group.rank + 1) % self.group.size
        received: list[MPI.Request] = []
        sent = [comm.Isend(sends[index], right, tag) for index in range(min(segments, count))]
        for index in range(count):
            # post receives ahead, but not into memory that is still being sent
            while len(received) < min(index + RECEIVES_AHEAD, count):
                before = sent_before[len(received)]
                if before is not None:
                    if before >= len(sent):
                        break
                    while not sent[before].Test():
                        yield WAITING
                received.append(comm.Irecv(self.receives[len(received)], left, tag))
            while not received[index].Test():
                yield WAITING
            if self.reduces[index]:
                target = self.targets[index]
                fold(target, receive_buffers[index], out=target)
                yield WORKED
            if index + segments < count:
                sent.append(comm.Isend(sends[index + segments], right, tag))
        for request in sent:
            while not request.Test():
                yield WAITING
