"""shared_memory: collectives of one node in a shared window, and of the caller's own arrays.

Buffers lie at equal offsets in the arenas of all ranks, who read their peers' buffers without a copy. In a reduce-scatter each
rank sums its part over all arenas; an all-gather moves nothing: its parts are views of the owners' memory.

The caller's arrays are combined in two ways: each rank sums its part of them, through slots in the arenas, or where they are
large and the kernel permits it by cross-memory attach (CMA), which copies least, but makes a system call per block and peer. A
reduce-scatter is the first half of either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from operator import eq, itemgetter

import numpy as np
from numpy.typing import NDArray

from mpistrat.arrays import Array
from mpistrat.device.abstract import address
from mpistrat.device.kernels import Segment
from mpistrat.groups.group import Group, keep_alive_for_peers
from mpistrat.reduction import Fold, ReduceOp, combine
from mpistrat.steps import WORKED, Steps
from mpistrat.transports.base import FlatArrays, Operation, Part, Transport
from mpistrat.transports.cma import IoVectors
from mpistrat.transports.window import NodeWindow, window_refusal

FOLD_BYTES = 1 << 17  # the blocks of all peers and of the sum fit in the cache of one core
TABLE_ARRAYS, TABLE_BYTES = 4096, 1 << 16  # the table of the addresses of a rank's arrays, at the beginning of its arena
NUM_SLOTS, SLOT_BYTES = 3, 1 << 19
EXCHANGE_BYTES = TABLE_BYTES + NUM_SLOTS * SLOT_BYTES
"""How long the arenas must be to combine the caller's arrays."""
BLOCK_BYTES, RECEIVE_BYTES = 1 << 21, 3 << 19  # by CMA
CMA_FROM_BYTES = 1 << 19
SOURCES, TARGETS = 0, 1
LARGEST_ITEM_BYTES = 32


class SharedMemoryTransport(Transport):
    """Collectives over a shared window, on memory that `allocate` returned only. Making one is a collective call.

    Raises TransportError on all ranks, if the node has too little shared memory.
    """

    name = "shared_memory"
    compares_calls = True  # every barrier does
    combines_arrays = True
    adds_in_order = True  # each rank folds the slots of all as it copies the result out
    window: NodeWindow

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.window = NodeWindow(group)

    @classmethod
    def probe(cls, group: Group) -> str:
        """Return why the ranks cannot share a window, or an empty text."""
        return window_refusal(group)

    def allocate(self, nbytes: int) -> Array:
        """Return this rank's arena; every rank asks for the same size, once until `close`."""
        return self.window.allocate(nbytes)

    def all_reduce(self, buffer: Array, op: ReduceOp, channel: int = 0) -> Operation:
        """Bind: a barrier; each rank folds all arenas when it reads the result. One pass for two ranks, L - 1 for L."""
        return self._after_barrier(None, [Part(0, buffer.size, tuple(self.window.views(buffer)))])

    def all_reduce_arrays(self, arrays: FlatArrays, fold: Fold) -> Steps:
        """Combine the caller's arrays: see `exchange`."""
        return exchange(self.window, arrays, fold)

    def reduce_scatter(self, buffer: Array, bounds: Sequence[int], op: ReduceOp) -> Operation:
        """Bind: a barrier, then sum this rank's part over all arenas, in blocks that stay in the cache."""
        rank = self.group.rank
        fold = self._fold(buffer, bounds[rank], bounds[rank + 1], op)
        return self._after_barrier(fold, [Part(bounds[rank], bounds[rank + 1], (buffer[bounds[rank] : bounds[rank + 1]],))])

    def all_gather(self, buffer: Array, bounds: Sequence[int]) -> Operation:
        """Bind: a barrier; the parts are the owners' memory."""
        views = self.window.views(buffer)
        parts = [
            Part(bounds[rank], bounds[rank + 1], (view[bounds[rank] : bounds[rank + 1]],))
            for rank, view in enumerate(views)
            if bounds[rank] < bounds[rank + 1]
        ]
        return self._after_barrier(None, parts)

    def release(self) -> int:
        """Publish that this rank has read every result so far."""
        return self.window.release()

    def fence(self, number: int) -> Steps:
        """Wait until every peer has called `release` `number` times."""
        return self.window.fence(number)

    def close(self) -> None:
        """Free the arenas."""
        self.window.close()

    def dispose(self) -> None:
        """Free the window; the transport cannot be used any more. A collective call."""
        self.window.dispose()

    def _fold(self, buffer: Array, start: int, stop: int, op: ReduceOp) -> Callable[[], Steps]:
        """Return an operation that folds [start, stop) of all peers into this rank's memory, in rank order."""
        fold, block = combine(op), max(1, FOLD_BYTES // buffer.itemsize)
        views = self.window.views(buffer)
        mine = views.pop(self.group.rank)
        blocks = [(first, min(first + block, stop)) for first in range(start, stop, block)]
        pairs = [(mine[a:b], peer[a:b]) for a, b in blocks for peer in views]

        def run() -> Steps:
            for target, source in pairs:
                fold(target, source, out=target)
                yield WORKED

        return run

    def _after_barrier(self, act: Callable[[], Steps] | None, parts: list[Part]) -> Operation:
        """Return the operation of a barrier, followed by `act`."""

        def run() -> Steps:
            yield from self.window.barrier()
            if act is not None:
                yield from act()

        return Operation(run, parts)


def exchange(window: NodeWindow, arrays: FlatArrays, fold: Fold, bounds: Sequence[int] | None = None) -> Steps:
    """Return the steps that combine the sources of all ranks into the targets. A collective call.

    With `bounds` rank r gets only elements ``bounds[r]:bounds[r + 1]``, in targets that share no memory with the sources.
    """
    # the kernel pins each page, which pays only for arrays so large that they lie in huge pages
    cma_from = CMA_FROM_BYTES * (len(arrays.sources) if bounds is None else 1)
    is_large = arrays.nbytes >= cma_from and len(arrays.sources) <= TABLE_ARRAYS
    way = _CrossMemory if is_large and not window.cma.refusal else _ThroughSlots
    return way(window, arrays, fold, bounds).run()


class _Exchange:
    """The arrays of a rank, and the bounds of the part that each rank sums; with `bounds` given, a reduce-scatter."""

    def __init__(self, window: NodeWindow, arrays: FlatArrays, fold: Fold, bounds: Sequence[int] | None = None) -> None:
        self.window, self.rank, self.size = window, window.group.rank, window.group.size
        self.others = [peer for peer in range(self.size) if peer != self.rank]
        self.arrays, self.fold, self.itemsize = arrays, fold, arrays.dtype.itemsize
        self.scatters = bounds is not None
        self.bounds = bounds or [index * arrays.count // self.size for index in range(self.size + 1)]

    def views(self, segments: Sequence[Segment], buffers: Sequence[Array]) -> list[tuple[Array, Array, list[Array]]]:
        """Return, for each segment of a range, its source, its target, and its part of buffers that hold just that range."""
        sources, targets = self.arrays.sources, self.arrays.targets
        found = []
        for segment in segments:
            array, here, count = segment.array, slice(segment.start, segment.stop), segment.stop - segment.start
            in_buffer = itemgetter(slice(segment.offset, segment.offset + count))
            found.append((sources[array][here], targets[array][here], list(map(in_buffer, buffers))))
        return found


class _ThroughSlots(_Exchange):
    """A pipeline in chunks of each part.

    Chunk k of part p lies at place p of slot ``k % 3``: the inputs in the arenas of the other ranks, the result in the arena of
    rank p. There are three slots because a result is read in the round after the next inputs are written.
    """

    def run(self) -> Steps:
        self.arenas = [arena[TABLE_BYTES:EXCHANGE_BYTES].view(self.arrays.dtype) for arena in self.window.arenas]
        self.slot_count = SLOT_BYTES // self.itemsize
        # the same places for every dtype: a peer may still read a result while the next exchange begins
        self.step = SLOT_BYTES // self.size // LARGEST_ITEM_BYTES * LARGEST_ITEM_BYTES // self.itemsize
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
        return start, stop, chunk % NUM_SLOTS * self.slot_count + part * self.step


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
