"""Attached: an all-reduce inside a node that reads and writes the arrays of peers where they lie."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mpistrat.transports.base import WORKED, Steps, address, leave_to_peers
from mpistrat.transports.parts import Parts, Piece
from mpistrat.transports.peer_memory import Spans, spans

__all__ = ["TABLE_ARRAYS", "TABLE_BYTES", "Attached"]

TABLE_ARRAYS, TABLE_BYTES = 4096, 1 << 16  # at the beginning of an arena: where a rank's sources and targets begin
BLOCK_BYTES, ARRIVED_BYTES = 1 << 21, 3 << 19
SOURCES, TARGETS = 0, 1


class Attached(Parts):
    """Each rank reads its part from all, block by block, and writes the sum to all while it is still in the cache.

    What one rank writes no other one reads, so sources and targets may be the same arrays.
    """

    def run(self) -> Steps:
        """Return the steps. A collective call."""
        lists, transport, (first, last) = self.lists, self.transport, self.bounds[self.rank : self.rank + 2]
        self.tables = [arena[: 16 * len(lists.sources)].view(np.uint64).reshape(2, -1) for arena in transport.arenas]
        self.tables[self.rank][:] = [[address(array) for array in arrays] for arrays in (lists.sources, lists.targets)]
        try:
            yield from transport.meet()
            # all have left earlier exchanges, so that this rank's arena is free for what arrives
            step = self._make_room()
            for start in transport.walk(range(first, last, step)):
                pieces = lists.pieces(start, min(start + step, last))
                places = np.array([(one.array, one.start, one.stop - one.start, one.offset) for one in pieces]).T
                self._sum(pieces, places)
                yield WORKED
                self._spread(places)
                yield WORKED
            # the caller may change its arrays once nobody reads or writes them
            yield from transport.meet()
        except BaseException:
            leave_to_peers((lists.sources, lists.targets))
            raise

    def _make_room(self) -> int:
        """Settle where the arrays of peers arrive, and return how many elements at a time."""
        sources, targets = self.tables[self.rank]
        if self.size == 2 and not (sources == targets).any():
            # what comes from a single peer can go straight to the targets, where the sources are not
            self.arrived = []
            return BLOCK_BYTES // self.itemsize
        room = self.transport.arenas[self.rank][TABLE_BYTES : TABLE_BYTES + ARRIVED_BYTES].view(self.lists.dtype)
        count = room.size // len(self.others)
        self.arrived = [room[index * count : (index + 1) * count] for index in range(len(self.others))]
        return count

    def _sum(self, pieces: Sequence[Piece], places: NDArray[np.intp]) -> None:
        """Sum pieces over all ranks into this rank's targets."""
        into = [spans(address(one) + places[3] * self.itemsize, places[2] * self.itemsize) for one in self.arrived]
        for peer, local in zip(self.others, into or [self._spans(self.rank, TARGETS, places)], strict=True):
            self.transport.peers.read(peer, self._spans(peer, SOURCES, places), local)
        for source, target, arrived in self.views(pieces, self.arrived):
            self.fold.into(target, [source, *(arrived or [target])])

    def _spread(self, places: NDArray[np.intp]) -> None:
        """Write pieces of this rank's targets to the targets of all others."""
        local = self._spans(self.rank, TARGETS, places)
        for peer in self.others:
            self.transport.peers.write(peer, self._spans(peer, TARGETS, places), local)

    def _spans(self, rank: int, which: int, places: NDArray[np.intp]) -> Spans:
        """Return where pieces lie in the sources or the targets of a rank."""
        arrays, starts, counts, _ = places
        return spans(self.tables[rank][which][arrays] + (starts * self.itemsize).astype(np.uint64), counts * self.itemsize)
