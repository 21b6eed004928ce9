"""A segmented ring: the schedule of what each rank sends, receives and sums, its runner, and the rings of host memory.

Each rank sends ``(n - 1) / n`` of the buffer to its right neighbour twice: once in the reduce-scatter, once in the all-gather.
Every part is sent in segments, so that a segment is summed and sent on while the next one arrives.
Source: P. Patarasu, X. Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, J. Parallel Distrib.
Comput. 69 (2009).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat.arrays import Array
from mpistrat.device.abstract import Event
from mpistrat.groups.group import Group, keep_alive_for_peers
from mpistrat.reduction import ReduceOp, combine
from mpistrat.settings import MAX_MESSAGE_BYTES
from mpistrat.steps import WAITING, WORKED, Steps, until
from mpistrat.transports.base import Operation, Part, Transport
from mpistrat.transports.mpi import as_message

if TYPE_CHECKING:
    from mpi4py import MPI

# with its header just below 64 KiB, MPI's eager limit over TCP: longer messages wait for the receiver to answer (rendezvous)
SEGMENT_BYTES = 63 << 10
RECEIVES_AHEAD = 8
_ALIGNMENT_BYTES = 64


class Ring:
    """The messages of one rank, in the order in which they are sent and received.

    Parts are cut into `segments` of at most `width` elements; those of short parts may be empty. Each message sends elements
    `sends`, while `targets` are received; these `reduces` says to sum, or else to replace.

    Message i of a step can be sent when message i of the previous step has been received (and summed): message
    ``index + segments`` after message `index`, and the first `segments` messages at once.
    """

    def __init__(self, rank: int, size: int, bounds: Sequence[int], limit: int) -> None:
        self._rank, self._size, self._bounds = rank, size, bounds
        widest = _longest(bounds)
        self.segments = max(1, -(-widest // max(1, limit)))
        self.width = -(-widest // self.segments)
        self.sends: list[slice] = []
        self.targets: list[slice] = []
        self.reduces: list[bool] = []

    @classmethod
    def all_reduce(cls, rank: int, size: int, count: int, limit: int) -> Ring:
        """Return a reduce-scatter of equal parts, followed by an all-gather."""
        ring = cls(rank, size, [index * count // size for index in range(size + 1)], limit)
        # after the first half this rank has the sum of part rank + 1, which it sends first
        ring._add(rank, reduces=True)
        ring._add(rank + 1, reduces=False)
        return ring

    @classmethod
    def reduce_scatter(cls, rank: int, size: int, bounds: Sequence[int], limit: int) -> Ring:
        """Return the first half, shifted so that rank r ends with part r."""
        ring = cls(rank, size, bounds, limit)
        ring._add(rank - 1, reduces=True)
        return ring

    @classmethod
    def all_gather(cls, rank: int, size: int, bounds: Sequence[int], limit: int) -> Ring:
        """Return the second half."""
        ring = cls(rank, size, bounds, limit)
        ring._add(rank, reduces=False)
        return ring

    def sent_before(self) -> list[int | None]:
        """Return, for each target received in place, the index of the send that must have left that memory before."""
        last_send: dict[int, int] = {}
        before: list[int | None] = []
        for index, (send, target, reduces) in enumerate(zip(self.sends, self.targets, self.reduces, strict=True)):
            before.append(None if reduces or target.start == target.stop else last_send.get(target.start))
            if send.start < send.stop:  # an empty segment begins where the next one does
                last_send[send.start] = index
        return before

    def _add(self, first: int, reduces: bool) -> None:
        """Append one step per part that is sent, from part `first` downwards; the part below is received meanwhile."""
        for step in range(self._size - 1):
            for segment in range(self.segments):
                self.sends.append(self._segment((first - step) % self._size, segment))
                self.targets.append(self._segment((first - step - 1) % self._size, segment))
                self.reduces.append(reduces)

    def _segment(self, part: int, segment: int) -> slice:
        start, stop = self._bounds[part], self._bounds[part + 1]
        return slice(min(start + segment * self.width, stop), min(start + (segment + 1) * self.width, stop))


class BoundRing:
    """A ring bound to memory, on one channel: rings on different channels may be in flight at the same time.

    ``fold(index)`` begins to combine what a message has brought with its target; it returns the event of its end, or None if it
    is over. `ahead` receives are posted ahead of that: message i is received where message ``i - ahead`` was. `memory` is what
    MPI reads and writes: it is never freed if the ring is given up.
    """

    def __init__(
        self,
        group: Group,
        channel: int,
        ring: Ring,
        sends: Sequence[list[Any]],
        receives: Sequence[list[Any]],
        fold: Callable[[int], Event | None],
        ahead: int,
        memory: object,
    ) -> None:
        self._comm, self._call, self._channel = group.comm, group.call, channel
        self._left, self._right = (group.rank - 1) % group.size, (group.rank + 1) % group.size
        self._segments, self._sent_before = ring.segments, ring.sent_before()
        self._sends, self._receives, self._fold, self._ahead, self._memory = sends, receives, fold, ahead, memory

    def run(self) -> Steps:
        """Return the steps of one round. A collective call."""
        comm, right, left, tag = self._comm, self._right, self._left, self._call.tag(self._channel)
        sends, receives, sent_before, segments, fold = (
            self._sends,
            self._receives,
            self._sent_before,
            self._segments,
            self._fold,
        )
        count, ahead, passed_on = len(sends), self._ahead, 0
        sent: list[MPI.Request] = []
        arriving: list[MPI.Request] = []
        folding: list[Event | None] = []  # of each message that has arrived
        try:
            sent.extend(comm.Isend(message, right, tag) for message in sends[:segments])
            while passed_on < count:
                worked = False
                while (following := len(arriving)) < min(passed_on + ahead, count):
                    before = sent_before[following]  # its memory may still be sent
                    if before is not None and (before >= len(sent) or not sent[before].Test()):
                        break
                    arriving.append(comm.Irecv(receives[following], left, tag))
                if len(folding) < len(arriving) and arriving[len(folding)].Test():
                    folding.append(fold(len(folding)))
                    worked = True
                if passed_on < len(folding) and ((event := folding[passed_on]) is None or event.done()):
                    if passed_on + segments < count:
                        sent.append(comm.Isend(sends[passed_on + segments], right, tag))
                    folding[passed_on] = None
                    passed_on += 1
                    worked = True
                yield WORKED if worked else WAITING
            for request in sent:
                yield from until(request.Test)
        except BaseException:
            keep_alive_for_peers((self, sent, arriving))  # MPI may still write there
            raise


class RingTransport(Transport):
    """All-reduce, reduce-scatter and all-gather by rings over Isend and Irecv, bandwidth-optimal between nodes."""

    compares_calls = has_channels = True  # by the tags of its messages
    receives_ahead = RECEIVES_AHEAD
    segment_bytes = SEGMENT_BYTES
    """The longest segment."""

    def all_reduce(self, buffer: Array, op: ReduceOp, channel: int = 0) -> Operation:
        """Bind a ring reduce-scatter, followed without a barrier by a ring all-gather."""
        rank, size = self.group.rank, self.group.size
        limit = self._limit(buffer, -(-buffer.size // size))
        return self._bind(buffer, Ring.all_reduce(rank, size, buffer.size, limit), op, channel)

    def reduce_scatter(self, buffer: Array, bounds: Sequence[int], op: ReduceOp) -> Operation:
        """Bind the first half of the ring, shifted so that rank r ends with part r."""
        limit = self._limit(buffer, _longest(bounds))
        return self._bind(buffer, Ring.reduce_scatter(self.group.rank, self.group.size, bounds, limit), op)

    def all_gather(self, buffer: Array, bounds: Sequence[int]) -> Operation:
        """Bind the second half of the ring."""
        limit = self._limit(buffer, _longest(bounds))
        return self._bind(buffer, Ring.all_gather(self.group.rank, self.group.size, bounds, limit), ReduceOp.SUM)

    @cached_property
    def _received(self) -> dict[int, Array]:
        """The receive buffers of each channel, whose operations run one after the other."""
        return {}

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the receive buffers of all channels."""
        return sum(memory.nbytes for memory in self._received.values())

    def _limit(self, buffer: Array, longest_part: int) -> int:
        """Return the elements of the longest segment, if a part has up to `longest_part` of them."""
        itemsize = int(buffer.dtype.itemsize)
        return min(self._segment_bytes(longest_part * itemsize), self.group.settings[MAX_MESSAGE_BYTES]) // itemsize

    def _segment_bytes(self, part_bytes: int) -> int:
        """Return the bytes of the segments that a part of so many bytes is sent in."""
        return self.segment_bytes

    def _bind(self, buffer: Array, ring: Ring, op: ReduceOp, channel: int = 0) -> Operation:
        """Bind a ring to a buffer and to the receive buffers of a channel."""
        ahead, dtype, message = self.receives_ahead, buffer.dtype, self._message
        if channel not in self._received:
            self._received[channel] = self.allocate(ahead * self.segment_bytes)
        memory, slot_bytes = self._received[channel], -(-ring.width * dtype.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        receives: list[list[Any]] = []
        folds: list[tuple[Array, Array] | None] = []
        for index, (part, reduces) in enumerate(zip(ring.targets, ring.reduces, strict=True)):
            target = received = buffer[part]
            if reduces:
                received = memory[index % ahead * slot_bytes :][: target.nbytes].view(dtype)
            receives.append(message(received))
            folds.append((target, received) if reduces and target.size else None)
        sends, fold = [message(buffer[part]) for part in ring.sends], self._folding(dtype, op, folds)
        bound = BoundRing(self.group, channel, ring, sends, receives, fold, ahead, (buffer, memory))
        return Operation(bound.run, [Part(0, buffer.size, (buffer,))])

    @abstractmethod
    def _message(self, part: Array) -> list[Any]:
        """Return a part of a buffer as a message, as MPI takes it."""

    @abstractmethod
    def _folding(
        self, dtype: np.dtype[Any], op: ReduceOp, folds: Sequence[tuple[Array, Array] | None]
    ) -> Callable[[int], Event | None]:
        """Return what begins to combine what a message has brought with its target: see `BoundRing`."""


class MpiRingTransport(RingTransport):
    """Rings on memory of the host."""

    name = "mpi_ring"

    def _message(self, part: Array) -> list[Any]:
        return as_message(part)

    def _folding(
        self, dtype: np.dtype[Any], op: ReduceOp, folds: Sequence[tuple[Array, Array] | None]
    ) -> Callable[[int], Event | None]:
        function = combine(op)

        def fold(index: int) -> None:
            if (pair := folds[index]) is not None:
                function(*pair, out=pair[0])

        return fold


def _longest(bounds: Sequence[int]) -> int:
    return max(stop - start for start, stop in pairwise(bounds))
