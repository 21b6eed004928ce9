"""mpi_ring: a segmented ring over Isend and Irecv, the bandwidth-optimal path between nodes. See `ring` for its order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat import settings
from mpistrat.arrays import Array
from mpistrat.groups.group import Group
from mpistrat.reduction import ReduceOp, combine
from mpistrat.transports.base import Operation, Part, Transport
from mpistrat.transports.mpi import MpiTransport, mpi_datatype
from mpistrat.transports.ring import Ring
from mpistrat.transports.steps import WAITING, WORKED, Steps

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MpiRingTransport"]

# with its header just within 64 KiB, what MPI sends over TCP at once: anything longer waits until the receiver has answered,
# which takes as long as it takes the receiver to look
SEGMENT_BYTES = 63 << 10
RECEIVES_AHEAD = 8


class MpiRingTransport(Transport):
    """The ring verbs; reduce and broadcast to one rank are MPI's own."""

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
        """Bind a ring reduce-scatter followed, without a pause, by a ring all-gather."""
        ring = Ring.all_reduce(self.group.rank, self.group.size, buffer.size, _limit(buffer))
        return _Ring(self.group, buffer, ring, op, self._landing(channel), channel).operation()

    def reduce_scatter(self, buffer: Array, bounds: Sequence[int], op: ReduceOp) -> Operation:
        """Bind the first half of the ring, shifted so that rank r ends with part r."""
        ring = Ring.reduce_scatter(self.group.rank, self.group.size, bounds, _limit(buffer))
        return _Ring(self.group, buffer, ring, op, self._landing()).operation()

    def all_gather(self, buffer: Array, bounds: Sequence[int]) -> Operation:
        """Bind the second half of the ring."""
        ring = Ring.all_gather(self.group.rank, self.group.size, bounds, _limit(buffer))
        return _Ring(self.group, buffer, ring, ReduceOp.SUM, self._landing()).operation()

    def reduce(self, buffer: Array, op: ReduceOp, root: int = 0) -> Operation:
        """Bind MPI_Reduce."""
        return self._mpi.reduce(buffer, op, root)

    def broadcast(self, buffer: Array, root: int = 0) -> Operation:
        """Bind MPI_Bcast."""
        return self._mpi.broadcast(buffer, root)

    @property
    def scratch_bytes(self) -> int:
        """Where segments land: as many for each channel as are received ahead."""
        return sum(memory.nbytes for memory in self._scratch.values())

    def _landing(self, channel: int = 0) -> Array:
        """Return the memory of a channel; its operations follow each other, so that they share it."""
        if channel not in self._scratch:
            self._scratch[channel] = np.empty(RECEIVES_AHEAD * SEGMENT_BYTES, np.uint8)
        return self._scratch[channel]


class _Ring:
    """A ring bound to its buffer."""

    def __init__(self, group: Group, buffer: Array, ring: Ring, op: ReduceOp, landing: Array, channel: int = 0) -> None:
        self.group, self.buffer, self.fold, self.channel = group, buffer, combine(op), channel
        self.segments, self.reduces, self.sent_before = ring.segments, ring.reduces, ring.sent_before()
        self.targets = [buffer[part] for part in ring.targets]
        scratch = landing.view(buffer.dtype)[: RECEIVES_AHEAD * ring.width].reshape(RECEIVES_AHEAD, ring.width)
        self.landings = [
            scratch[index % RECEIVES_AHEAD, : target.size] if reduces else target
            for index, (target, reduces) in enumerate(zip(self.targets, self.reduces, strict=True))
        ]
        self.datatype = mpi_datatype(buffer.dtype)
        self.sends = [self._message(buffer[part]) for part in ring.sends]
        self.receives = list(map(self._message, self.landings))
        self.word, self.tag = group.call.word, group.call.tag(channel)

    def operation(self) -> Operation:
        return Operation(self._run, [Part(0, self.buffer.size, (self.buffer,))])

    def _message(self, array: Array) -> list[Any]:
        return [array, array.size, self.datatype]

    def _run(self) -> Steps:
        comm, fold, segments, call, count = self.group.comm, self.fold, self.segments, self.group.call, len(self.sends)
        sends, landings, sent_before = self.sends, self.landings, self.sent_before
        if self.word != call.word:
            self.word, self.tag = call.word, call.tag(self.channel)
        tag = self.tag
        left, right = (self.group.rank - 1) % self.group.size, (self.group.rank + 1) % self.group.size
        arriving: list[MPI.Request] = []
        sent = [comm.Isend(sends[index], right, tag) for index in range(min(segments, count))]
        for index in range(count):
            # receives are posted ahead, as far as the memory that they land in is known to have been sent
            while len(arriving) < min(index + RECEIVES_AHEAD, count):
                before = sent_before[len(arriving)]
                if before is not None:
                    if before >= len(sent):
                        break
                    while not sent[before].Test():
                        yield WAITING
                arriving.append(comm.Irecv(self.receives[len(arriving)], left, tag))
            while not arriving[index].Test():
                yield WAITING
            if self.reduces[index]:
                target = self.targets[index]
                fold(target, landings[index], out=target)
                yield WORKED
            if index + segments < count:
                sent.append(comm.Isend(sends[index + segments], right, tag))
        for request in sent:
            while not request.Test():
                yield WAITING


def _limit(buffer: Array) -> int:
    return min(SEGMENT_BYTES, settings.MAX_MESSAGE_BYTES.read()) // buffer.itemsize
