"""Run a plan: bind scopes to transports, walk the phases, overlap chunks, own the scratch memory.

A chunk lives in a slot of the scratch memory from its copy-in to its copy-out. There is one slot more than chunks under
way, so that a rank can fill a slot while its peers still read the one before.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpistrat import settings
from mpistrat.algorithms.plan import Phase, Plan, Scope, Verb
from mpistrat.arrays import Array
from mpistrat.errors import TransportError
from mpistrat.execution.lanes import overlap
from mpistrat.groups.group import Group
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.packing.fuse import CopyIn, CopyOut
from mpistrat.packing.layout import Layout
from mpistrat.reduction import ReduceOp, divide
from mpistrat.timeline import Timeline
from mpistrat.transports.base import Operation, Steps, Transport
from mpistrat.transports.mpi import MpiTransport
from mpistrat.transports.mpi_ring import MpiRingTransport
from mpistrat.transports.shared_memory import SharedMemoryTransport

__all__ = ["BoundPlan", "DirectPlan", "Executor"]

SLOT_ALIGNMENT_BYTES = 4096
RING_FROM_BYTES = 1 << 16

TRANSPORTS: dict[str, type[Transport]] = {
    transport.name: transport for transport in (MpiTransport, MpiRingTransport, SharedMemoryTransport)
}


@dataclass
class _Chunk:
    """One chunk in its slot, with everything that happens to it."""

    slot: int
    nbytes: int
    copy_in: CopyIn
    copy_out: CopyOut
    head: list[tuple[str, Operation]] = field(default_factory=list)
    middle: list[tuple[str, Operation]] = field(default_factory=list)
    tail: list[tuple[str, Operation]] = field(default_factory=list)


class Executor:
    """Binds plans to the transports of one hierarchy. Making one is a collective call.

    Parameters
    ----------
    hierarchy : Hierarchy
        The groups of this rank.
    """

    def __init__(self, hierarchy: Hierarchy) -> None:
        self.hierarchy = hierarchy
        self.timeline = Timeline()
        self.intra = _make(settings.INTRA_TRANSPORT.read(), ("shared_memory", "mpi"), hierarchy.intra)
        inter = settings.INTER_TRANSPORT.read()
        self.world = MpiTransport(hierarchy.world_group)
        self.rails = {shard: _make(inter, ("mpi_ring", "mpi"), rail) for shard, rail in hierarchy.rails.items()}
        self._small_rails = {shard: MpiTransport(rail) for shard, rail in hierarchy.rails.items()}
        self._leaders = MpiTransport(hierarchy.leaders) if hierarchy.leaders else None
        self._arena = np.empty(0, np.uint8)
        self._marks: dict[int, int] = {}
        self._geometry: tuple[int, int] = (0, 0)
        self._last_mark = 0
        self.generation = 0

    def bind(
        self, plan: Plan, layout: Layout, dtype: np.dtype[Any], op: ReduceOp, casts: bool
    ) -> BoundPlan | DirectPlan:
        """Prepare `plan` for buckets of `layout`. A collective call.

        Parameters
        ----------
        plan : Plan
            What to do, the same on all ranks.
        layout : Layout
            The arrays of the bucket.
        dtype : dtype
            In which the bucket is summed and sent.
        op : ReduceOp
            How to combine.
        casts : bool
            Whether an array of the bucket has another dtype.
        """
        flat = plan.phases in ((), (Phase(Verb.ALL_REDUCE, Scope.WORLD),))
        if flat and len(layout.offsets) == 2 and not casts:
            return DirectPlan(self, plan, dtype, op)
        slots = plan.depth + 1
        padded = plan.padded(min(plan.chunk_count, plan.count)) * dtype.itemsize
        slot_bytes = -(-padded // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES
        self._reserve(slots * slot_bytes)
        return BoundPlan(self, plan, layout, dtype, op, slots, slot_bytes)

    def slot(self, index: int, slot_bytes: int, count: int, dtype: np.dtype[Any]) -> Array:
        """Return `count` elements of the scratch memory, from the beginning of a slot."""
        return self._arena[index * slot_bytes : index * slot_bytes + count * dtype.itemsize].view(dtype)

    def operations(self, phase: Phase, plan: Plan, buffer: Array, op: ReduceOp) -> list[tuple[str, Operation]]:
        """Bind one phase on one chunk: no operation where this rank has no part in it."""
        world, rank = self.hierarchy.world, self.hierarchy.rank
        shard_count = buffer.size // world.num_shards
        if phase.scope is Scope.INTRA:
            ranks = self.hierarchy.intra.ranks
            bounds = [world.shards_of(member).start * shard_count for member in ranks] + [buffer.size]
            return [(str(phase), _bind(self.intra, phase.verb, buffer, bounds, op))]
        if phase.scope is Scope.INTER:
            small = shard_count * buffer.itemsize < RING_FROM_BYTES
            rails: dict[int, Any] = dict(self._small_rails if small else self.rails)
            return [
                (f"{phase} rail {shard}", rails[shard].all_reduce(buffer[shard * shard_count : (shard + 1) * shard_count], op))
                for shard in world.shards_of(rank)
            ]
        if phase.scope is Scope.LEADERS:
            return [(str(phase), self._leaders.all_reduce(buffer, op))] if self._leaders else []
        return [(str(phase), self.world.all_reduce(buffer, op))]

    def enter(self, slots: int, slot_bytes: int) -> None:
        """Note which slots the next chunks use; slots cut otherwise may overlap any of those used before."""
        if self._geometry != (slots, slot_bytes):
            self._geometry = (slots, slot_bytes)
            self._marks = dict.fromkeys(range(slots), self._last_mark)

    def acquire(self, slot: int) -> Steps:
        """Wait until no peer reads the slot any more."""
        return self.intra.fence(self._marks[slot])

    def release(self, slot: int) -> None:
        """Tell the peers that this rank has read what it wanted of its chunk."""
        self._marks[slot] = self._last_mark = self.intra.release()

    def _reserve(self, nbytes: int) -> None:
        """Enlarge the scratch memory if need be; what was bound to the old one must be bound again."""
        if nbytes > self._arena.nbytes:
            self.hierarchy.intra.comm.Barrier()
            self.intra.close()
            self._arena = self.intra.allocate(nbytes)
            self._geometry, self._marks, self._last_mark = (0, 0), {}, 0
            self.generation += 1

    def close(self) -> None:
        """Free the scratch memory. A collective call."""
        self.intra.close()


class BoundPlan:
    """A plan with its memory, ready to run any number of times."""

    def __init__(
        self,
        executor: Executor,
        plan: Plan,
        layout: Layout,
        dtype: np.dtype[Any],
        op: ReduceOp,
        slots: int,
        slot_bytes: int,
    ) -> None:
        self.plan = plan
        self.generation = executor.generation
        self._executor = executor
        self._dtype, self._op, self._layout = dtype, op, layout
        self._slots, self._slot_bytes = slots, slot_bytes
        self._bound: dict[tuple[int, int], list[list[tuple[str, Operation]]]] = {}
        # a plan of one chunk takes its two slots in turn
        turns = slots if plan.num_chunks == 1 else 1
        self._turns = [
            [self._chunk(start, count, (index + turn) % slots) for index, (start, count) in enumerate(plan.chunks())]
            for turn in range(turns)
        ]
        self._turn = 0

    def run(self, sources: Sequence[Array], targets: Sequence[Array]) -> Steps:
        """Return the steps that reduce `sources` into C-contiguous `targets`. A collective call."""
        executor = self._executor
        sources, targets = [array.reshape(-1) for array in sources], [array.reshape(-1) for array in targets]
        executor.enter(self._slots, self._slot_bytes)
        chunks = self._turns[self._turn]
        self._turn = (self._turn + 1) % len(self._turns)

        def head(index: int) -> Steps:
            chunk = chunks[index]
            yield from executor.acquire(chunk.slot)
            started = time.perf_counter()
            yield from chunk.copy_in.run(sources)
            self._record("copy in", started, chunk)
            yield from self._walk(chunk, chunk.head)

        def middle(index: int) -> Steps:
            return self._walk(chunks[index], chunks[index].middle)

        def tail(index: int) -> Steps:
            chunk = chunks[index]
            yield from self._walk(chunk, chunk.tail)
            started = time.perf_counter()
            yield from chunk.copy_out.run(targets)
            self._record("copy out", started, chunk)
            executor.release(chunk.slot)

        if len(chunks) > 1:
            yield from overlap(len(chunks), self.plan.depth, head, middle, tail)
        elif chunks:
            yield from head(0)
            yield from middle(0)
            yield from tail(0)

    def _chunk(self, start: int, count: int, slot: int) -> _Chunk:
        padded = self.plan.padded(count)
        buffer = self._executor.slot(slot, self._slot_bytes, padded, self._dtype)
        phases = self._operations(slot, padded, buffer)
        steps = [operation for operations in phases for _, operation in operations]
        parts = [(part.start, part.stop, part.addends) for part in steps[-1].parts] if steps else [(0, padded, (buffer,))]
        divisor = self.plan.world.size if self._op is ReduceOp.MEAN else 1
        chunk = _Chunk(
            slot,
            padded * self._dtype.itemsize,
            CopyIn(self._layout, start, start + count, buffer),
            CopyOut(self._layout, start, start + count, parts, self._op, divisor),
        )
        # what crosses nodes overlaps with what comes before and after it; on one node all phases overlap with the copies
        crossing = [phase.scope is not Scope.INTRA for phase in self.plan.phases]
        first = crossing.index(True) if any(crossing) else 0
        last = crossing.index(True) + 1 if any(crossing) else len(phases)
        chunk.head, chunk.middle, chunk.tail = (
            [operation for operations in part for operation in operations]
            for part in (phases[:first], phases[first:last], phases[last:])
        )
        return chunk

    def _operations(self, slot: int, padded: int, buffer: Array) -> list[list[tuple[str, Operation]]]:
        """Return the operations of each phase; chunks of one size in one slot share them."""
        if (slot, padded) not in self._bound:
            self._bound[slot, padded] = [
                self._executor.operations(phase, self.plan, buffer, self._op) for phase in self.plan.phases
            ]
        return self._bound[slot, padded]

    def _walk(self, chunk: _Chunk, operations: list[tuple[str, Operation]]) -> Steps:
        for name, operation in operations:
            started = time.perf_counter()
            yield from operation.run()
            self._record(name, started, chunk)

    def _record(self, name: str, started: float, chunk: _Chunk) -> None:
        if self._executor.timeline.enabled:
            lane = name.split()[0] if not name.startswith("copy") else "intra"
            self._executor.timeline.record(name, lane, started, chunk.nbytes)


class DirectPlan:
    """A flat plan for one array: MPI works on the caller's memory, and nothing is copied."""

    def __init__(self, executor: Executor, plan: Plan, dtype: np.dtype[Any], op: ReduceOp) -> None:
        self.plan = plan
        self._executor = executor
        self._call = executor.world.all_reduce_call(dtype, op)
        self._divisor = plan.world.size if op is ReduceOp.MEAN else 1

    @property
    def generation(self) -> int:
        """Always the present one: no scratch memory is bound."""
        return self._executor.generation

    def run(self, sources: Sequence[Array], targets: Sequence[Array]) -> Steps:
        """Reduce the one source into the one target, and return no steps. A collective call."""
        target = targets[0]
        started = time.perf_counter()
        self._call(np.ascontiguousarray(sources[0]), target)
        if self._divisor > 1:
            divide(target, self._divisor, out=target)
        if self._executor.timeline.enabled:
            self._executor.timeline.record("world all_reduce", "world", started, target.nbytes)
        return iter(())


def _bind(transport: Transport, verb: Verb, buffer: Array, bounds: list[int], op: ReduceOp) -> Operation:
    """Bind a verb inside the node."""
    if verb is Verb.REDUCE_SCATTER:
        return transport.reduce_scatter(buffer, bounds, op)
    if verb is Verb.ALL_GATHER:
        return transport.all_gather(buffer, bounds)
    if verb is Verb.REDUCE:
        return transport.reduce(buffer, op)
    if verb is Verb.BROADCAST:
        return transport.broadcast(buffer)
    return transport.all_reduce(buffer, op)


def _make(wanted: str, order: Sequence[str], group: Group) -> Transport:
    """Return the transport asked for, or with ``auto`` the first in `order` that serves the group."""
    refusals = []
    for name in order if wanted == "auto" else (wanted,):
        reason = TRANSPORTS[name].probe(group)
        if not reason:
            return TRANSPORTS[name](group)
        refusals.append(f"{name}: {reason}")
    raise TransportError(f"group {group.name} has no usable transport ({'; '.join(refusals)}); accepted are {', '.join(order)}")
