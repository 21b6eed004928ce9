"""A reduce-scatter bound to its memory and operations.

Inside a node each rank sums its shard over the arrays of all ranks, through shared memory; then a ring reduce-scatters the
shard between the ranks of its rail. On several nodes one chunk is in the ring while the next ones are summed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from mpistrat.algorithms.plan import Plan
from mpistrat.arrays import Array
from mpistrat.execution.bound_plan import overlap
from mpistrat.execution.executor import Executor
from mpistrat.packing.layout import Layout
from mpistrat.reduction import Fold, ReduceOp, divide
from mpistrat.transports.base import FlatArrays, Operation, SegmentCache
from mpistrat.transports.steps import WORKED, Steps

__all__ = ["BoundScatter"]


class BoundScatter:
    """A plan of a reduce-scatter with its memory, ready to run any number of times. Making one is a collective call."""

    # barriers in shared memory compare calls, and messages carry their digest in the tag
    flat_count, begins_with_barrier, detects_mismatch = 0, True, True

    def __init__(self, executor: Executor, plan: Plan, dtype: np.dtype[Any], op: ReduceOp) -> None:
        executor.largest_pack_bytes = max(executor.largest_pack_bytes, plan.bounds[-1] * dtype.itemsize)
        self.plan, self._executor, self._op, self._intra = plan, executor, op, executor.intra
        self._place, self._crosses = executor.hierarchy.place, plan.world.num_nodes > 1
        self._divisor = plan.world.size if op is ReduceOp.MEAN else 1
        self._fold = Fold(op, dtype, 1 if self._crosses else self._divisor)
        chunks = plan.parts()
        longest = max(sum(part.stop - part.start for part in parts[self._own]) for parts in chunks) if self._crosses else 0
        self._slots = np.empty((plan.depth, longest), dtype)
        self._rings: dict[tuple[int, ...], Operation] = {}
        self._chunks = [self._chunk(parts, index % plan.depth) for index, parts in enumerate(chunks)]

    @property
    def generation(self) -> int:
        """The executor's current one, as no scratch memory is bound, unless it has another transport in the node now."""
        return self._executor.generation if self._intra is self._executor.intra else -1

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the shards in the ring, besides the executor's scratch memory."""
        return self._slots.nbytes

    def run(self, sources: Sequence[Array], targets: Sequence[Array]) -> Steps:
        """Return the steps that combine one source, and write this rank's part to one target. A collective call.

        Both are C-contiguous, of the bound dtype, and share no memory.
        """
        source, target, chunks = sources[0].reshape(-1), targets[0].reshape(-1), self._chunks
        if not self._crosses:
            return self._sum_inside(chunks[0], source, target)

        def head(index: int) -> Steps:
            return self._sum_inside(chunks[index], source, chunks[index].shard)

        def middle(index: int) -> Steps:
            return self._run_ring(chunks[index])

        def tail(index: int) -> Steps:
            return self._copy_out(chunks[index], target)

        # rings of one rail share a channel, so they run one after the other
        return overlap(len(chunks), self.plan.depth, 1, head, middle, tail)

    @property
    def _own(self) -> slice:
        """The parts of a chunk that form this rank's shard, one for each rank of its rail."""
        num_nodes = self.plan.world.num_nodes
        return slice(self._place.local_rank * num_nodes, (self._place.local_rank + 1) * num_nodes)

    def _chunk(self, parts: list[slice], slot: int) -> _ScatterChunk:
        """Return the chunk of these parts of the source; its shard is in that slot during the ring."""
        layout, own = Layout([part.stop - part.start for part in parts]), self._own
        first, *_, last = layout.offsets[own.start : own.stop + 1]
        members = [offset - first for offset in layout.offsets[own.start : own.stop + 1]]
        begin = self.plan.bounds[self._executor.hierarchy.rank]
        mine = parts[own][self._place.node_index]
        shard = self._slots[slot, : last - first]
        return _ScatterChunk(
            parts,
            layout.offsets[:: self.plan.world.num_nodes],
            SegmentCache(partial(layout.segments, longest=max(layout.count, 1))),
            members,
            shard,
            self._ring(slot, shard, members),
            slice(mine.start - begin, mine.stop - begin),
        )

    def _ring(self, slot: int, shard: Array, members: list[int]) -> Operation | None:
        """Return the ring that reduce-scatters a shard in that slot; chunks with equal bounds share it."""
        key = slot, *members
        if self._crosses and key not in self._rings:
            rail = self._executor.rails[self._place.local_rank]
            self._rings[key] = rail.reduce_scatter(shard, members, self._op)
        return self._rings.get(key)

    def _sum_inside(self, chunk: _ScatterChunk, source: Array, shard: Array) -> Steps:
        """Sum this rank's shard over the ranks of the node."""
        started, own = time.perf_counter(), self._own
        addends = [source[part] for part in chunk.parts]
        own_targets = [shard[first:last] for first, last in pairwise(chunk.members)]
        if self.plan.world.num_shards == 1:
            for addend, target in zip(addends, own_targets, strict=True):
                np.copyto(target, addend)
                yield WORKED
            self._record("copy in", "intra", started, shard)
            return
        empty = shard[:0]
        targets = [empty] * own.start + own_targets + [empty] * (len(addends) - own.stop)
        arrays = FlatArrays(addends, targets, chunk.shards[-1], chunk.segments)
        yield from self._executor.direct_reduce_scatter(chunk.shards, arrays, self._fold)
        self._record("intra reduce_scatter", "intra", started, shard)

    def _run_ring(self, chunk: _ScatterChunk) -> Steps:
        """Reduce-scatter the shard between the ranks of this rank's rail."""
        started = time.perf_counter()
        assert chunk.ring is not None, "there is no ring on a single node"
        yield from chunk.ring.run()
        rail = f"rail {self._place.local_rank}"
        self._record(f"inter reduce_scatter {rail}", f"inter {rail}", started, chunk.shard)

    def _copy_out(self, chunk: _ScatterChunk, target: Array) -> Steps:
        """Write this rank's part to the target."""
        started = time.perf_counter()
        first, last = chunk.members[self._place.node_index : self._place.node_index + 2]
        part, own_target = chunk.shard[first:last], target[chunk.target]
        if self._divisor > 1:
            divide(part, self._divisor, out=own_target)
        else:
            np.copyto(own_target, part)
        yield WORKED
        self._record("copy out", "intra", started, part)

    def _record(self, name: str, lane: str, started: float, array: Array) -> None:
        if self._executor.timeline.enabled:
            self._executor.timeline.record(name, lane, started, array.nbytes)


@dataclass(frozen=True)
class _ScatterChunk:
    """Some elements of each rank's part of an array.

    Attributes
    ----------
    parts : list of slice
        Their elements in the source, in the order of the plan.
    shards : list of int
        Bounds of the shards of the ranks of the node, in the chunk.
    segments : SegmentCache
        Segments of ranges of the chunk.
    members : list of int
        Bounds of the parts of the ranks of this rank's rail, in its shard.
    shard : ndarray
        Memory of this rank's shard during the ring; empty on one node.
    ring : Operation or None
        Reduce-scatters the shard between nodes; None on one node.
    target : slice
        This rank's elements of the chunk, in its part.
    """

    parts: list[slice]
    shards: list[int]
    segments: SegmentCache
    members: list[int]
    shard: Array
    ring: Operation | None
    target: slice
