"""A reduce-scatter with its memory and operations bound: each rank gets its part, and no more is moved than that takes.

Inside a node each rank sums its shard over the arrays of all, by way of the shared memory; the ranks of a rail then divide
their shard by a ring. On several nodes one chunk is in the ring while the next ones are summed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from mpistrat.algorithms.reduce_scatter import ScatterPlan
from mpistrat.arrays import Array
from mpistrat.execution.bound_plan import overlap
from mpistrat.execution.executor import Executor
from mpistrat.packing.layout import Layout
from mpistrat.reduction import Fold, ReduceOp, divide
from mpistrat.transports.base import Operation
from mpistrat.transports.flat_arrays import Cuts, FlatArrays
from mpistrat.transports.steps import WORKED, Steps

__all__ = ["BoundScatter"]


class BoundScatter:
    """A plan of a reduce-scatter with its memory, ready to run any number of times. Making one is a collective call.

    Parameters
    ----------
    executor : Executor
        Of host memory; one that `scatters`.
    plan : ScatterPlan
        What to do, the same on all ranks.
    dtype : dtype
        Of the arrays.
    op : ReduceOp
        How to combine.

    Attributes
    ----------
    flat_count : int
        0: it is not an all-reduce of MPI.
    begins_with_meeting : bool
        Whether ranks of a node meet in shared memory before anything else, if they share some.
    is_compared : bool
        Whether ranks in another call cannot take part: meetings in shared memory compare calls, and messages carry them.
    """

    flat_count, begins_with_meeting, is_compared = 0, True, True

    def __init__(self, executor: Executor, plan: ScatterPlan, dtype: np.dtype[Any], op: ReduceOp) -> None:
        executor.reserve_exchange()
        executor.largest_pack_bytes = max(executor.largest_pack_bytes, plan.bounds[-1] * dtype.itemsize)
        self.plan, self._executor, self._op = plan, executor, op
        self._place, self._crosses = executor.hierarchy.place, plan.world.num_nodes > 1
        self._divisor = plan.world.size if op is ReduceOp.MEAN else 1
        self._fold = Fold(op, dtype, 1 if self._crosses else self._divisor)
        chunks = plan.chunks()
        longest = max(sum(part.stop - part.start for part in parts[self._own]) for parts in chunks) if self._crosses else 0
        self._slots = np.empty((plan.depth, longest), dtype)
        self._rings: dict[tuple[int, ...], Operation] = {}
        self._chunks = [self._chunk(parts, index % plan.depth) for index, parts in enumerate(chunks)]

    @property
    def generation(self) -> int:
        """Always the present one: no scratch memory of the executor is bound."""
        return self._executor.generation

    @property
    def scratch_bytes(self) -> int:
        """What it holds beside the executor's scratch memory: the shards that are in a ring."""
        return self._slots.nbytes

    def run(self, sources: Sequence[Array], targets: Sequence[Array]) -> Steps:
        """Return the steps that combine one source, and write this rank's part to one target. A collective call.

        Both are C-contiguous, of the dtype that was bound, and share no memory.
        """
        source, target, chunks = sources[0].reshape(-1), targets[0].reshape(-1), self._chunks
        if not self._crosses:
            return self._sum_inside(chunks[0], source, target)

        def head(index: int) -> Steps:
            return self._sum_inside(chunks[index], source, chunks[index].shard)

        def middle(index: int) -> Steps:
            return self._divide(chunks[index])

        def tail(index: int) -> Steps:
            return self._copy_out(chunks[index], target)

        # rings of one rail follow each other on its channel
        return overlap(len(chunks), self.plan.depth, 1, head, middle, tail)

    @property
    def _own(self) -> slice:
        """Which parts of a chunk are of this rank's shard, one for each rank of its rail."""
        num_nodes = self.plan.world.num_nodes
        return slice(self._place.local_rank * num_nodes, (self._place.local_rank + 1) * num_nodes)

    def _chunk(self, parts: list[slice], slot: int) -> _ScatterChunk:
        """Return a chunk of these parts of the source, which is in that slot while the ring divides it."""
        layout, own = Layout([part.stop - part.start for part in parts]), self._own
        first, *_, last = layout.offsets[own.start : own.stop + 1]
        members = [offset - first for offset in layout.offsets[own.start : own.stop + 1]]
        begin = self.plan.bounds[self._executor.hierarchy.rank]
        mine = parts[own][self._place.node_index]
        shard = self._slots[slot, : last - first]
        return _ScatterChunk(
            parts,
            layout.offsets[:: self.plan.world.num_nodes],
            Cuts(partial(layout.pieces, longest=max(layout.count, 1))),
            members,
            shard,
            self._ring(slot, shard, members),
            slice(mine.start - begin, mine.stop - begin),
        )

    def _ring(self, slot: int, shard: Array, members: list[int]) -> Operation | None:
        """Return what divides a shard in that slot between the ranks of its rail; chunks that are divided alike share it."""
        key = slot, *members
        if self._crosses and key not in self._rings:
            rail = self._executor.rails[self._place.local_rank]
            self._rings[key] = rail.reduce_scatter(shard, members, self._op)
        return self._rings.get(key)

    def _sum_inside(self, chunk: _ScatterChunk, source: Array, shard: Array) -> Steps:
        """Write to this rank's shard what the ranks of the node add up to."""
        started, own = time.perf_counter(), self._own
        addends = [source[part] for part in chunk.parts]
        landings = [shard[first:last] for first, last in pairwise(chunk.members)]
        if self.plan.world.num_shards == 1:
            for addend, landing in zip(addends, landings, strict=True):
                np.copyto(landing, addend)
                yield WORKED
            self._record("copy in", "intra", started, shard)
            return
        nothing = shard[:0]
        targets = [nothing] * own.start + landings + [nothing] * (len(addends) - own.stop)
        arrays = FlatArrays(addends, targets, chunk.shards[-1], chunk.cuts)
        yield from self._executor.scatter_between(chunk.shards, arrays, self._fold)
        self._record("intra reduce_scatter", "intra", started, shard)

    def _divide(self, chunk: _ScatterChunk) -> Steps:
        """Combine the shards of this rank's rail; each of its ranks gets its part."""
        started = time.perf_counter()
        assert chunk.ring is not None, "on one node nothing crosses nodes"
        yield from chunk.ring.run()
        rail = f"rail {self._place.local_rank}"
        self._record(f"inter reduce_scatter {rail}", f"inter {rail}", started, chunk.shard)

    def _copy_out(self, chunk: _ScatterChunk, target: Array) -> Steps:
        """Write this rank's part to the target."""
        started = time.perf_counter()
        first, last = chunk.members[self._place.node_index : self._place.node_index + 2]
        part, landing = chunk.shard[first:last], target[chunk.target]
        if self._divisor > 1:
            divide(part, self._divisor, out=landing)
        else:
            np.copyto(landing, part)
        yield WORKED
        self._record("copy out", "intra", started, part)

    def _record(self, name: str, lane: str, started: float, array: Array) -> None:
        if self._executor.timeline.enabled:
            self._executor.timeline.record(name, lane, started, array.nbytes)


@dataclass(frozen=True)
class _ScatterChunk:
    """Some elements of each part of an array.

    Attributes
    ----------
    parts : list of slice
        Where they lie in the source, in the order of the plan.
    shards, members : list of int
        Where the shard of each rank of the node begins in the chunk, and in this rank's shard the part of each rank of its
        rail; and where the last one ends.
    cuts : Cuts
        What lies where in the chunk.
    shard : ndarray
        Where this rank's shard is while it is divided: empty on one node.
    ring : Operation or None
        What divides it; None on one node.
    target : slice
        Where this rank's elements go in its part.
    """

    parts: list[slice]
    shards: list[int]
    cuts: Cuts
    members: list[int]
    shard: Array
    ring: Operation | None
    target: slice
