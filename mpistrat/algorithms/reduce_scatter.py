"""Scatter: how a reduce-scatter over nodes of equal size divides an array, and in which chunks it moves it. Pure.

Phases
    ``intra reduce_scatter -> inter reduce_scatter``
Communication steps
    n-1 between nodes by a ring per rail for each chunk; a few synchronisations inside a node.
Bytes on the wire per node
    (n-1)/n·S, the least possible, and half of what an all-reduce needs; shared out over all ranks of the node.
Good when
    the array is so large that its bytes count more than the number of steps. Declines small arrays, a single rank, and nodes of
    different sizes, some of whose ranks own several shards: there an all-reduce is made, and each rank takes its part of it.
Source
    Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH. Int. J. High Performance
    Computing Applications 19(1), 2005, for the two halves of an all-reduce; the hierarchy is that of `hierarchical`.

n: nodes, S: bytes of the array.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from mpistrat.algorithms.chunks import SCATTER_FROM_BYTES, pipeline_rule
from mpistrat.algorithms.plan import Phase, Scope, Verb
from mpistrat.errors import Unsuitable
from mpistrat.topology.world import World

__all__ = ["ScatterPlan", "part_bounds", "plan"]


@dataclass(frozen=True)
class ScatterPlan:
    """A reduce-scatter of an array whose parts, one per rank, lie one behind the other.

    Attributes
    ----------
    world : World
        Whom it is for: nodes of one size.
    bounds : tuple of int
        Rank r gets elements ``bounds[r]:bounds[r + 1]`` of the combination.
    chunk_count : int
        Elements of each part in a chunk.
    depth : int
        Chunks under way at a time.
    """

    world: World
    bounds: tuple[int, ...]
    chunk_count: int
    depth: int = 1

    algorithm = "scatter"

    @property
    def phases(self) -> tuple[Phase, ...]:
        """What is done with each chunk."""
        inside = (Phase(Verb.REDUCE_SCATTER, Scope.INTRA),) if self.world.num_shards > 1 else ()
        return (*inside, Phase(Verb.REDUCE_SCATTER, Scope.INTER)) if self.world.num_nodes > 1 else inside

    @property
    def order(self) -> tuple[int, ...]:
        """In which order the parts of a chunk follow each other, by the ranks that get them: rail after rail.

        Shard s of the first phase is then what the ranks of rail s divide between them in the second.
        """
        return tuple(rank for rail in self.world.rails for rank in rail)

    def chunks(self) -> list[list[slice]]:
        """Return, for each chunk, which elements of the array it has: of each part, in `order`."""
        parts, order = list(pairwise(self.bounds)), self.order
        longest = max(stop - start for start, stop in parts)
        return [[self._of(*parts[rank], first) for rank in order] for first in range(0, longest, self.chunk_count)]

    def _of(self, start: int, stop: int, first: int) -> slice:
        """Return what the chunk that begins with element `first` of each part has of one part."""
        return slice(min(start + first, stop), min(start + first + self.chunk_count, stop))

    def __str__(self) -> str:
        num_chunks = len(self.chunks())
        chunked = f" ({num_chunks} chunks, {self.depth} at a time)" if num_chunks > 1 else ""
        return f"{self.algorithm}: {' -> '.join(map(str, self.phases))}{chunked}"


def plan(world: World, bounds: Sequence[int], itemsize: int, algorithm: str = "auto", chunk_bytes: int = 0) -> ScatterPlan:
    """Plan a reduce-scatter.

    Parameters
    ----------
    world : World
        Whom the plan is for.
    bounds : sequence of int
        Rank r gets elements ``bounds[r]:bounds[r + 1]``.
    itemsize : int
        Bytes of one element.
    algorithm : str
        That of an all-reduce that is asked for. Those whose first phase is a reduce-scatter take arrays of any size; ``auto``
        declines small ones, the others all.
    chunk_bytes : int
        Of a chunk between nodes, in bytes; 0: as many as the largest chunk of a pipelined all-reduce.

    Raises
    ------
    Unsuitable
        If an all-reduce is to be made instead.
    """
    if not world.is_uniform or world.size == 1:
        raise Unsuitable("because nodes have different numbers of ranks, or there is one rank")
    if algorithm not in ("auto", "hierarchical", "pipelined"):
        raise Unsuitable(f"because algorithm {algorithm!r} was asked for, which divides nothing between ranks")
    if not bounds[-1] or (algorithm == "auto" and bounds[-1] * itemsize < SCATTER_FROM_BYTES):
        raise Unsuitable("because the array is so small that steps count more than bytes")
    longest = max(stop - start for start, stop in pairwise(bounds))
    if world.num_nodes == 1:  # nothing crosses nodes meanwhile
        return ScatterPlan(world, tuple(bounds), longest)
    rule = pipeline_rule(world)
    largest = max((chunk_bytes or rule.max_bytes) // itemsize // world.size, 1)
    num_chunks = -(-longest // largest)
    return ScatterPlan(world, tuple(bounds), -(-longest // num_chunks), min(rule.depth, num_chunks))


def part_bounds(extent: int, num_parts: int) -> list[int]:
    """Return where parts begin that are as equal as can be, the first ones longer by one; and where the last one ends."""
    least, longer = divmod(extent, num_parts)
    return [part * least + min(part, longer) for part in range(num_parts + 1)]
