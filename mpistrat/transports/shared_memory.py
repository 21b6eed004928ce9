"""shared_memory: host arrays of one node in an MPI shared window; peers are read where they lie.

Every rank has one arena in the window, and buffers lie at equal offsets in all arenas. A reduce-scatter lets each rank sum
its part over the arenas of all; an all-gather or broadcast moves nothing: its parts are views of the owners' memory.

File law: a counter in each arena says how many verbs its rank has entered, a second one how many results it has released.
A store becomes visible in order because a window synchronisation stands between data and counter.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat.arrays import Array
from mpistrat.errors import TransportError
from mpistrat.groups.group import Group
from mpistrat.reduction import Fold, ReduceOp, combine
from mpistrat.transports.base import WAITING, WORKED, Operation, Part, Steps, Transport, address
from mpistrat.transports.exchange import exchange
from mpistrat.transports.parts import Lists
from mpistrat.transports.peer_memory import PeerMemory

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["SharedMemoryTransport"]

HEADER_BYTES = 256
ENTERED, RELEASED = 0, 16  # in words of 8 bytes; the counters lie on cache lines of their own
BLOCK_BYTES = 1 << 17  # a block of each peer and of the sum fit the cache of one core together


class SharedMemoryTransport(Transport):
    """The verbs over one shared window. They work only on memory that `allocate` returned."""

    name = "shared_memory"

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._window: MPI.Win | None = None
        self.arenas: list[Array] = []
        self.words: list[memoryview] = []
        self._is_backwards = False
        self._turn = 0
        self._entered = 0
        self._released = 0
        self.peers = PeerMemory(group)

    @classmethod
    def probe(cls, group: Group) -> str:
        """Return why the ranks cannot share a window, or an empty text."""
        from mpi4py import MPI

        node = group.comm.Split_type(MPI.COMM_TYPE_SHARED)
        together = node.Get_size() == group.size
        node.Free()
        # one rank's answer is everybody's, since a node is a property of all its ranks
        if not group.comm.allreduce(together, MPI.LAND):
            return f"the ranks of {group.name} do not share memory"
        return ""

    def allocate(self, nbytes: int) -> Array:
        """Return this rank's arena; every rank asks for the same size, once until `close`."""
        from mpi4py import MPI

        assert self._window is None, "allocate was called twice without close"
        self._check_space(nbytes)
        info = MPI.Info.Create({"alloc_shared_noncontig": "true"})
        self._window = MPI.Win.Allocate_shared(HEADER_BYTES + nbytes, 1, info, self.group.comm)
        info.Free()
        self._window.Lock_all(MPI.MODE_NOCHECK)
        memory: list[Any] = [self._window.Shared_query(rank)[0] for rank in range(self.group.size)]
        segments = [np.frombuffer(buffer, np.uint8) for buffer in memory]
        segments[self.group.rank][:HEADER_BYTES] = 0
        self.arenas = [segment[HEADER_BYTES : HEADER_BYTES + nbytes] for segment in segments]
        self.words = [memoryview(buffer)[:HEADER_BYTES].cast("Q") for buffer in memory]
        self._entered = self._released = 0
        self._window.Sync()
        self.group.comm.Barrier()
        self._window.Sync()
        return self.arenas[self.group.rank]

    def all_reduce(self, buffer: Array, op: ReduceOp, channel: int = 0) -> Operation:
        """Bind: wait for all; whoever reads the result folds the arenas of all. One pass for two ranks, L - 1 for L."""
        return self._after_all(None, [Part(0, buffer.size, tuple(self._views(buffer)))])

    def all_reduce_between(self, lists: Lists, fold: Fold) -> Steps:
        """Combine arrays of the caller of all ranks, as `fold` does: see `transports.exchange`."""
        return exchange(self, lists, fold)

    def reduce_scatter(self, buffer: Array, bounds: Sequence[int], op: ReduceOp) -> Operation:
        """Bind: wait for all, then sum this rank's part over all arenas, in blocks that stay in the cache."""
        rank = self.group.rank
        fold = self._fold(buffer, bounds[rank], bounds[rank + 1], op)
        return self._after_all(fold, [Part(bounds[rank], bounds[rank + 1], (buffer[bounds[rank] : bounds[rank + 1]],))])

    def all_gather(self, buffer: Array, bounds: Sequence[int]) -> Operation:
        """Bind: wait for all; the parts are the owners' memory."""
        views = self._views(buffer)
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
        return self._after_all(None, [Part(0, buffer.size, (self._views(buffer)[root],))])

    def release(self) -> int:
        """Publish that this rank has read every result so far."""
        assert self._window is not None, "release before allocate"
        self._released += 1
        self._window.Sync()
        self.words[self.group.rank][RELEASED] = self._released
        return self._released

    def fence(self, mark: int) -> Steps:
        """Wait until every peer has released as often as this rank had when it got `mark`."""
        return self._wait(RELEASED, mark)

    def close(self) -> None:
        """Free the window."""
        if self._window is not None:
            self.arenas, self.words = [], []
            self._window.Unlock_all()
            self._window.Free()
            self._window = None

    def walk(self, starts: range) -> range:
        """Return `starts`, backwards every other time: what the last exchange touched last is still in the cache."""
        self._is_backwards = not self._is_backwards
        return starts[::-1] if self._is_backwards else starts

    def next_turn(self) -> int:
        """Return how often this was asked before, which ranks do in step."""
        self._turn += 1
        return self._turn

    def _check_space(self, nbytes: int) -> None:
        """Refuse, on all ranks, what the node's shared memory cannot hold: touching it would kill the process."""
        from mpi4py import MPI

        folder = os.statvfs("/dev/shm")
        free = folder.f_bavail * folder.f_frsize
        needed = self.group.size * (HEADER_BYTES + nbytes)
        if self.group.comm.allreduce(free < needed, MPI.LOR):
            raise TransportError(
                f"{self.group.name}: {needed / 2**20:.0f} MiB of shared memory are needed, {free / 2**20:.0f} MiB are free in "
                "/dev/shm; enlarge it (containers: --shm-size), lower MPISTRAT_CHUNK_BYTES, or set MPISTRAT_INTRA_TRANSPORT=mpi"
            )

    def _views(self, buffer: Array) -> list[Array]:
        """Return the memory at the buffer's offset in every arena."""
        arena = self.arenas[self.group.rank]
        offset = address(buffer) - address(arena)
        assert 0 <= offset <= arena.nbytes - buffer.nbytes, "the buffer does not lie in the arena of allocate"
        return [peer[offset : offset + buffer.nbytes].view(buffer.dtype) for peer in self.arenas]

    def _fold(self, buffer: Array, start: int, stop: int, op: ReduceOp) -> Callable[[], Steps]:
        """Return steps that fold [start, stop) of all peers into this rank's memory, in rank order."""
        fold, block = combine(op), max(1, BLOCK_BYTES // buffer.itemsize)
        views = self._views(buffer)
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
            yield from self.meet()
            if act is not None:
                yield from act()

        return Operation(run, parts)

    def meet(self) -> Steps:
        """Tell the peers that this rank has come here, at once, and return the steps that wait until all have."""
        assert self._window is not None, "the arena was closed"
        self._entered += 1
        self._window.Sync()
        self.words[self.group.rank][ENTERED] = self._entered
        return self._wait(ENTERED, self._entered)

    def _wait(self, word: int, least: int) -> Steps:
        """Yield until that counter has reached `least` at every rank."""
        for words in self.words:
            while words[word] < least:
                yield WAITING
        assert self._window is not None, "the arena was closed"
        self._window.Sync()
