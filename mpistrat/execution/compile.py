"""Compile plans to buckets: bind them to the transports of an executor and to memory. A bucket runs its chunks in three lanes.

The head of a chunk is what comes before the phase between nodes: copy-in and reduce-scatter; its middle is that phase, its tail
all-gather and copy-out. One thread advances all lanes in turn: with depth 2 that inside the node runs head 0, head 1, tail 0,
head 2, tail 1, …; middles start in the order of the chunks, `max_in_flight` of them at a time: one where they share a group
without channels.

A chunk occupies a slot of the scratch memory from its copy-in to its copy-out. There is one slot more than chunks in flight,
so that a rank can fill a slot while its peers still read the previous one; a single long chunk has only one slot.

Invariant: the order of a lane's operations depends on chunk indexes only, never on what happens to be ready, so that all ranks
issue the operations of a group in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from mpistrat.algorithms.plan import Phase, Plan, Scope
from mpistrat.arrays import Array, flat
from mpistrat.device.cuda import are_contiguous
from mpistrat.errors import TransportError
from mpistrat.execution.executor import BucketSpec, CopySteps, Executor
from mpistrat.packing import Layout
from mpistrat.reduction import Fold, ReduceOp, divide
from mpistrat.steps import WAITING, WORKED, Steps
from mpistrat.timeline import Timeline
from mpistrat.transports.base import FlatArrays, Operation, SegmentCache

SLOT_ALIGNMENT_BYTES = 4096
LONE_SLOT_BYTES = 1 << 22  # a single chunk of at least this size has one slot: that saves memory and costs a short wait


ChunkSteps = Callable[[int], Steps]


@dataclass(eq=False)
class Bucket:
    """Arrays, by their indices in the call, that are combined together, and how: bound to its memory.

    ``run(sources, targets)`` returns the steps that combine arrays into C-contiguous ones, in a collective call, and
    `is_current` whether the memory is still there.
    """

    plan: Plan
    run: Callable[[Sequence[Array], Sequence[Array]], Steps]
    is_current: Callable[[], bool]
    held_bytes: Callable[[], int] = int
    indices: tuple[int, ...] = (0,)


def all_reduce(executor: Executor, plan: Plan, pack: BucketSpec) -> Bucket:
    """Bind a plan that `Executor.adapt` returned to the caller's arrays, or to a buffer. A collective call.

    With a wire dtype, ranks send in it between nodes, and add in their order.
    """
    executor.largest_pack_bytes = max(executor.largest_pack_bytes, pack.layout.count * pack.dtype.itemsize)
    return _on_the_callers_arrays(executor, plan, pack) if plan.is_direct else _Buffered(executor, plan, pack).bucket()


def _on_the_callers_arrays(executor: Executor, plan: Plan, pack: BucketSpec) -> Bucket:
    """Return a bucket that needs no buffer."""
    layout, count, intra, timeline = pack.layout, pack.layout.count, executor.intra, executor.timeline
    bound, fold = executor.bind_direct(plan, pack), Fold(pack.op, pack.dtypes[0], executor.divisor(pack.op))
    segments = SegmentCache(partial(layout.segments, longest=max(count, 1)))
    scope = plan.phases[0].scope.value if plan.phases else Scope.WORLD.value

    def run(sources: Sequence[Array], targets: Sequence[Array]) -> Steps:
        arrays = FlatArrays(list(map(flat, sources)), [target.reshape(-1) for target in targets], count, segments)
        return recorded(timeline, f"{scope} all_reduce", scope, arrays.nbytes, bound(arrays, fold))

    # no scratch memory is bound, but the transport in the node may be another one now, which calls for another plan
    return Bucket(plan, run, lambda: executor.intra is intra, indices=pack.indices)


Operations = list[list[tuple[str, Operation]]]
"""The operations of each phase, by name: several where this rank owns several shards."""


@dataclass
class Chunk:
    """A chunk in its slot of the scratch memory, with its copies and operations."""

    slot: int
    nbytes: int
    copy_in: CopySteps
    copy_out: CopySteps
    head: Operations
    middle: Operations
    tail: Operations


class _Buffered:
    """A plan of an all-reduce with its slots of the scratch memory."""

    def __init__(self, executor: Executor, plan: Plan, pack: BucketSpec) -> None:
        self.executor, self._plan, self._pack = executor, plan, pack
        self._wire = pack.wire if Scope.INTER in plan.scopes else None
        padded = plan.padded(min(plan.chunk_count, plan.count)) * pack.dtype.itemsize
        slots = 1 if plan.num_chunks == 1 and padded >= LONE_SLOT_BYTES else plan.depth + 1
        self._slot_bytes = -(-padded // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES
        if plan.num_chunks > 1:  # arrays of other lengths have slightly longer chunks: they find the same slots, faulted in
            self._slot_bytes = 1 << (self._slot_bytes - 1).bit_length()
        self.partition = slots, self._slot_bytes
        executor.reserve(slots * self._slot_bytes)
        self._generation = executor.generation
        self._bound: dict[tuple[int, int], Operations] = {}
        # rails have a channel for each slot; operations inside a node run one after the other
        self._max_in_flight = executor.max_in_flight(plan.depth) if Scope.INTER in plan.scopes else 1
        # without an INTRA phase no peer reads our slots, and peers may take another path
        self.has_intra = Scope.INTRA in plan.scopes
        # a plan of one chunk alternates between its two slots
        turns = slots if plan.num_chunks == 1 else 1
        self.turns = [
            [self._chunk(start, count, (index + turn) % slots) for index, (start, count) in enumerate(plan.chunks)]
            for turn in range(turns)
        ]
        executor.bound_plans.add(self)

    def bucket(self) -> Bucket:
        is_current = lambda: self._generation == self.executor.generation  # noqa: E731
        return Bucket(self._plan, self.run, is_current, self._held_bytes, self._pack.indices)

    def run(self, sources: Sequence[Array], targets: Sequence[Array]) -> Steps:
        """Return the steps of a call."""
        executor = self.executor
        if executor.device is None:
            sources, targets = [array.reshape(-1) for array in sources], [array.reshape(-1) for array in targets]
        elif not are_contiguous(sources):  # only the addresses of the arrays are used
            sources = [array if array.flags.c_contiguous else array.copy() for array in sources]
        slots, intra, timeline, has_intra = executor.slots, executor.intra, executor.timeline, self.has_intra
        if has_intra:
            if slots.partition != self.partition:
                slots.repartition(*self.partition)
            slots.turn += 1
        chunks = self.turns[slots.turn % len(self.turns) if has_intra else 0]

        def head(index: int) -> Steps:
            chunk = chunks[index]
            yield from intra.fence(slots.releases[chunk.slot] if has_intra else slots.last_release)
            yield from recorded(timeline, "copy in", "intra", chunk.nbytes, chunk.copy_in(sources))
            yield from self._run(chunk, chunk.head)

        def tail(index: int) -> Steps:
            chunk = chunks[index]
            yield from self._run(chunk, chunk.tail)
            yield from recorded(timeline, "copy out", "intra", chunk.nbytes, chunk.copy_out(targets))
            if has_intra:
                slots.releases[chunk.slot] = slots.last_release = intra.release()

        middle = lambda index: self._run(chunks[index], chunks[index].middle)  # noqa: E731
        return overlap(head, middle, tail, len(chunks), self._plan.depth, self._max_in_flight)

    def _run(self, chunk: Chunk, phases: Operations) -> Steps:
        timeline = self.executor.timeline
        for operations in phases:
            if len(operations) == 1 and not timeline.enabled:
                yield from operations[0][1].run()
            else:  # a rank that owns several shards runs their rails together, since ranks of larger nodes do so
                lanes = [(name, self._lane(name, chunk), operation) for name, operation in operations]
                yield from interleave([recorded(timeline, name, lane, chunk.nbytes, each.run()) for name, lane, each in lanes])

    def _lane(self, name: str, chunk: Chunk) -> str:
        """Return the row of an operation in the timeline: rails have their own, and chunks in flight at the same time."""
        scope, *_, last = name.split()
        if scope != Scope.INTER.value:
            return scope
        return f"{scope} rail {last}" if self._max_in_flight == 1 else f"{scope} rail {last} {chunk.slot}"

    def unbind(self) -> None:
        """Drop all references to the scratch memory; the plan cannot run any more."""
        self._bound.clear()
        self.turns.clear()

    def _held_bytes(self) -> int:
        operations = (operation for phases in self._bound.values() for phase in phases for _, operation in phase)
        return sum(operation.scratch_bytes for operation in operations)

    def _chunk(self, start: int, count: int, slot: int) -> Chunk:
        executor, plan, pack = self.executor, self._plan, self._pack
        layout, padded = pack.layout.part(start, start + count), plan.padded(count)
        buffer = executor.slot(slot, self._slot_bytes, padded, pack.dtype)
        phases = self._operations(slot, padded, buffer)
        steps = [operation for operations in phases for _, operation in operations]
        parts = steps[-1].parts if steps else []
        # the middle is the phase between nodes; on one node it is all phases, which overlap with the copies
        crossing = [phase.scope is not Scope.INTRA for phase in plan.phases]
        first = crossing.index(True) if any(crossing) else 0
        last = first + 1 if any(crossing) else len(phases)
        return Chunk(
            slot,
            buffer.nbytes,
            executor.copy_in(layout, buffer, pack.dtypes),
            executor.copy_out(layout, parts, buffer, pack.op, pack.dtypes),
            phases[:first],
            phases[first:last],
            phases[last:],
        )

    def _operations(self, slot: int, padded: int, buffer: Array) -> Operations:
        """Return the operations of each phase; chunks of one size in one slot share them."""
        if (slot, padded) not in self._bound:
            plan, bind = self._plan, self.executor.operations
            phases = [bind(plan, phase, slot, buffer, self._pack.op, self._wire) for phase in plan.phases]
            for phase, operations in zip(plan.phases, phases[:-1], strict=False):
                for _, operation in operations:
                    self._check_in_place(phase, operation, buffer)
            self._bound[slot, padded] = phases
        return self._bound[slot, padded]

    def _check_in_place(self, phase: Phase, operation: Operation, buffer: Array) -> None:
        """Check that the next phase will find the result in the buffer."""
        if any(len(part.addends) > 1 or not self.executor.shares_memory(part.addends[0], buffer) for part in operation.parts):
            used = self.executor.intra if phase.scope is Scope.INTRA else next(iter(self.executor.rails.values()))
            raise TransportError(
                f"transport {used.name}: {phase.verb.value} left its result outside the buffer, which only the last phase of a "
                f"plan may do: {self._plan}"
            )


def reduce_scatter(executor: Executor, plan: Plan, dtype: np.dtype[Any], op: ReduceOp) -> Bucket:
    """Bind a reduce-scatter of one C-contiguous array of `dtype`, to a target that shares no memory. A collective call.

    Inside a node each rank sums its shard over the arrays of all ranks, through shared memory; then a ring reduce-scatters the
    shard between the ranks of its rail.
    """
    executor.largest_pack_bytes = max(executor.largest_pack_bytes, plan.bounds[-1] * dtype.itemsize)
    scatter, intra = _Scatter(executor, plan, dtype, op), executor.intra
    return Bucket(plan, scatter.run, lambda: executor.intra is intra, lambda: scatter.slots.nbytes)


@dataclass(frozen=True)
class _Shard:
    """Some elements of each rank's part of an array, which this rank's shard is a sum of.

    `parts` are their elements in the source, in the order of the plan, and `bounds` those of the ranks of the node, in the
    chunk; `members` bound what the ranks of this rank's rail get of the `shard`, whose `memory` the `ring` divides between
    nodes, and `target` is this rank's part.
    """

    parts: list[slice]
    bounds: list[int]
    segments: SegmentCache
    members: list[int]
    memory: Array
    ring: Operation | None
    target: slice


class _Scatter:
    """The chunks of a reduce-scatter, with the memory of their shards in the ring."""

    def __init__(self, executor: Executor, plan: Plan, dtype: np.dtype[Any], op: ReduceOp) -> None:
        self._plan, self._executor, self._op = plan, executor, op
        self._place, self._crosses = executor.hierarchy.place, plan.world.num_nodes > 1
        self._divisor = executor.divisor(op)
        self._fold = Fold(op, dtype, 1 if self._crosses else self._divisor)
        num_nodes, chunks = plan.world.num_nodes, plan.parts()
        # the parts of a chunk that form this rank's shard, one for each rank of its rail
        self._own = slice(self._place.local_rank * num_nodes, (self._place.local_rank + 1) * num_nodes)
        longest = max(sum(part.stop - part.start for part in parts[self._own]) for parts in chunks) if self._crosses else 0
        self.slots = np.empty((plan.depth, longest), dtype)
        self._rings: dict[tuple[int, ...], Operation] = {}
        self._chunks = [self._chunk(parts, index % plan.depth) for index, parts in enumerate(chunks)]

    def run(self, sources: Sequence[Array], targets: Sequence[Array]) -> Steps:
        """Return the steps of a call."""
        source, target, chunks, timeline = sources[0].reshape(-1), targets[0].reshape(-1), self._chunks, self._executor.timeline
        inside = "copy in" if self._plan.world.num_shards == 1 else "intra reduce_scatter"
        rail = f"rail {self._place.local_rank}"

        def head(index: int) -> Steps:
            memory = chunks[index].memory if self._crosses else target
            return recorded(timeline, inside, "intra", memory.nbytes, self._sum_inside(chunks[index], source, memory))

        def middle(index: int) -> Steps:
            ring, nbytes = chunks[index].ring, chunks[index].memory.nbytes
            assert ring is not None, "there is no ring on a single node"
            return recorded(timeline, f"inter reduce_scatter {rail}", f"inter {rail}", nbytes, ring.run())

        def tail(index: int) -> Steps:
            own = target[chunks[index].target]
            return recorded(timeline, "copy out", "intra", own.nbytes, self._copy_out(chunks[index], own))

        if not self._crosses:
            return head(0)
        # those of one rail share a channel
        return overlap(head, middle, tail, len(chunks), self._plan.depth, max_in_flight=1)

    def _chunk(self, parts: list[slice], slot: int) -> _Shard:
        """Return the chunk of these parts of the source; its shard is in that slot during the ring."""
        layout, own = Layout([part.stop - part.start for part in parts]), self._own
        first, *_, last = layout.offsets[own.start : own.stop + 1]
        members = [offset - first for offset in layout.offsets[own.start : own.stop + 1]]
        begin = self._plan.bounds[self._executor.hierarchy.rank]
        mine = parts[own][self._place.node.index]
        memory = self.slots[slot, : last - first]
        return _Shard(
            parts,
            layout.offsets[:: self._plan.world.num_nodes],
            SegmentCache(partial(layout.segments, longest=max(layout.count, 1))),
            members,
            memory,
            self._ring(slot, memory, members),
            slice(mine.start - begin, mine.stop - begin),
        )

    def _ring(self, slot: int, shard: Array, members: list[int]) -> Operation | None:
        """Return the ring that reduce-scatters a shard in that slot; chunks with equal bounds share it."""
        key = slot, *members
        if self._crosses and key not in self._rings:
            rail = self._executor.rails[self._place.local_rank]
            self._rings[key] = rail.reduce_scatter(shard, members, self._op)
        return self._rings.get(key)

    def _sum_inside(self, chunk: _Shard, source: Array, shard: Array) -> Steps:
        """Sum this rank's shard over the ranks of the node."""
        own = self._own
        addends = [source[part] for part in chunk.parts]
        own_targets = [shard[first:last] for first, last in pairwise(chunk.members)]
        if self._plan.world.num_shards == 1:
            for addend, target in zip(addends, own_targets, strict=True):
                np.copyto(target, addend)
                yield WORKED
            return
        empty = shard[:0]
        targets = [empty] * own.start + own_targets + [empty] * (len(addends) - own.stop)
        arrays = FlatArrays(addends, targets, chunk.bounds[-1], chunk.segments)
        yield from self._executor.exchange(arrays, self._fold, chunk.bounds)

    def _copy_out(self, chunk: _Shard, target: Array) -> Steps:
        """Write this rank's part to the target."""
        first, last = chunk.members[self._place.node.index : self._place.node.index + 2]
        divide(chunk.memory[first:last], self._divisor, out=target)
        yield WORKED


def recorded(timeline: Timeline, name: str, lane: str, nbytes: int, steps: Steps) -> Steps:
    """Return steps, with the time that they take in the timeline, while it is enabled."""
    started = time.perf_counter()
    yield from steps
    if timeline.enabled:
        timeline.record(name, lane, started, nbytes)


def overlap(head: ChunkSteps, middle: ChunkSteps, tail: ChunkSteps, num_chunks: int, depth: int, max_in_flight: int) -> Steps:
    """Return the steps of all chunks, by their indexes, with at most `depth` chunks between their head and their tail."""
    if num_chunks == 1:
        for lane in (head, middle, tail):
            yield from lane(0)
        return
    heads_done = middles_done = 0
    is_middle_done = [False] * num_chunks

    def intra() -> Steps:
        nonlocal heads_done
        for turn in range(num_chunks + depth - 1):
            if turn < num_chunks:
                yield from head(turn)
                heads_done += 1
                yield WORKED  # the middle of this chunk may start before the next chunk is copied
            finished = turn - depth + 1
            if finished >= 0:
                while not is_middle_done[finished]:
                    yield WAITING
                yield from tail(finished)

    def inter(chunk: int) -> Steps:
        nonlocal middles_done
        yield from middle(chunk)
        is_middle_done[chunk] = True
        middles_done += 1

    running = [intra()]
    started = 0
    while running:
        answers = [next(lane, None) for lane in running]
        running = [lane for lane, answer in zip(running, answers, strict=True) if answer is not None]
        if started < heads_done and started - middles_done < max_in_flight:
            running.append(inter(started))
            started += 1
            answers.append(WORKED)
        yield any(answers)


def interleave(lanes: Sequence[Steps]) -> Steps:
    """Return the steps of all lanes, advanced in turn."""
    while lanes:
        answers = [next(lane, None) for lane in lanes]
        lanes = [lane for lane, answer in zip(lanes, answers, strict=True) if answer is not None]
        yield any(answers)
