"""Attached: an all-reduce inside a node that reads and writes the arrays of peers where they lie, or a reduce-scatter."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import eq

import numpy as np
from numpy.typing import NDArray

from mpistrat.arrays import Array
from mpistrat.transports.flat_arrays import Section
from mpistrat.transports.parts import Parts
from mpistrat.transports.peer_memory import Spans
from mpistrat.transports.steps import WORKED, Steps, address, leave_to_peers

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
        arrays, window = self.arrays, self.window
        sources, targets = ([address(array) for array in several] for several in (arrays.sources, arrays.targets))
        self.tables = [arena[: 16 * len(sources)].view(np.uint64).reshape(2, -1) for arena in window.arenas]
        self.tables[self.rank][:] = sources, targets
        try:
            yield from window.meet()
            # all have left earlier exchanges, so that this rank's arena is free for what arrives
            yield from self._walk(any(map(eq, sources, targets)))
            # the caller may change its arrays once nobody reads or writes them
            yield from window.meet()
        except BaseException:
            leave_to_peers((arrays.sources, arrays.targets))
            raise

    def _walk(self, is_in_place: bool) -> Steps:
        """Read, sum and write, block after block."""
        # what comes from a single peer can go straight to the targets, where the sources are not
        arrived = self._room() if is_in_place or self.size > 2 else []
        # while this lasts the caches hold arrays, and each line of Python takes long: what can be done before is
        blocks = self._blocks(arrived[0].size if arrived else BLOCK_BYTES // self.itemsize)
        blocks.locate(self.tables, [address(one) for one in arrived])
        sums = [
            [(target, [source, *(others or [target])]) for source, target, others in self.views(pieces, arrived)]
            for pieces in blocks.pieces
        ]
        peers = self.window.peers
        for index in self.window.walk(range(len(sums))):
            for peer, remote, local in blocks.reads[index]:
                peers.read(peer, remote, local)
            for target, addends in sums[index]:
                self.fold.into(target, addends)
            for peer, remote, local in () if self.scatters else blocks.writes[index]:
                peers.write(peer, remote, local)
            yield WORKED

    def _room(self) -> list[Array]:
        """Return where blocks of the peers arrive."""
        room = self.window.arenas[self.rank][TABLE_BYTES : TABLE_BYTES + ARRIVED_BYTES].view(self.arrays.dtype)
        count = room.size // len(self.others)
        return [room[index * count : (index + 1) * count] for index in range(len(self.others))]

    def _blocks(self, count: int) -> _Blocks:
        """Return this rank's part in blocks of so many elements, made once for all calls with arrays like these."""
        kept, (first, last) = self.arrays.cuts.kept, self.bounds[self.rank : self.rank + 2]
        if count not in kept:
            pieces = [self.arrays.cuts.pieces(start, min(start + count, last)) for start in range(first, last, count)]
            kept[count] = _Blocks(pieces, self.itemsize, self.rank, self.others)
        found: _Blocks = kept[count]
        return found


class _Blocks:
    """What is read and written with each block. Where the arrays lie is told anew in each call.

    Parameters
    ----------
    pieces : sequence of sequence of Section
        Of each block.
    itemsize : int
        Bytes of an element.
    rank : int
        This rank.
    others : sequence of int
        Its peers.

    Attributes
    ----------
    reads, writes : list of list of (int, Spans, Spans)
        For each block and peer: the peer, what lies there, and where here.
    """

    def __init__(self, pieces: Sequence[Sequence[Section]], itemsize: int, rank: int, others: Sequence[int]) -> None:
        self.pieces, self._rank, self._others = pieces, rank, others
        rows = [(one.array, one.start, one.offset, one.stop - one.start) for block in pieces for one in block]
        columns = np.array(rows, np.uint64).reshape(-1, 4).T
        self._arrays = columns[0].astype(np.intp)
        self._starts, self._offsets, nbytes = columns[1:] * np.uint64(itemsize)
        self._totals = Spans(0, nbytes)
        self._sources, self._targets, self._arrived = ([Spans(0, nbytes) for _ in others] for _ in range(3))
        ends = list(pairwise(accumulate(map(len, pieces), initial=0)))
        reads = list(zip(others, self._sources, self._arrived, strict=True))
        writes = [(peer, there, self._totals) for peer, there in zip(others, self._targets, strict=True)]
        self.reads, self.writes = (
            [[(peer, there.part(*end), here.part(*end)) for peer, there, here in moves] for end in ends]
            for moves in (reads, writes)
        )

    def locate(self, tables: Sequence[NDArray[np.uint64]], arrived: Sequence[int]) -> None:
        """Note where the arrays of all ranks begin, and where blocks of the peers arrive; without room: in the targets."""
        totals = self._places(tables[self._rank][TARGETS])
        self._totals.move(totals)
        for index, peer in enumerate(self._others):
            self._sources[index].move(self._places(tables[peer][SOURCES]))
            self._targets[index].move(self._places(tables[peer][TARGETS]))
            self._arrived[index].move(self._offsets + np.uint64(arrived[index]) if arrived else totals)

    def _places(self, begins: NDArray[np.uint64]) -> NDArray[np.uint64]:
        places: NDArray[np.uint64] = begins[self._arrays] + self._starts
        return places
