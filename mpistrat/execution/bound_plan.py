"""A plan bound to memory and operations: run its phases, and overlap its chunks.

A chunk occupies a slot of the scratch memory from its copy-in to its copy-out. There is one slot more than chunks in flight,
so that a rank can fill a slot while its peers still read the previous one; a single long chunk has only one slot.

The phases inside the node form one lane, those of each chunk between nodes another: a lane is a sequence of steps, and one
thread advances all lanes in turn.

Invariant: the order of a lane's operations depends on chunk indexes only, never on what happens to be ready, so that all ranks
issue the operations of a group in the same order.

With depth 2 the INTRA lane runs head 0, head 1, tail 0, head 2, tail 1, …. Head k is copy-in and reduce-scatter of chunk k,
its middle the phase between nodes, tail k all-gather and copy-out. Middles start in the order of the chunks, `max_in_flight`
of them at a time: one where they share a group without channels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from mpistrat.algorithms.plan import Plan, Scope
from mpistrat.arrays import Array, flat
from mpistrat.execution.executor import CopySteps, Executor
from mpistrat.packing.layout import Layout
from mpistrat.packing.wire import Cast, Wire
from mpistrat.reduction import Fold, ReduceOp
from mpistrat.transports.base import FlatArrays, Operation, SegmentCache
from mpistrat.transports.exchange import BLOCK_SLOT_BYTES
from mpistrat.transports.steps import WAITING, WORKED, Steps

__all__ = ["BoundPlan", "DirectPlan", "bind", "interleave", "overlap"]

SLOT_ALIGNMENT_BYTES = 4096
LONE_SLOT_BYTES = 1 << 22  # a single chunk of at least this size has one slot: that saves memory and costs a short wait

ChunkSteps = Callable[[int], Steps]


def bind(
    executor: Executor,
    plan: Plan,
    layout: Layout,
    dtype: np.dtype[Any],
    op: ReduceOp,
    given: Sequence[np.dtype[Any]],
    wire: Wire | None = None,
) -> BoundPlan | DirectPlan:
    """Bind a plan to the caller's arrays if a transport can work on them, else to buckets of `layout`. A collective call.

    `given` has the dtype of each array. With `wire`, ranks send in its dtype between nodes, and add in their order.
    """
    executor.largest_pack_bytes = max(executor.largest_pack_bytes, layout.count * dtype.itemsize)
    all_reduce = None if plan.in_order or wire is not None else executor.bind_direct(plan, layout, dtype, op, given)
    if all_reduce is not None:
        direct = DirectPlan(executor, plan, all_reduce, layout, given[0], op)
        if _is_one_array_in_the_window(executor, plan, layout, dtype, given):
            is_small = executor.intra.group.size == 2 and plan.num_bytes <= BLOCK_SLOT_BYTES
            direct.blocking = executor.blocking_pair(dtype, plan.count, direct.fold) if is_small else direct.run_blocking
        return direct
    padded = plan.padded(min(plan.chunk_count, plan.count)) * dtype.itemsize
    slots = 1 if plan.num_chunks == 1 and padded >= LONE_SLOT_BYTES else plan.depth + 1
    slot_bytes = -(-padded // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES
    if plan.num_chunks > 1:  # arrays of other lengths have slightly longer chunks: they find the same slots, already faulted in
        slot_bytes = 1 << (slot_bytes - 1).bit_length()
    executor.reserve(slots * slot_bytes)
    bound = BoundPlan(executor, plan, layout, dtype, op, slots, slot_bytes, wire, given)
    executor.bound_plans.add(bound)
    return bound


def _is_one_array_in_the_window(
    executor: Executor, plan: Plan, layout: Layout, dtype: np.dtype[Any], given: Sequence[np.dtype[Any]]
) -> bool:
    if {phase.scope for phase in plan.phases} != {Scope.INTRA} or executor.intra.window is None:
        return False
    return layout.is_one_array and plan.count > 0 and set(given) == {dtype}


class BoundPlan:
    """A plan with its memory, ready to run any number of times.

    Attributes
    ----------
    plan : Plan
        As given.
    generation : int
        Generation of the executor's scratch memory that it is bound to.
    flat_count : int
        Elements of the one all-reduce of MPI, if the plan is nothing else; else 0.
    """

    def __init__(
        self,
        executor: Executor,
        plan: Plan,
        layout: Layout,
        dtype: np.dtype[Any],
        op: ReduceOp,
        slots: int,
        slot_bytes: int,
        wire: Wire | None,
        dtypes: Sequence[np.dtype[Any]],
    ) -> None:
        self.plan = plan
        self.generation = executor.generation
        self._executor = executor
        self._dtype, self._op, self._layout, self._dtypes = dtype, op, layout, dtypes
        self._partition, self._slot_bytes, self._wire = (slots, slot_bytes), slot_bytes, wire
        is_one_call = executor.device is None and not plan.in_order and plan.num_chunks == 1 and _is_flat(plan)
        self.flat_count = plan.padded(plan.count) if is_one_call else 0
        self._bound: dict[tuple[int, int, int], list[list[tuple[str, Operation]]]] = {}
        self._casters: dict[tuple[int, int, int], Cast] = {}
        # rails have a channel for each slot; operations inside a node run one after the other
        self._max_in_flight = (
            executor.max_in_flight(plan.depth) if any(phase.scope is Scope.INTER for phase in plan.phases) else 1
        )
        # without an INTRA phase no peer reads our slots, and peers may take another path
        self._has_intra = any(phase.scope is Scope.INTRA for phase in plan.phases)
        # a plan of one chunk alternates between its two slots
        turns = slots if plan.num_chunks == 1 else 1
        self._turns = [
            [self._chunk(start, count, (index + turn) % slots) for index, (start, count) in enumerate(plan.chunks())]
            for turn in range(turns)
        ]

    @property
    def scratch_bytes(self) -> int:
        """Bytes of its operations and casts, besides the executor's scratch memory."""
        operations = (operation for phases in self._bound.values() for phase in phases for _, operation in phase)
        casts = self._casters.values()
        return sum(operation.scratch_bytes for operation in operations) + sum(cast.scratch_bytes for cast in casts)

    @property
    def begins_with_barrier(self) -> bool:
        """Whether its first step is a barrier of the node in shared memory."""
        if not self.plan.phases or not self.plan.count:
            return False
        is_ordered = self.plan.in_order or self._wire is not None
        return self._executor.begins_with_barrier(self.plan.phases[0].scope, is_ordered)

    @property
    def detects_mismatch(self) -> bool:
        """Whether a rank in another call is found before results are used: see `Executor.detects_mismatch`."""
        count = self.plan.padded(min(self.plan.chunk_count, self.plan.count)) // max(self.plan.world.num_shards, 1)
        is_ordered = self.plan.in_order or self._wire is not None
        return self._executor.detects_mismatch(self.plan.phases, count * self._dtype.itemsize, is_ordered)

    def run(self, sources: Sequence[Array], targets: Sequence[Array]) -> Steps:
        """Return the steps that reduce `sources` into C-contiguous `targets`. A collective call."""
        executor = self._executor
        # on a device only the addresses of the arrays are used
        sources = [array.reshape(-1) if executor.device is None else flat(array) for array in sources]
        targets = [array.reshape(-1) for array in targets]
        slots, intra, timeline, has_intra = executor.slots, executor.intra, executor.timeline, self._has_intra
        if has_intra:
            if slots.partition != self._partition:
                slots.repartition(*self._partition)
            slots.turn += 1
        chunks = self._turns[slots.turn % len(self._turns) if has_intra else 0]

        def head(index: int) -> Steps:
            chunk = chunks[index]
            yield from intra.fence(slots.releases[chunk.slot] if has_intra else slots.last_release)
            started = time.perf_counter()
            yield from chunk.copy_in.run(sources)
            if timeline.enabled:
                self._record("copy in", started, chunk)
            yield from self._walk(chunk, chunk.head)

        def middle(index: int) -> Steps:
            return self._walk(chunks[index], chunks[index].middle)

        def tail(index: int) -> Steps:
            chunk = chunks[index]
            yield from self._walk(chunk, chunk.tail)
            started = time.perf_counter()
            yield from chunk.copy_out.run(targets)
            if timeline.enabled:
                self._record("copy out", started, chunk)
            if has_intra:
                slots.releases[chunk.slot] = slots.last_release = intra.release()

        if len(chunks) > 1:
            yield from overlap(len(chunks), self.plan.depth, self._max_in_flight, head, middle, tail)
        elif chunks:
            yield from head(0)
            yield from middle(0)
            yield from tail(0)

    def unbind(self) -> None:
        """Drop all references to the scratch memory; the plan cannot run any more."""
        self._bound.clear()
        self._turns.clear()

    def _chunk(self, start: int, count: int, slot: int) -> _Chunk:
        padded = self.plan.padded(count)
        buffer = self._executor.slot(slot, self._slot_bytes, padded, self._dtype)
        phases = self._operations(slot, padded, buffer, start)
        steps = [operation for operations in phases for _, operation in operations]
        parts = steps[-1].parts if steps else []
        divisor = self.plan.world.size if self._op is ReduceOp.MEAN else 1
        chunk = _Chunk(
            slot,
            padded * self._dtype.itemsize,
            self._executor.copy_in(self._layout, start, start + count, buffer, self._dtypes),
            self._executor.copy_out(self._layout, start, start + count, parts, buffer, self._op, divisor, self._dtypes),
        )
        # the middle is the phase between nodes; on one node it is all phases, which overlap with the copies
        crossing = [phase.scope is not Scope.INTRA for phase in self.plan.phases]
        first = crossing.index(True) if any(crossing) else 0
        last = crossing.index(True) + 1 if any(crossing) else len(phases)
        chunk.head, chunk.middle, chunk.tail = phases[:first], phases[first:last], phases[last:]
        return chunk

    def _operations(self, slot: int, padded: int, buffer: Array, start: int) -> list[list[tuple[str, Operation]]]:
        """Return the operations of each phase; chunks of one size in one slot share them, unless casts differ."""
        place = start if self._wire is not None and self._wire.error_feedback else 0
        if (slot, padded, place) not in self._bound:
            casters = None if self._wire is None else partial(self._caster, self._wire, place)
            phases = [
                self._executor.operations(self.plan, phase, slot, buffer, self._op, casters) for phase in self.plan.phases
            ]
            early = [part for operations in phases[:-1] for _, operation in operations for part in operation.parts]
            lost = any(len(part.addends) > 1 or not self._executor.shares_memory(part.addends[0], buffer) for part in early)
            assert not lost, f"{self.plan}: only the last phase may leave its result outside the buffer"
            self._bound[slot, padded, place] = phases
        return self._bound[slot, padded, place]

    def _caster(self, wire: Wire, place: int, part: int, count: int) -> Cast:
        """Return the cast of a part of the chunk at that place, in any slot: it keeps the rounding errors of these elements."""
        key = place, part, count
        if key not in self._casters:
            self._casters[key] = Cast(wire, count)
        return self._casters[key]

    def _walk(self, chunk: _Chunk, phases: list[list[tuple[str, Operation]]]) -> Steps:
        for operations in phases:
            if len(operations) == 1 and not self._executor.timeline.enabled:
                yield from operations[0][1].run()
            else:
                # a rank that owns several shards runs their rails together, since ranks of larger nodes do so
                yield from interleave([self._step(chunk, name, operation) for name, operation in operations])

    def _step(self, chunk: _Chunk, name: str, operation: Operation) -> Steps:
        started = time.perf_counter()
        yield from operation.run()
        if self._executor.timeline.enabled:
            self._record(name, started, chunk)

    def _record(self, name: str, started: float, chunk: _Chunk) -> None:
        scope, *_, last = name.split()
        lane = "intra" if scope == "copy" else scope
        # rails, and chunks in flight at the same time, have their own rows in the timeline
        if lane == Scope.INTER.value:
            lane = f"{lane} rail {last}" if self._max_in_flight == 1 else f"{lane} rail {last} {chunk.slot}"
        self._executor.timeline.record(name, lane, started, chunk.nbytes)


class DirectPlan:
    """A plan that a transport runs on the caller's arrays, without a bucket.

    Attributes
    ----------
    flat_count : int
        As for `BoundPlan`.
    fold : Fold
        How to combine.
    blocking : callable or None
        The same all-reduce of one C-contiguous array as a blocking call: ``blocking(source, target)``.
    """

    def __init__(
        self,
        executor: Executor,
        plan: Plan,
        all_reduce: Callable[[FlatArrays, Fold], Steps],
        layout: Layout,
        dtype: np.dtype[Any],
        op: ReduceOp,
    ) -> None:
        self.plan = plan
        self.flat_count = plan.count if _is_flat(plan) else 0
        self._all_reduce = all_reduce
        self._executor, self._intra = executor, executor.intra
        self._count = layout.count
        self._segments = SegmentCache(partial(layout.segments, longest=max(layout.count, 1)))
        self.fold = Fold(op, dtype, plan.world.size if op is ReduceOp.MEAN else 1)
        self.blocking: Callable[[Array, Array], None] | None = None

    @property
    def begins_with_barrier(self) -> bool:
        """Whether its first step is a barrier of the node in shared memory, if ranks share some."""
        phases = self.plan.phases
        return self.plan.count > 0 and not (phases and not self._executor.begins_with_barrier(phases[0].scope, in_order=False))

    @property
    def detects_mismatch(self) -> bool:
        """Whether a rank in another call is found before results are used: see `Executor.detects_mismatch`."""
        return self._executor.detects_mismatch(self.plan.phases)

    @property
    def generation(self) -> int:
        """The executor's current one, as no scratch memory is bound, unless it has another transport in the node now."""
        return self._executor.generation if self._intra is self._executor.intra else -1

    @property
    def scratch_bytes(self) -> int:
        """0: it works on the caller's arrays."""
        return 0

    def run(self, sources: Sequence[Array], targets: Sequence[Array]) -> Steps:
        """Return the steps that reduce `sources` into C-contiguous `targets`. A collective call."""
        started = time.perf_counter()
        arrays = FlatArrays(list(map(flat, sources)), [target.reshape(-1) for target in targets], self._count, self._segments)
        yield from self._all_reduce(arrays, self.fold)
        if self._executor.timeline.enabled:
            scope = self.plan.phases[0].scope.value if self.plan.phases else Scope.WORLD.value
            self._executor.timeline.record(f"{scope} all_reduce", scope, started, arrays.nbytes)

    def run_blocking(self, source: Array, target: Array) -> None:
        """Reduce one array in a blocking call. A collective call."""
        self._executor.hierarchy.call.drive(self.run([source], [target]))


@dataclass
class _Chunk:
    """A chunk in its slot, with its copies and operations."""

    slot: int
    nbytes: int
    copy_in: CopySteps
    copy_out: CopySteps
    head: list[list[tuple[str, Operation]]] = field(default_factory=list)
    middle: list[list[tuple[str, Operation]]] = field(default_factory=list)
    tail: list[list[tuple[str, Operation]]] = field(default_factory=list)


def overlap(num_chunks: int, depth: int, max_in_flight: int, head: ChunkSteps, middle: ChunkSteps, tail: ChunkSteps) -> Steps:
    """Return the steps of all chunks, with at most `depth` chunks between their head and their tail."""
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

    lanes = [intra()]
    started = 0
    while lanes:
        answers = [next(lane, None) for lane in lanes]
        lanes = [lane for lane, answer in zip(lanes, answers, strict=True) if answer is not None]
        if started < heads_done and started - middles_done < max_in_flight:
            lanes.append(inter(started))
            started += 1
            answers.append(WORKED)
        yield any(answers)


def interleave(lanes: Sequence[Steps]) -> Steps:
    """Return the steps of all lanes, advanced in turn."""
    while lanes:
        answers = [next(lane, None) for lane in lanes]
        lanes = [lane for lane, answer in zip(lanes, answers, strict=True) if answer is not None]
        yield any(answers)


def _is_flat(plan: Plan) -> bool:
    return all(phase.scope is Scope.WORLD for phase in plan.phases)
