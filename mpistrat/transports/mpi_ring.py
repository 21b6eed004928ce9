"""mpi_ring: a segmented ring over Isend and Irecv, the bandwidth-optimal path between nodes.

Each rank passes ``(n - 1) / n`` of the buffer to its right neighbour twice: once while the parts are being summed, once
while the sums go round. Every part travels in segments, so that a segment is summed and sent on while the next arrives.
Source: P. Patarasu, X. Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, J. Parallel Distrib.
Comput. 69 (2009).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat import settings
from mpistrat.arrays import Array
from mpistrat.groups.group import Group
from mpistrat.reduction import ReduceOp, combine
from mpistrat.transports.base import WAITING, WORKED, Operation, Part, Steps, Transport, address
from mpistrat.transports.mpi import MpiTransport, mpi_datatype

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
        n, rank = self.group.size, self.group.rank
        bounds = [index * buffer.size // n for index in range(n + 1)]
        # afterwards this rank has summed part rank + 1, which it passes on first
        ring = _Ring(self.group, buffer, bounds, op, self._landing(channel), channel)
        ring.add_steps([(rank - step) % n for step in range(n - 1)], reduces=True)
        ring.add_steps([(rank + 1 - step) % n for step in range(n - 1)], reduces=False)
        return ring.operation()

    def reduce_scatter(self, buffer: Array, bounds: Sequence[int], op: ReduceOp) -> Operation:
        """Bind the first half of the ring, shifted so that rank r ends with part r."""
        n, rank = self.group.size, self.group.rank
        ring = _Ring(self.group, buffer, bounds, op, self._landing())
        ring.add_steps([(rank - 1 - step) % n for step in range(n - 1)], reduces=True)
        return ring.operation()

    def all_gather(self, buffer: Array, bounds: Sequence[int]) -> Operation:
        """Bind the second half of the ring."""
        n, rank = self.group.size, self.group.rank
        ring = _Ring(self.group, buffer, bounds, ReduceOp.SUM, self._landing())
        ring.add_steps([(rank - step) % n for step in range(n - 1)], reduces=False)
        return ring.operation()

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
    """The messages of one rank, in the order in which they are sent and received.

    Message i of a step is ready to be sent when message i of the step before has arrived (and been summed).
    """

    def __init__(
        self, group: Group, buffer: Array, bounds: Sequence[int], op: ReduceOp, landing: Array, channel: int = 0
    ) -> None:
        self.group, self.buffer, self.fold, self.tag = group, buffer, combine(op), channel
        self.bounds, self.datatype = bounds, mpi_datatype(buffer.dtype)
        widest = max(stop - start for start, stop in pairwise(bounds))
        limit = min(SEGMENT_BYTES, settings.MAX_MESSAGE_BYTES.read()) // buffer.itemsize
        self.segments = max(1, -(-widest // max(1, limit)))
        width = -(-widest // self.segments)
        self.scratch = landing.view(buffer.dtype)[: RECEIVES_AHEAD * width].reshape(RECEIVES_AHEAD, width)
        self.sends: list[Array] = []
        self.targets: list[Array] = []
        self.reduces: list[bool] = []

    def add_steps(self, sent_parts: Sequence[int], reduces: bool) -> None:
        """Append one step per part that is sent; the part before it in the ring arrives meanwhile."""
        for part in sent_parts:
            for segment in range(self.segments):
                self.sends.append(self._segment(part, segment))
                self.targets.append(self._segment((part - 1) % self.group.size, segment))
                self.reduces.append(reduces)

    def _segment(self, part: int, segment: int) -> Array:
        start, stop = self.bounds[part], self.bounds[part + 1]
        width = self.scratch.shape[1]
        return self.buffer[min(start + segment * width, stop) : min(start + (segment + 1) * width, stop)]

    def operation(self) -> Operation:
        count = len(self.sends)
        landings = [
            self.scratch[index % RECEIVES_AHEAD, : target.size] if reduces else target
            for index, (target, reduces) in enumerate(zip(self.targets, self.reduces, strict=True))
        ]
        # what arrives in place may still be on its way out: the send of the same memory that must be through first;
        # an empty segment has no memory, and lies at the address of the next one
        last_send: dict[int, int] = {}
        sent_before: list[int | None] = []
        addresses = [address(array) for array in self.sends]
        for index, target in enumerate(self.targets):
            sent_before.append(None if self.reduces[index] or not target.size else last_send.get(address(target)))
            if self.sends[index].size:
                last_send[addresses[index]] = index
        send_messages, landing_messages = [list(map(self._message, arrays)) for arrays in (self.sends, landings)]
        return Operation(
            lambda: self._run(count, send_messages, landing_messages, landings, sent_before),
            [Part(0, self.buffer.size, (self.buffer,))],
        )

    def _message(self, array: Array) -> list[Any]:
        return [array, array.size, self.datatype]

    def _run(
        self,
        count: int,
        sends: list[list[Any]],
        landing_messages: list[list[Any]],
        landings: list[Array],
        sent_before: list[int | None],
    ) -> Steps:
        comm, fold, segments, tag = self.group.comm, self.fold, self.segments, self.tag
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
                arriving.append(comm.Irecv(landing_messages[len(arriving)], left, tag))
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
