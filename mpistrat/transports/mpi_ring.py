"""mpi_ring: a segmented ring over Isend and Irecv, bandwidth-optimal between nodes; `ring` has its schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat.arrays import Array
from mpistrat.groups.group import Group
from mpistrat.reduction import ReduceOp, combine
from mpistrat.settings import MAX_MESSAGE_BYTES
from mpistrat.transports.base import Operation, Transport
from mpistrat.transports.mpi import MpiTransport, mpi_datatype
from mpistrat.transports.ring import BoundRing, Ring

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
        return self._bind(
            buffer, Ring.all_reduce(self.group.rank, self.group.size, buffer.size, self._limit(buffer)), op, channel
        )

    def reduce_scatter(self, buffer: Array, bounds: Sequence[int], op: ReduceOp) -> Operation:
        """Bind the first half of the ring, shifted so that rank r ends with part r."""
        return self._bind(buffer, Ring.reduce_scatter(self.group.rank, self.group.size, bounds, self._limit(buffer)), op)

    def all_gather(self, buffer: Array, bounds: Sequence[int]) -> Operation:
        """Bind the second half of the ring."""
        return self._bind(buffer, Ring.all_gather(self.group.rank, self.group.size, bounds, self._limit(buffer)))

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the receive buffers of all channels."""
        return sum(memory.nbytes for memory in self._scratch.values())

    def _limit(self, buffer: Array) -> int:
        return min(SEGMENT_BYTES, self.group.settings[MAX_MESSAGE_BYTES]) // buffer.itemsize

    def _bind(self, buffer: Array, ring: Ring, op: ReduceOp = ReduceOp.SUM, channel: int = 0) -> Operation:
        function, targets, memory = combine(op), [buffer[part] for part in ring.targets], self._receive_memory(channel)
        scratch = memory.view(buffer.dtype)[: RECEIVES_AHEAD * ring.width].reshape(RECEIVES_AHEAD, ring.width)
        received = [
            scratch[index % RECEIVES_AHEAD, : target.size] if reduces else target
            for index, (target, reduces) in enumerate(zip(targets, ring.reduces, strict=True))
        ]
        sends, receives = [_message(buffer[part]) for part in ring.sends], list(map(_message, received))
        addends = [
            (target, own) if reduces else None for target, own, reduces in zip(targets, received, ring.reduces, strict=True)
        ]

        def fold(index: int) -> None:
            if (pair := addends[index]) is not None:
                function(*pair, out=pair[0])

        bound = BoundRing(self.group, channel, ring, sends, receives, fold, RECEIVES_AHEAD, (buffer, memory))
        return bound.operation(buffer)

    def _receive_memory(self, channel: int = 0) -> Array:
        """Return the receive buffers of a channel, shared by its operations, which run one after the other."""
        if channel not in self._scratch:
            self._scratch[channel] = np.empty(RECEIVES_AHEAD * SEGMENT_BYTES, np.uint8)
        return self._scratch[channel]


def _message(array: Array) -> list[Any]:
    return [array, array.size, mpi_datatype(array.dtype)]
