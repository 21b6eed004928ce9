"""All-reduce and reduce-scatter between arrays of the caller, inside a node: in a window, or where they lie.

=========  ====================================================  ===================================================
way        what each rank does                                   taken for
=========  ====================================================  ===================================================
_Whole     shows its arrays in the window, sums those of all     two ranks, up to ATTACH_FROM_BYTES; one array in one block

Who sums everything meets his peers once per block, who sums a part twice. _Attached copies least, but each rank makes a
system call per block and peer.
=======
_Window    sums one part, which goes through the window          more ranks up to ATTACH_FROM_BYTES; 16-bit floats; one's part
_Attached  sums one part, where the arrays of its peers lie      more bytes, where the kernel permits it
=========  ====================================================  ===================================================

Who sums everything meets his peers once per block, who sums a part twice. _Attachedcopies least, but each rank makes a
system call per block and peer. A reduce-scatter is the first half of the last two ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from operator import eq
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpistrat.arrays import Array
from mpistrat.reduction import Fold
from mpistrat.transports.flat_arrays import FlatArrays, Section
from mpistrat.transports.peer_memory import Spans
from mpistrat.transports.steps import WORKED, Steps, address, leave_to_peers
from mpistrat.transports.window import NodeWindow

__all__ = ["WHOLE_SLOT_BYTES", "OneBlock", "exchange", "exchange_bytes"]

TABLE_ARRAYS, TABLE_BYTES = 4096, 1 << 16  # at the beginning of an arena: where a rank's sources and targets begin
BLOCK_BYTES, ARRIVED_BYTES = 1 << 21, 3 << 19  # of what _Attached reads and writes
SOURCES, TARGETS = 0, 1
EXCHANGE_SLOTS, EXCHANGE_SLOT_BYTES, WHOLE_SLOT_BYTES = 3, 1 << 19, 1 << 21
WINDOW_BYTES = EXCHANGE_SLOTS * EXCHANGE_SLOT_BYTES
LARGEST_ITEM_BYTES = 32
ATTACH_FROM_BYTES = 1 << 20


def exchange_bytes(num_ranks: int) -> int:
    """Return how long the arenas of so many ranks must be; only two of them show each other all."""
    return TABLE_BYTES + WINDOW_BYTES + (EXCHANGE_SLOTS * WHOLE_SLOT_BYTES if num_ranks == 2 else 0)


def exchange(window: NodeWindow, arrays: FlatArrays, fold: Fold, bounds: Sequence[int] | None = None) -> Steps:
    """Return the steps that combine the sources of all ranks into the targets. A collective call.

    Parameters
    ----------
    window : NodeWindow
        Its arenas are at least as long as `exchange_bytes` says.
    arrays : FlatArrays
        The arrays; as many, and as long, on all ranks.
    fold : Fold
        How to combine.
    bounds : sequence of int, optional
        Rank r gets only elements ``bounds[r]:bounds[r + 1]``, in targets that share no memory with the sources: a
        reduce-scatter.
    """
    # where summing takes longer than copying, no element is summed twice
    is_pair = window.group.size == 2 and not fold.widens and bounds is None
    # the kernel looks at each page: that pays where arrays are so large that they lie in huge ones
    attach_from = ATTACH_FROM_BYTES * (len(arrays.sources) if bounds is None else 1)
    # what fits one block may go by the fast path on the other rank, `OneBlock`
    is_one_block = is_pair and len(arrays.sources) == 1 and arrays.nbytes <= WHOLE_SLOT_BYTES
    if not is_one_block and arrays.nbytes >= attach_from and len(arrays.sources) <= TABLE_ARRAYS and not window.peers.refusal:
        return _Attached(window, arrays, fold, bounds).run()
    return _Whole(window, arrays, fold).run() if is_pair else _Window(window, arrays, fold, bounds).run()


class _Parts:
    """The arrays of a rank, and which part of them each rank sums; where bounds are given it keeps what it has summed."""

    def __init__(self, window: NodeWindow, arrays: FlatArrays, fold: Fold, bounds: Sequence[int] | None = None) -> None:
        self.window, self.rank, self.size = window, window.group.rank, window.group.size
        self.others = [peer for peer in range(self.size) if peer != self.rank]
        self.arrays, self.fold, self.itemsize = arrays, fold, arrays.dtype.itemsize
        self.scatters = bounds is not None
        self.bounds = bounds or [index * arrays.count // self.size for index in range(self.size + 1)]

    def views(self, pieces: Sequence[Section], buffers: Sequence[Array]) -> Iterator[tuple[Array, Array, list[Array]]]:
        """Yield, for each piece of a range, what is there of the sources, the targets and buffers that hold just that range."""
        sources, targets = self.arrays.sources, self.arrays.targets
        for piece in pieces:
            here = slice(piece.start, piece.stop)
            there = slice(piece.offset, piece.offset + piece.stop - piece.start)
            yield sources[piece.array][here], targets[piece.array][here], [buffer[there] for buffer in buffers]


class _Whole(_Parts):
    """Block k lies in the arenas of all ranks, in slot ``k % 3`` counted from when the arenas were made.

    A rank fills a slot once all have filled the one before; then they have summed the one that is three before it.
    """

    def run(self) -> Steps:
        window, count = self.window, self.arrays.count
        step = WHOLE_SLOT_BYTES // self.itemsize
        starts = range(0, count, step)
        if len(starts) > 1:  # one block is not a walk: `OneBlock`, by which a peer may go, takes none
            starts = window.walk(starts)
        blocks = [self.arrays.cuts.pieces(start, min(start + step, count)) for start in starts]
        slots: list[list[Array]] = []
        for block in blocks[:1]:
            slots.append(self._put(block))
            met = window.meet()
        for index, block in enumerate(blocks):
            yield from met
            for following in blocks[index + 1 : index + 2]:
                slots.append(self._put(following))
                met = window.meet()
            for _, target, addends in self.views(block, slots[index]):
                self.fold.into(target, addends)
            yield WORKED

    def _put(self, block: Sequence[Section]) -> list[Array]:
        """Copy a block into this rank's arena; return the slots in the arenas of all."""
        slots = _slots(self.window, self.window.next_turn(), WHOLE_SLOT_BYTES, self.arrays.dtype)
        for source, _, (shown,) in self.views(block, [slots[self.rank]]):
            np.copyto(shown, source)
        return slots


class OneBlock:
    """What `_Whole` does with one array of one block, at once: fewer lines of Python, which count where arrays are small.

    Parameters
    ----------
    window : NodeWindow
        Of two ranks.
    dtype : dtype
        Of the array; no 16-bit float.
    count : int
        Its elements; at most WHOLE_SLOT_BYTES of them in bytes.
    fold : Fold
        How to combine.
    drive : callable
        Goes through the steps of a wait.
    """

    def __init__(
        self,
        window: NodeWindow,
        dtype: np.dtype[Any],
        count: int,
        fold: Fold,
        drive: Callable[[Steps], None],
    ) -> None:
        self._window, self._rank, self._fold, self._drive = window, window.group.rank, fold, drive
        self._turns = [_slots(window, turn, count * dtype.itemsize, dtype) for turn in range(EXCHANGE_SLOTS)]

    def run(self, source: Array, target: Array) -> None:
        """Combine `source` of both ranks into `target`; C-contiguous arrays. A collective call."""
        slots = self._turns[self._window.next_turn() % EXCHANGE_SLOTS]
        # what the peer reads is left to its cache
        addends = [*slots]
        addends[self._rank] = flat = source.reshape(-1)
        np.copyto(slots[self._rank], flat)
        self._drive(self._window.meet())
        self._fold.into(target.reshape(-1), addends)


def _slots(window: NodeWindow, turn: int, nbytes: int, dtype: np.dtype[Any]) -> list[Array]:
    """Return where blocks of a turn lie in the arenas of all ranks."""
    first = TABLE_BYTES + WINDOW_BYTES + turn % EXCHANGE_SLOTS * WHOLE_SLOT_BYTES
    return [arena[first : first + nbytes].view(dtype) for arena in window.arenas]


class _Window(_Parts):
    """Through the shared window, in chunks of each part.

    Chunk k of part p lies in slot ``k % 3``, at place p: in the arenas of the other ranks what they add to it, in the arena
    of rank p the result. Three slots, since a result is read one round after a slot's next inputs are written.
    """

    def run(self) -> Steps:
        self.arenas = [arena[TABLE_BYTES : TABLE_BYTES + WINDOW_BYTES].view(self.arrays.dtype) for arena in self.window.arenas]
        self.slot_count = EXCHANGE_SLOT_BYTES // self.itemsize
        # the same places for every dtype: a peer may still read a result while the next exchange begins
        self.step = EXCHANGE_SLOT_BYTES // self.size // LARGEST_ITEM_BYTES * LARGEST_ITEM_BYTES // self.itemsize
        self.num_chunks = -(-max(stop - start for start, stop in pairwise(self.bounds)) // self.step)
        # in one round chunk k goes in, chunk k - 1 is summed and chunk k - 2 goes out, and all ranks meet once
        for turn in range(self.num_chunks + (1 if self.scatters else 2)):
            self._put(turn)
            self._sum(turn - 1)
            met = self.window.meet()
            if not self.scatters:
                self._take(turn - 2)
            yield from met

    def _put(self, chunk: int) -> None:
        """Copy what others sum into this rank's arena."""
        for part in self.others if chunk < self.num_chunks else ():
            start, stop, place = self._span(chunk, part)
            for source, _, (shown,) in self.views(self.arrays.cuts.pieces(start, stop), [self.arenas[self.rank][place:]]):
                np.copyto(shown, source)

    def _sum(self, chunk: int) -> None:
        """Sum this rank's part over all ranks into its targets, and show it to the others if they get it too."""
        if not 0 <= chunk < self.num_chunks:
            return
        start, stop, place = self._span(chunk, self.rank)
        arenas = [self.arenas[peer][place:] for peer in (self.rank, *self.others)]
        for source, target, (shown, *addends) in self.views(self.arrays.cuts.pieces(start, stop), arenas):
            self.fold.into(target, [source, *addends])
            if not self.scatters:
                np.copyto(shown, target)

    def _take(self, chunk: int) -> None:
        """Copy the parts that others have summed to the targets."""
        for part in self.others if chunk >= 0 else ():
            start, stop, place = self._span(chunk, part)
            for _, target, (shown,) in self.views(self.arrays.cuts.pieces(start, stop), [self.arenas[part][place:]]):
                np.copyto(target, shown)

    def _span(self, chunk: int, part: int) -> tuple[int, int, int]:
        """Return where a chunk of a part begins and ends in the arrays, and where it begins in an arena."""
        start = self.bounds[part] + chunk * self.step
        stop = max(start, min(start + self.step, self.bounds[part + 1]))
        return start, stop, chunk % EXCHANGE_SLOTS * self.slot_count + part * self.step


class _Attached(_Parts):
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
