"""shared_memory: host arrays of one node in a shared window; peers are read where they lie.

Buffers lie at equal offsets in the arenas of all ranks. A reduce-scatter lets each rank sum its part over the arenas of all; an
all-gather or broadcast moves nothing: its parts are views of the owners' memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpistrat.arrays import Array
from mpistrat.groups.group import Group
from mpistrat.reduction import Fold, ReduceOp, combine
from mpistrat.transports.base import Operation, Part, Transport
from mpistrat.transports.exchange import exchange
from mpistrat.transports.flat_arrays import FlatArrays
from mpistrat.transports.steps import WORKED, Steps
from mpistrat.transports.window import NodeWindow, window_refusal

__all__ = ["SharedMemoryTransport"]

BLOCK_BYTES = 1 << 17  # a block of each peer and of the sum fit the cache of one core together


class SharedMemoryTransport(Transport):
    """The verbs over a shared window. They work only on memory that `allocate` returned. Making one is a collective call.

    Parameters
    ----------
    group : Group
        The ranks of a node.

    Attributes
    ----------
    window : NodeWindow
        The memory that they share.

    Raises
    ------
    TransportError
        On all ranks, if the node has too little shared memory.
    """

    name = "shared_memory"
    combines_arrays = True
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
        """Bind: wait for all; whoever reads the result folds the arenas of all. One pass for two ranks, L - 1 for L."""
        return self._after_all(None, [Part(0, buffer.size, tuple(self.window.views(buffer)))])

    def all_reduce_between(self, arrays: FlatArrays, fold: Fold) -> Steps:
        """Combine arrays of the caller of all ranks, as `fold` does: see `transports.exchange`."""
        return exchange(self.window, arrays, fold)

    def reduce_scatter(self, buffer: Array, bounds: Sequence[int], op: ReduceOp) -> Operation:
        """Bind: wait for all, then sum this rank's part over all arenas, in blocks that stay in the cache."""
        rank = self.group.rank
        fold = self._fold(buffer, bounds[rank], bounds[rank + 1], op)
        return self._after_all(fold, [Part(bounds[rank], bounds[rank + 1], (buffer[bounds[rank] : bounds[rank + 1]],))])

    def all_gather(self, buffer: Array, bounds: Sequence[int]) -> Operation:
        """Bind: wait for all; the parts are the owners' memory."""
        views = self.window.views(buffer)
        parts = [
            Part(bounds[rank], bounds[rank + 1], (view[bounds[rank] : bounds[rank + 1]],))
            for rank, view in enumerate(views)
            if bounds[rank] < bounds[rank + 1]
        ]
        return self._after_all(None, parts)

    def reduce(self, buffer: Array, op: ReduceOp, root: int = 0) -> Operation:
        """Bind: wait for all; the root sums all arenas."""
        is_root = self.group.rank == root
        fold = self._fold(buffer, 0, buffer.size, op) if is_root else None
        return self._after_all(fold, [Part(0, buffer.size, (buffer,))] if is_root else [])

    def broadcast(self, buffer: Array, root: int = 0) -> Operation:
        """Bind: wait for all; the one part is the root's memory."""
        return self._after_all(None, [Part(0, buffer.size, (self.window.views(buffer)[root],))])

    def release(self) -> int:
        """Publish that this rank has read every result so far."""
        return self.window.release()

    def fence(self, mark: int) -> Steps:
        """Wait until every peer has released as often as this rank had when it got `mark`."""
        return self.window.fence(mark)

    def close(self) -> None:
        """Free the arenas."""
        self.window.close()

    def dispose(self) -> None:
        """Free the window; the transport cannot be used any more. A collective call."""
        self.window.dispose()

    def _fold(self, buffer: Array, start: int, stop: int, op: ReduceOp) -> Callable[[], Steps]:
        """Return steps that fold [start, stop) of all peers into this rank's memory, in rank order."""
        fold, block = combine(op), max(1, BLOCK_BYTES // buffer.itemsize)
        views = self.window.views(buffer)
        mine = views.pop(self.group.rank)
        spans = [(first, min(first + block, stop)) for first in range(start, stop, block)]
        pairs = [(mine[a:b], peer[a:b]) for a, b in spans for peer in views]

        def run() -> Steps:
            for target, source in pairs:
                fold(target, source, out=target)
                yield WORKED

        return run

    def _after_all(self, act: Callable[[], Steps] | None, parts: list[Part]) -> Operation:
        """Return the operation that waits until all ranks have entered it, then acts."""

        def run() -> Steps:
            yield from self.window.meet()
            if act is not None:
                yield from act()

        return Operation(run, parts)
