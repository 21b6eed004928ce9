"""pairwise: an all-reduce in which every rank sends to each of its peers, and receives from each, in nonblocking messages.

It adds in the order of the ranks, and may send in a narrower dtype: each rank receives its part of the buffer from all others,
folds the addends in order, and sends the result to all others. These are as many bytes as a ring sends, in 2 steps instead of
``2 (n - 1)``, with ``2 (n - 1)`` messages per rank and segment. The order of the addends of an element does not depend on which
rank folds it, so the bits of the result depend on values and order alone.

Parts are sent in segments: while one arrives, earlier ones are folded and sent on. All receives are posted at the beginning.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from mpistrat.arrays import Array, part_bounds
from mpistrat.groups.group import Group, keep_alive_for_peers
from mpistrat.lazy import MPI
from mpistrat.reduction import ReduceOp, accumulation_dtype, combine
from mpistrat.settings import MAX_MESSAGE_BYTES
from mpistrat.steps import WORKED, Steps, until
from mpistrat.transports.base import Operation, Part
from mpistrat.transports.mpi import byte_message, peers_in_turn
from mpistrat.transports.ring import SEGMENT_BYTES
from mpistrat.transports.wire import Cast


def ordered_all_reduce(
    group: Group, buffer: Array, op: ReduceOp, channel: int = 0, wire: np.dtype[Any] | None = None
) -> Operation:
    """Bind: fold the buffers of all ranks in place, in the order of the ranks; every rank gets the same bits.

    16-bit floats are folded in float32, and rounded once. What is sent is cast to the `wire` dtype, and back.
    """
    bound = _Ordered(group, buffer, op, channel, wire)
    return Operation(bound.run, [Part(0, buffer.size, (buffer,))], bound.scratch_bytes)


class _Ordered:
    """The messages of one rank, and its receive buffers.

    Messages between two ranks are ordered on one channel: first the addends, segment by segment, then the results.
    """

    def __init__(self, group: Group, buffer: Array, op: ReduceOp, channel: int, wire: np.dtype[Any] | None) -> None:
        self.group, self.buffer, self.channel, self.fold = group, buffer, channel, combine(op)
        self.cast = cast = None if wire is None else Cast(wire, buffer.size)
        dtype = wire or buffer.dtype
        step = max(1, min(SEGMENT_BYTES, group.settings[MAX_MESSAGE_BYTES]) // dtype.itemsize)
        self.segments = _segments(buffer.size, group.size, step)
        self.peers = peers_in_turn(group)
        self.sent = buffer if cast is None else np.empty(buffer.size, dtype)
        self.published = np.empty(buffer.size, dtype)
        self.total, self.wide = np.empty((2, min(step, buffer.size)), accumulation_dtype(ReduceOp.SUM, buffer.dtype))
        own = self.segments[group.rank]
        part = slice(own[0][0], own[-1][1]) if own else slice(0)
        received = {peer: np.empty(self.published[part].size, dtype) for peer in self.peers}
        # the addends of this rank's part, in the order of the ranks
        self.rows = [received.get(rank, self.sent[part]) for rank in range(group.size)]
        owned = [*received.values(), self.published, self.total, self.wide, *([] if cast is None else [self.sent])]
        self.scratch_bytes = sum(array.nbytes for array in owned) + (0 if cast is None else cast.scratch_bytes)

    def run(self) -> Steps:
        """Return the steps of one all-reduce."""
        self.tag = self.group.call.tag(self.channel)
        requests: list[MPI.Request] = []
        try:
            yield from self._run(requests)
        except BaseException:
            keep_alive_for_peers((self, requests))
            raise

    def _run(self, requests: list[MPI.Request]) -> Steps:
        own, rank = self.segments[self.group.rank], self.group.rank
        first = own[0][0] if own else 0
        receives = [
            self._receive(row[start - first : stop - first], source)
            for start, stop in own
            for source, row in enumerate(self.rows)
            if source != rank
        ]
        results = [
            (self._receive(self.published[start:stop], peer), start, stop)
            for peer in reversed(self.peers)
            for start, stop in self.segments[peer]
        ]
        requests += [*receives, *(request for request, _, _ in results)]
        yield from self._scatter(requests)
        contributed = len(requests)
        pending = iter(receives)
        for start, stop in own:
            total = self.total[: stop - start]
            for source, row in enumerate(self.rows):
                if source != rank:
                    yield from until(next(pending).Test)
                self._add(total, row[start - first : stop - first], is_first=source == 0)
                yield WORKED
            self._publish(total, start, stop)
            requests += [self._send(self.published[start:stop], peer) for peer in self.peers]
            yield WORKED
        # results replace addends, which must have been sent
        for request in requests[len(receives) + len(results) : contributed]:
            yield from until(request.Test)
        for request, start, stop in results:
            yield from until(request.Test)
            self._take(self.published[start:stop], self.buffer[start:stop])
            yield WORKED
        for request in requests[contributed:]:
            yield from until(request.Test)

    def _scatter(self, requests: list[MPI.Request]) -> Steps:
        """Send each peer its part of the addends, one segment per peer in turn."""
        for turn in range(max(map(len, self.segments))):
            for peer in [*self.peers, self.group.rank]:
                for start, stop in self.segments[peer][turn : turn + 1]:
                    if self.cast is not None:
                        self.cast.compress(self.buffer[start:stop], self.sent[start:stop])
                    if peer != self.group.rank:
                        requests.append(self._send(self.sent[start:stop], peer))
                    yield WORKED

    def _add(self, total: Array, row: Array, is_first: bool) -> None:
        if is_first:
            self._take(row, total)
            return
        addend = row
        if self.cast is not None:
            addend = self.wide[: row.size]
            self.cast.decompress(row, addend)
        self.fold(total, addend, out=total)

    def _publish(self, total: Array, start: int, stop: int) -> None:
        published = self.published[start:stop]
        if self.cast is None:
            np.copyto(published, total)
        else:
            self.cast.compress(total, published)
        self._take(published, self.buffer[start:stop])

    def _take(self, sent: Array, values: Array) -> None:
        if self.cast is None:
            np.copyto(values, sent)
        else:
            self.cast.decompress(sent, values)

    def _send(self, array: Array, peer: int) -> MPI.Request:
        return self.group.comm.Isend(byte_message(array), peer, self.tag)

    def _receive(self, array: Array, peer: int) -> MPI.Request:
        return self.group.comm.Irecv(byte_message(array), peer, self.tag)


def _segments(count: int, parts: int, step: int) -> list[list[tuple[int, int]]]:
    """Return the bounds of the segments of each of the equal parts of `count` elements."""
    bounds = pairwise(part_bounds(count, parts))
    return [[(first, min(first + step, stop)) for first in range(start, stop, step)] for start, stop in bounds]
