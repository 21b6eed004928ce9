"""A segmented ring: the schedule of what each rank sends, receives and sums, its runner, and the rings of host memory.

Each rank sends ``(n - 1) / n`` of the buffer to its right neighbour twice: once in the reduce-scatter, once in the all-gather.
Every part is sent in segments, so that a segment is summed and sent on while the next one arrives.
Source: P. Patarasu, X. Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, J. Parallel Distrib.
Comput. 69 (2009).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from mpistrat.arrays import Array, part_bounds
from mpistrat.device.cuda import Event
from mpistrat.groups.group import Group, keep_alive_for_peers
from mpistrat.lazy import MPI
from mpistrat.reduction import ReduceOp, combine
from mpistrat.settings import MAX_MESSAGE_BYTES
from mpistrat.steps import WAITING, WORKED, Steps
from mpistrat.transports.base import Operation, Part, Transport
from mpistrat.transports.mpi import as_message

# with its header just below 64 KiB, MPI's eager limit over TCP: longer messages wait for the receiver to answer (rendezvous)
SEGMENT_BYTES = 63 << 10
RECEIVES_AHEAD = 8
_ALIGNMENT_BYTES = 64


Halves = Sequence[tuple[int, bool]]
ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = ((0, True), (1, False)), ((-1, True),), ((0, False),)
"""The halves of each schedule: how far before or after its own part a rank begins to send, and whether parts are summed.

After a reduce-scatter that begins with its own part a rank has the sum of the next one, which an all-gather sends first."""
Pairs = Sequence[tuple[Array, Array] | None]
"""For each message its target and what is received, which are combined; None where the message replaces the target."""
Folds = Sequence[Callable[[], object] | None]


class Ring:
    """The messages of one rank, in the order in which they are sent and received.

    Parts are cut into `segments` of at most `width` elements; those of short parts may be empty. Each message sends elements
    `sends`, while `targets` are received; these `reduces` says to sum, or else to replace.

    Message i of a step can be sent when message i of the previous step has been received (and summed): message
    ``index + segments`` after message `index`, and the first `segments` messages at once.
    """

    def __init__(self, rank: int, size: int, bounds: Sequence[int], limit: int, halves: Halves) -> None:
        self._bounds = bounds
        widest = _longest(bounds)
        self.segments = max(1, -(-widest // max(1, limit)))
        self.width = -(-widest // self.segments)
        self.sends: list[slice] = []
        self.targets: list[slice] = []
        self.reduces: list[bool] = []
        for first, reduces in halves:
            # one step per part that is sent, downwards; the part below is received meanwhile
            for part in range(rank + first, rank + first - (size - 1), -1):
                self.sends += self._segments_of(part % size)
                self.targets += self._segments_of((part - 1) % size)
            self.reduces += [reduces] * (size - 1) * self.segments
        self.sent_before = self._sent_before()

    def _sent_before(self) -> list[int | None]:
        """Return, for each target received in place, the index of the send that must have left that memory before."""
        last_send: dict[int, int] = {}
        before: list[int | None] = []
        for index, (send, target, reduces) in enumerate(zip(self.sends, self.targets, self.reduces, strict=True)):
            before.append(None if reduces or target.start == target.stop else last_send.get(target.start))
            if send.start < send.stop:  # an empty segment begins where the next one does
                last_send[send.start] = index
        return before

    def _segments_of(self, part: int) -> list[slice]:
        start, stop = self._bounds[part : part + 2]
        firsts = [min(start + index * self.width, stop) for index in range(self.segments)]
        return [slice(first, min(first + self.width, stop)) for first in firsts]


class BoundRing(NamedTuple):
    """A ring bound to memory, on one channel: rings on different channels may be in flight at the same time.

    For each message `folds` has what combines what it has brought with its target, and on a GPU returns the event of its end.
    `ahead` receives are posted ahead of that: message i is received where message ``i - ahead`` was. `memory` is what MPI reads
    and writes: it is never freed if the ring is given up.
    """

    group: Group
    channel: int
    ring: Ring
    sends: Sequence[list[Any]]
    receives: Sequence[list[Any]]
    folds: Folds
    ahead: int
    memory: object

    def run(self) -> Steps:
        """Return the steps of one round. A collective call."""
        group, channel, ring, sends, receives, folds, ahead, _ = self
        comm, tag, segments, sent_before = group.comm, group.call.tag(channel), ring.segments, ring.sent_before
        left, right = (group.rank - 1) % group.size, (group.rank + 1) % group.size
        count, passed_on = len(sends), 0
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
                    fold = folds[len(folding)]
                    event = None if fold is None else fold()
                    folding.append(event if isinstance(event, Event) else None)
                    worked = True
                if passed_on < len(folding) and ((event := folding[passed_on]) is None or event.done()):
                    if passed_on + segments < count:
                        sent.append(comm.Isend(sends[passed_on + segments], right, tag))
                    folding[passed_on] = None
                    passed_on += 1
                    worked = True
                yield WORKED if worked else WAITING
            for request in sent:
                while not request.Test():
                    yield WAITING
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
        return self._bind(buffer, part_bounds(buffer.size, self.group.size), op, ALL_REDUCE, channel)

    def reduce_scatter(self, buffer: Array, bounds: Sequence[int], op: ReduceOp) -> Operation:
        """Bind the first half of the ring, shifted so that rank r ends with part r."""
        return self._bind(buffer, bounds, op, REDUCE_SCATTER)

    def all_gather(self, buffer: Array, bounds: Sequence[int]) -> Operation:
        """Bind the second half of the ring."""
        return self._bind(buffer, bounds, ReduceOp.SUM, ALL_GATHER)

    @cached_property
    def _received(self) -> dict[int, Array]:
        """The receive buffers of each channel, whose operations run one after the other."""
        return {}

    @property
    def scratch_bytes(self) -> int:
        return sum(memory.nbytes for memory in self._received.values())

    def _segment_bytes(self, part_bytes: int) -> int:
        """Return the bytes of the segments that a part of so many bytes is sent in."""
        return self.segment_bytes

    def _bind(self, buffer: Array, bounds: Sequence[int], op: ReduceOp, halves: Halves, channel: int = 0) -> Operation:
        """Bind a ring to a buffer and to the receive buffers of a channel."""
        ahead, dtype, message = self.receives_ahead, buffer.dtype, self._message
        longest_bytes = self._segment_bytes(_longest(bounds) * dtype.itemsize)
        limit = min(longest_bytes, self.group.settings[MAX_MESSAGE_BYTES]) // dtype.itemsize
        ring = Ring(self.group.rank, self.group.size, bounds, limit, halves)
        if channel not in self._received:
            self._received[channel] = self.allocate(ahead * _aligned(self.segment_bytes))
        memory, slot_bytes = self._received[channel], _aligned(ring.width * dtype.itemsize)
        receives: list[list[Any]] = []
        pairs: list[tuple[Array, Array] | None] = []
        for index, (part, reduces) in enumerate(zip(ring.targets, ring.reduces, strict=True)):
            target = received = buffer[part]
            if reduces:
                received = memory[index % ahead * slot_bytes :][: target.nbytes].view(dtype)
            receives.append(message(received))
            pairs.append((target, received) if reduces and target.size else None)
        sends, folds = [message(buffer[part]) for part in ring.sends], self._folds(dtype, op, pairs)
        bound = BoundRing(self.group, channel, ring, sends, receives, folds, ahead, (buffer, memory))
        return Operation(bound.run, [Part(0, buffer.size, (buffer,))])

    @abstractmethod
    def _message(self, part: Array) -> list[Any]:
        """Return a part of a buffer as a message, as MPI takes it."""

    @abstractmethod
    def _folds(self, dtype: np.dtype[Any], op: ReduceOp, pairs: Pairs) -> Folds:
        """Return what combines what each message has brought with its target: see `BoundRing`."""


class MpiRingTransport(RingTransport):
    """Rings on memory of the host."""

    name = "mpi_ring"

    def _message(self, part: Array) -> list[Any]:
        return as_message(part)

    def _folds(self, dtype: np.dtype[Any], op: ReduceOp, pairs: Pairs) -> Folds:
        return [pair and partial(combine(op), *pair, out=pair[0]) for pair in pairs]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _longest(bounds: Sequence[int]) -> int:
    return max(stop - start for start, stop in pairwise(bounds))
