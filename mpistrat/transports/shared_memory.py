"""shared_memory: collectives of one node in a shared window; ranks read their peers' buffers without a copy.

Buffers lie at equal offsets in the arenas of all ranks. In a reduce-scatter each rank sums its part over all arenas; an
all-gather or broadcast moves nothing: its parts are views of the owners' memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpistrat.arrays import Array
from mpistrat.groups.group import Group
from mpistrat.reduction import Fold, ReduceOp, combine
from mpistrat.transports.base import FlatArrays, Operation, Part, Transport
from mpistrat.transports.exchange import exchange
from mpistrat.transports.steps import WORKED, Steps
from mpistrat.transports.window import NodeWindow, window_refusal

BLOCK_BYTES = 1 << 17  # the blocks of all peers and of the sum fit in the cache of one core


class SharedMemoryTransport(Transport):
    """Collectives over a shared window, on memory that `allocate` returned only. Making one is a collective call.

    Raises TransportError on all ranks, if the node has too little shared memory.
    """

    name = "shared_memory"
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
        """Combine the caller's arrays: see `transports.exchange`."""
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
        fold, block = combine(op), max(1, BLOCK_BYTES // buffer.itemsize)
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
