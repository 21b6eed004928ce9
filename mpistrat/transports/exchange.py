"""All-reduce and reduce-scatter of the caller's arrays inside a node, through shared memory or cross-memory attach (CMA).

==============  =================================================  ==============================================
class           what each rank does                                used for
==============  =================================================  ==============================================
_SumAll         copies its arrays to the window, sums all arrays   two ranks, up to CMA_FROM_BYTES; a single block
_ThroughWindow  sums its part, through the window                  more ranks, up to CMA_FROM_BYTES; 16-bit floats
_CrossMemory    sums its part, reading its peers' arrays by CMA    larger arrays, where the kernel permits it
==============  =================================================  ==============================================

_SumAll has one barrier per block; with the others the sums have to go back. _CrossMemory copies least, but makes a
system call per block and peer. A reduce-scatter is the first half of the last two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from operator import eq
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpistrat.arrays import Array
from mpistrat.device.kernels import Segment
from mpistrat.groups.group import keep_alive_for_peers
from mpistrat.reduction import Fold, quiet
from mpistrat.transports.base import FlatArrays
from mpistrat.transports.cma import IoVectors
from mpistrat.transports.steps import WORKED, Steps, address
from mpistrat.transports.window import NodeWindow

TABLE_ARRAYS, TABLE_BYTES = 4096, 1 << 16  # the table of the addresses of a rank's arrays, at the beginning of its arena
BLOCK_BYTES, RECEIVE_BYTES = 1 << 21, 3 << 19  # of _CrossMemory
SOURCES, TARGETS = 0, 1
EXCHANGE_SLOTS, EXCHANGE_SLOT_BYTES, BLOCK_SLOT_BYTES = 3, 1 << 19, 1 << 21
WINDOW_BYTES = EXCHANGE_SLOTS * EXCHANGE_SLOT_BYTES
LARGEST_ITEM_BYTES = 32
CMA_FROM_BYTES = 1 << 20


def exchange_bytes(num_ranks: int) -> int:
    """Return how long the arenas must be; _SumAll needs its slots only on nodes of two ranks."""
    return TABLE_BYTES + WINDOW_BYTES + (EXCHANGE_SLOTS * BLOCK_SLOT_BYTES if num_ranks == 2 else 0)


def exchange(window: NodeWindow, arrays: FlatArrays, fold: Fold, bounds: Sequence[int] | None = None) -> Steps:
    """Return the steps that combine the sources of all ranks into the targets. A collective call.

    With `bounds` rank r gets only elements ``bounds[r]:bounds[r + 1]``, in targets that share no memory with the sources.
    """
    # where summing takes longer than copying (16-bit floats), no element is summed twice
    is_pair = window.group.size == 2 and not fold.widens and bounds is None
    # the kernel pins each page, which pays only for arrays so large that they lie in huge pages
    cma_from = CMA_FROM_BYTES * (len(arrays.sources) if bounds is None else 1)
    # the other rank may take the fast path for a single block, `OneBlock`
    is_one_block = is_pair and len(arrays.sources) == 1 and arrays.nbytes <= BLOCK_SLOT_BYTES
    if not is_one_block and arrays.nbytes >= cma_from and len(arrays.sources) <= TABLE_ARRAYS and not window.cma.refusal:
        return _CrossMemory(window, arrays, fold, bounds).run()
    return _SumAll(window, arrays, fold).run() if is_pair else _ThroughWindow(window, arrays, fold, bounds).run()


class _Exchange:
    """The arrays of a rank, and the bounds of the part that each rank sums; with `bounds` given, a reduce-scatter."""

    def __init__(self, window: NodeWindow, arrays: FlatArrays, fold: Fold, bounds: Sequence[int] | None = None) -> None:
        self.window, self.rank, self.size = window, window.group.rank, window.group.size
        self.others = [peer for peer in range(self.size) if peer != self.rank]
        self.arrays, self.fold, self.itemsize = arrays, fold, arrays.dtype.itemsize
        self.scatters = bounds is not None
        self.bounds = bounds or [index * arrays.count // self.size for index in range(self.size + 1)]

    def views(self, segments: Sequence[Segment], buffers: Sequence[Array]) -> Iterator[tuple[Array, Array, list[Array]]]:
        """Yield, for each segment of a range, its source, its target, and its part of buffers that hold just that range."""
        sources, targets = self.arrays.sources, self.arrays.targets
        for segment in segments:
            here = slice(segment.start, segment.stop)
            there = slice(segment.offset, segment.offset + segment.stop - segment.start)
            yield sources[segment.array][here], targets[segment.array][here], [buffer[there] for buffer in buffers]


class _SumAll(_Exchange):
    """All ranks copy block k to slot ``k % 3`` of their arenas, and each sums the slots of all.

    Blocks are counted from when the arenas were allocated. A rank fills a slot when all ranks have filled the previous one;
    then all have summed the block that used the slot before, three blocks ago.
    """

    def run(self) -> Steps:
        window, count = self.window, self.arrays.count
        step = BLOCK_SLOT_BYTES // self.itemsize
        starts = range(0, count, step)
        if len(starts) > 1:  # `OneBlock`, which the peer may run for a single block, does not count walks
            starts = window.walk(starts)
        blocks = [self.arrays.segments.find(start, min(start + step, count)) for start in starts]
        slots: list[list[Array]] = []
        for block in blocks[:1]:
            slots.append(self._put(block))
            barrier = window.barrier()
        for index, block in enumerate(blocks):
            yield from barrier
            for following in blocks[index + 1 : index + 2]:
                slots.append(self._put(following))
                barrier = window.barrier()
            for _, target, addends in self.views(block, slots[index]):
                self.fold.into(target, addends)
            yield WORKED

    def _put(self, block: Sequence[Segment]) -> list[Array]:
        """Copy a block into this rank's arena; return the slots in the arenas of all."""
        slots = _slots(self.window, self.window.next_turn(), BLOCK_SLOT_BYTES, self.arrays.dtype)
        for source, _, (slot,) in self.views(block, [slots[self.rank]]):
            np.copyto(slot, source)
        return slots


class OneBlock:
    """`_SumAll` for one array of one block, but of no 16-bit floats, as a blocking call with less Python."""

    def __init__(
        self,
        window: NodeWindow,
        dtype: np.dtype[Any],
        count: int,
        fold: Fold,
        drive: Callable[[Steps], None],
    ) -> None:
        self._window, self._rank, self._fold, self._drive = window, window.group.rank, fold, drive
        self._quiet = quiet()
        self._turns = [_slots(window, turn, count * dtype.itemsize, dtype) for turn in range(EXCHANGE_SLOTS)]

    def run(self, source: Array, target: Array) -> None:
        """Combine `source` of both ranks into `target`; C-contiguous arrays. A collective call."""
        slots = self._turns[self._window.next_turn() % EXCHANGE_SLOTS]
        # read the source, not the own slot, whose cache lines the peer is about to read
        addends = [*slots]
        addends[self._rank] = flat = source.reshape(-1)
        np.copyto(slots[self._rank], flat)
        self._drive(self._window.barrier())
        self._quiet(self._fold.into, target.reshape(-1), addends)


def _slots(window: NodeWindow, turn: int, nbytes: int, dtype: np.dtype[Any]) -> list[Array]:
    """Return the slots of a turn in the arenas of all ranks."""
    first = TABLE_BYTES + WINDOW_BYTES + turn % EXCHANGE_SLOTS * BLOCK_SLOT_BYTES
    return [arena[first : first + nbytes].view(dtype) for arena in window.arenas]


class _ThroughWindow(_Exchange):
    """A pipeline through the shared window, in chunks of each part.

    Chunk k of part p lies at place p of slot ``k % 3``: the inputs in the arenas of the other ranks, the result in the arena of
    rank p. There are three slots because a result is read in the round after the next inputs are written.
    """

    def run(self) -> Steps:
        self.arenas = [arena[TABLE_BYTES : TABLE_BYTES + WINDOW_BYTES].view(self.arrays.dtype) for arena in self.window.arenas]
        self.slot_count = EXCHANGE_SLOT_BYTES // self.itemsize
        # the same places for every dtype: a peer may still read a result while the next exchange begins
        self.step = EXCHANGE_SLOT_BYTES // self.size // LARGEST_ITEM_BYTES * LARGEST_ITEM_BYTES // self.itemsize
        self.num_chunks = -(-max(stop - start for start, stop in pairwise(self.bounds)) // self.step)
        # a round copies chunk k in, sums chunk k - 1, copies chunk k - 2 out, and has one barrier
        for turn in range(self.num_chunks + (1 if self.scatters else 2)):
            self._copy_in(turn)
            self._sum(turn - 1)
            barrier = self.window.barrier()
            if not self.scatters:
                self._copy_out(turn - 2)
            yield from barrier

    def _copy_in(self, chunk: int) -> None:
        """Copy the parts that peers sum into this rank's arena."""
        for part in self.others if chunk < self.num_chunks else ():
            start, stop, place = self._chunk_bounds(chunk, part)
            for source, _, (slot,) in self.views(self.arrays.segments.find(start, stop), [self.arenas[self.rank][place:]]):
                np.copyto(slot, source)

    def _sum(self, chunk: int) -> None:
        """Sum this rank's part over all ranks into its targets, and for an all-reduce also copy it to its arena."""
        if not 0 <= chunk < self.num_chunks:
            return
        start, stop, place = self._chunk_bounds(chunk, self.rank)
        arenas = [self.arenas[peer][place:] for peer in (self.rank, *self.others)]
        for source, target, (slot, *addends) in self.views(self.arrays.segments.find(start, stop), arenas):
            self.fold.into(target, [source, *addends])
            if not self.scatters:
                np.copyto(slot, target)

    def _copy_out(self, chunk: int) -> None:
        """Copy the parts that peers have summed to the targets."""
        for part in self.others if chunk >= 0 else ():
            start, stop, place = self._chunk_bounds(chunk, part)
            for _, target, (slot,) in self.views(self.arrays.segments.find(start, stop), [self.arenas[part][place:]]):
                np.copyto(target, slot)

    def _chunk_bounds(self, chunk: int, part: int) -> tuple[int, int, int]:
        """Return the bounds of a chunk of a part in the arrays, and its first element in an arena."""
        start = self.bounds[part] + chunk * self.step
        stop = max(start, min(start + self.step, self.bounds[part + 1]))
        return start, stop, chunk % EXCHANGE_SLOTS * self.slot_count + part * self.step


class _CrossMemory(_Exchange):
    """Each rank reads its part from all peers, block by block, and writes the sum to all while it is still in the cache.

    No rank reads what another one writes, so sources and targets may be the same arrays.
    """

    def run(self) -> Steps:
        """Return the steps. A collective call."""
        arrays, window = self.arrays, self.window
        sources, targets = ([address(array) for array in several] for several in (arrays.sources, arrays.targets))
        self.tables = [arena[: 16 * len(sources)].view(np.uint64).reshape(2, -1) for arena in window.arenas]
        self.tables[self.rank][:] = sources, targets
        try:
            yield from window.barrier()
            # all ranks have left earlier exchanges, so this rank may receive into its arena
            yield from self._walk(any(map(eq, sources, targets)))
            # the caller may change its arrays when no peer reads or writes them any more
            yield from window.barrier()
        except BaseException:
            keep_alive_for_peers((arrays.sources, arrays.targets))
            raise

    def _walk(self, is_in_place: bool) -> Steps:
        """Read, sum and write, block after block."""
        # out of place, the data of a single peer can be read straight into the targets
        received = self._receive_buffers() if is_in_place or self.size > 2 else []
        # once the arrays fill the caches, Python is slow: prepare everything first
        blocks = self._blocks(received[0].size if received else BLOCK_BYTES // self.itemsize)
        blocks.locate(self.tables, [address(buffer) for buffer in received])
        sums = [
            [(target, [source, *(others or [target])]) for source, target, others in self.views(segments, received)]
            for segments in blocks.segments
        ]
        cma = self.window.cma
        for index in self.window.walk(range(len(sums))):
            for peer, remote, local in blocks.reads[index]:
                cma.read(peer, remote, local)
            for target, addends in sums[index]:
                self.fold.into(target, addends)
            for peer, remote, local in () if self.scatters else blocks.writes[index]:
                cma.write(peer, remote, local)
            yield WORKED

    def _receive_buffers(self) -> list[Array]:
        """Return a buffer in this rank's arena for the blocks of each peer."""
        memory = self.window.arenas[self.rank][TABLE_BYTES : TABLE_BYTES + RECEIVE_BYTES].view(self.arrays.dtype)
        count = memory.size // len(self.others)
        return [memory[index * count : (index + 1) * count] for index in range(len(self.others))]

    def _blocks(self, count: int) -> _Blocks:
        """Return this rank's part in blocks of `count` elements; cached for all calls with arrays of these sizes."""
        cached, (first, last) = self.arrays.segments.derived, self.bounds[self.rank : self.rank + 2]
        if count not in cached:
            segments = [self.arrays.segments.find(start, min(start + count, last)) for start in range(first, last, count)]
            cached[count] = _Blocks(segments, self.itemsize, self.rank, self.others)
        found: _Blocks = cached[count]
        return found


class _Blocks:
    """The reads and writes of each block; `locate` sets the addresses in each call.

    Attributes
    ----------
    reads, writes : list of list of (int, IoVectors, IoVectors)
        For each block and peer: the peer, its memory, and that of this rank.
    """

    def __init__(self, segments: Sequence[Sequence[Segment]], itemsize: int, rank: int, others: Sequence[int]) -> None:
        self.segments, self._rank, self._others = segments, rank, others
        rows = [(one.array, one.start, one.offset, one.stop - one.start) for block in segments for one in block]
        columns = np.array(rows, np.uint64).reshape(-1, 4).T
        self._arrays = columns[0].astype(np.intp)
        self._starts, self._offsets, nbytes = columns[1:] * np.uint64(itemsize)
        self._totals = IoVectors(0, nbytes)
        self._sources, self._targets, self._received = ([IoVectors(0, nbytes) for _ in others] for _ in range(3))
        ends = list(pairwise(accumulate(map(len, segments), initial=0)))
        reads = list(zip(others, self._sources, self._received, strict=True))
        writes = [(peer, there, self._totals) for peer, there in zip(others, self._targets, strict=True)]
        self.reads, self.writes = (
            [[(peer, there.part(*end), here.part(*end)) for peer, there, here in moves] for end in ends]
            for moves in (reads, writes)
        )

    def locate(self, tables: Sequence[NDArray[np.uint64]], received: Sequence[int]) -> None:
        """Set the addresses of the arrays of all ranks, and of the receive buffers; without these, receive in the targets."""
        totals = self._addresses(tables[self._rank][TARGETS])
        self._totals.move(totals)
        for index, peer in enumerate(self._others):
            self._sources[index].move(self._addresses(tables[peer][SOURCES]))
            self._targets[index].move(self._addresses(tables[peer][TARGETS]))
            self._received[index].move(self._offsets + np.uint64(received[index]) if received else totals)

    def _addresses(self, arrays: NDArray[np.uint64]) -> NDArray[np.uint64]:
        addresses: NDArray[np.uint64] = arrays[self._arrays] + self._starts
        return addresses
