"""shared_memory: collectives of one node in a shared window, and of the caller's own arrays.

Buffers lie at equal offsets in the arenas of all ranks, who read their peers' buffers without a copy. In a reduce-scatter each
rank sums its part over all arenas; an all-gather moves nothing: its parts are views of the owners' memory.

The caller's arrays are combined where they lie, one or many, if the kernel permits cross-memory attach (CMA): that copies
least, but makes a system call per block and peer. A reduce-scatter is the first half of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from operator import eq

import numpy as np
from numpy.typing import NDArray

from mpistrat.arrays import Array
from mpistrat.device.cuda import address
from mpistrat.device.kernels import Segment
from mpistrat.groups.group import Group, keep_alive_for_peers
from mpistrat.reduction import Fold, ReduceOp, combine
from mpistrat.steps import WORKED, Steps
from mpistrat.transports.base import FlatArrays, Operation, Part, Transport
from mpistrat.transports.cma import READ, WRITE, IoVectors, addresses
from mpistrat.transports.window import RELEASED, NodeWindow

FOLD_BYTES = 1 << 17  # the blocks of all peers and of the sum fit in the cache of one core
RECEIVE_BYTES = 3 << 19
"""What a rank receives at a time, from all peers together; behind it in the arena is the table of its arrays' addresses."""
_ADDRESSES_BYTES, _TABLE_STEP_BYTES = 16, 1 << 16  # of the source and the target of an array
SOURCES, TARGETS = 0, 1


class ArenaTransport(Transport):
    """The verbs of transports whose ranks read the memory of their peers: `allocate` returns an arena of equal size to each."""

    adds_in_order = True
    _sync_window: NodeWindow
    _barrier: Callable[[], Steps]
    """Waits until peers have written what this rank may read then."""
    _arenas: Sequence[Array] = ()
    _released = 0

    def all_gather(self, buffer: Array, bounds: Sequence[int]) -> Operation:
        """Bind: a barrier; the parts are the owners' memory."""
        owned = zip(self._views(buffer), pairwise(bounds), strict=True)
        return Operation(self._barrier, [Part(*part, (view[slice(*part)],)) for view, part in owned if part[0] < part[1]])

    def release(self) -> int:
        """Announce that this rank has read every result so far; one on a GPU has waited for that."""
        window, self._released = self._sync_window, self._released + 1
        window.fence_memory()
        window.own[RELEASED] = self._released
        return self._released

    def fence(self, number: int) -> Steps:
        return self._sync_window.wait(RELEASED, number, self._sync_window.words)

    def dispose(self) -> None:
        """Free the memory of the barriers too; the transport cannot be used any more. A collective call."""
        self.close()
        self._sync_window.dispose()

    def _offset(self, buffer: Array) -> int:
        """Return where a buffer lies in this rank's arena, in bytes."""
        arena = self._arenas[self.group.rank]
        offset = address(buffer) - address(arena)
        assert 0 <= offset <= arena.nbytes - buffer.nbytes, "the buffer does not lie in the arena of allocate"
        return offset

    def _views(self, buffer: Array) -> list[Array]:
        """Return the memory of every arena at the offset of a buffer in this rank's arena."""
        offset = self._offset(buffer)
        return [peer[offset : offset + buffer.nbytes].view(buffer.dtype) for peer in self._arenas]


class SharedMemoryTransport(ArenaTransport):
    """Collectives over a shared window, on memory that `allocate` returned only. Making one is a collective call.

    Raises TransportError on all ranks, if the node has too little shared memory.
    """

    name = "shared_memory"
    compares_calls = True  # every barrier does
    window: NodeWindow

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.window = self._sync_window = NodeWindow(group)
        self._barrier = self.window.barrier
        self.combines_arrays = not self.window.cma.refusal

    def allocate(self, nbytes: int) -> Array:
        """Return this rank's arena; every rank asks for the same size, once until `close`."""
        memory, self._arenas = self.window.allocate(nbytes), self.window.arenas
        return memory

    def all_reduce(self, buffer: Array, op: ReduceOp, channel: int = 0) -> Operation:
        """Bind: a barrier; each rank folds all arenas when it reads the result. One pass for two ranks, L - 1 for L."""
        return Operation(self._barrier, [Part(0, buffer.size, tuple(self._views(buffer)))])

    def all_reduce_arrays(self, arrays: FlatArrays, fold: Fold) -> Steps:
        return Exchange(self.window, arrays, fold).run()

    def reduce_scatter(self, buffer: Array, bounds: Sequence[int], op: ReduceOp) -> Operation:
        """Bind: a barrier, then sum this rank's part over all arenas, in blocks that stay in the cache."""
        start, stop = bounds[self.group.rank : self.group.rank + 2]
        fold, block, views = combine(op), max(1, FOLD_BYTES // buffer.itemsize), self._views(buffer)
        mine = views.pop(self.group.rank)
        blocks = [slice(first, min(first + block, stop)) for first in range(start, stop, block)]
        pairs = [(mine[each], peer[each]) for each in blocks for peer in views]

        def run() -> Steps:
            yield from self._barrier()
            for target, source in pairs:
                fold(target, source, out=target)
                yield WORKED

        return Operation(run, [Part(start, stop, (buffer[start:stop],))])

    def close(self) -> None:
        self._arenas = ()
        self.window.close()


def exchange_bytes(num_arrays: int) -> int:
    """Return how long the arenas must be to combine so many arrays of the caller."""
    return RECEIVE_BYTES + -(-num_arrays * _ADDRESSES_BYTES // _TABLE_STEP_BYTES) * _TABLE_STEP_BYTES


class Exchange:
    """Combines the sources of all ranks of a node into the targets, by CMA.

    Each rank reads its blocks of the arrays from all peers, one after the other, and writes the sum to all while it is still in
    the cache. No rank reads what another one writes, so sources and targets may be the same arrays.

    With `bounds`, a reduce-scatter: rank r gets only elements ``bounds[r]:bounds[r + 1]``, in targets that share no memory with
    the sources.
    """

    def __init__(self, window: NodeWindow, arrays: FlatArrays, fold: Fold, bounds: Sequence[int] | None = None) -> None:
        self.window, self.rank, self.size = window, window.group.rank, window.group.size
        self.others = [peer for peer in range(self.size) if peer != self.rank]
        self.arrays, self.fold, self.bounds = arrays, fold, bounds
        self.longest = RECEIVE_BYTES // len(self.others) // arrays.dtype.itemsize

    def run(self) -> Steps:
        """Return the steps. A collective call."""
        arrays, window = self.arrays, self.window
        sources, targets = addresses(arrays.sources), addresses(arrays.targets)
        end = RECEIVE_BYTES + _ADDRESSES_BYTES * len(sources)
        self.tables = [arena[RECEIVE_BYTES:end].view(np.uint64).reshape(2, -1) for arena in window.arenas]
        self.tables[self.rank][:] = sources, targets
        try:
            yield from window.barrier()
            # all ranks have left earlier exchanges, so this rank may receive into its arena
            yield from self._walk(any(map(eq, sources, targets)))
            # the caller may change its arrays when no peer reads or writes them any more
            yield from window.barrier()
        except BaseException:
            window.leave()
            keep_alive_for_peers((arrays.sources, arrays.targets))
            raise

    def _walk(self, is_in_place: bool) -> Steps:
        """Read, sum and write, block after block."""
        # out of place, the data of a single peer can be read straight into the targets
        received = self._receive_buffers() if is_in_place or self.size > 2 else []
        # once the arrays fill the caches, Python is slow: prepare everything first
        blocks = self._blocks()
        blocks.locate(self.tables, addresses(received))
        sums = [self._sums(segments, received) for segments in blocks.segments]
        cma = self.window.cma
        for index in self.window.walk(range(len(sums))):
            for peer, remote, local in blocks.reads[index]:
                cma.copy(READ, peer, remote, local)
            for target, addends in sums[index]:
                self.fold.into(target, addends)
            for peer, remote, local in blocks.writes[index] if self.bounds is None else ():
                cma.copy(WRITE, peer, remote, local)
            yield WORKED

    def _sums(self, segments: Sequence[Segment], received: Sequence[Array]) -> list[tuple[Array, list[Array]]]:
        """Return the target and the addends of each segment of a block; without buffers, peers' data is in the target."""
        found = []
        for segment in segments:
            array, count = segment.array, segment.stop - segment.start
            here, there = slice(segment.start, segment.stop), slice(segment.offset, segment.offset + count)
            source, target = self.arrays.sources[array][here], self.arrays.targets[array][here]
            found.append((target, [source, *([buffer[there] for buffer in received] or [target])]))
        return found

    def _receive_buffers(self) -> list[Array]:
        """Return a buffer in this rank's arena for the blocks of each peer."""
        memory, count = self.window.arenas[self.rank][:RECEIVE_BYTES].view(self.arrays.dtype), self.longest
        return [memory[index * count : (index + 1) * count] for index in range(len(self.others))]

    def _blocks(self) -> _Blocks:
        """Return this rank's blocks; cached for all calls with arrays of these sizes."""
        cache = self.arrays.segments
        if cache.blocks is None:
            segments = [cache.find(start, stop) for start, stop in self._ranges()]
            cache.blocks = _Blocks(segments, self.arrays.dtype.itemsize, self.rank, self.others)
        blocks: _Blocks = cache.blocks
        return blocks

    def _ranges(self) -> list[tuple[int, int]]:
        """Return the elements of each block that this rank combines."""
        if self.bounds is not None:
            first, last = self.bounds[self.rank : self.rank + 2]
            return [(start, min(start + self.longest, last)) for start in range(first, last, self.longest)]
        # in turns, so that each rank gets as much of what the kernel copies slowly: memory outside huge pages
        count, size = self.arrays.count, self.size
        rounds = -(-count // (self.longest * size)) or 1
        step = -(-count // (rounds * size)) or 1
        return [(start, min(start + step, count)) for start in range(self.rank * step, count, size * step)]


class _Blocks:
    """The `reads` and `writes` of each block: peer, its memory, and that of this rank. `locate` sets addresses in each call."""

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
