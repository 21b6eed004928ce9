"""Plan: a collective as data, made of phases; a phase is a verb in the groups of a scope.

A plan runs its phases on each chunk of the buffer, in order. If there are several chunks, at most `depth` of them are in flight
at a time, so that the phases between nodes overlap those inside a node.

The result of each verb on a chunk of ``num_shards`` equal shards (see `topology.world.World`):

================  =======  ==================================================================================
verb              scope    afterwards
================  =======  ==================================================================================
ALL_REDUCE        WORLD    every rank holds the sum over all ranks
REDUCE_SCATTER    INTRA    each rank holds, in the shards it owns, the sum over its node
ALL_REDUCE        INTER    each rank holds, in the shards it owns, the sum over the owners on all nodes
ALL_GATHER        INTRA    every rank holds every shard as its owner on this node had it
ALL_REDUCE        INTRA    every rank holds the sum over its node, not in the buffer: the last phase only
================  =======  ==================================================================================

A reduce-scatter ends with REDUCE_SCATTER in INTER: each rank holds its part of the shard that it owns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import pairwise

from mpistrat.text import format_bytes, format_count, format_table
from mpistrat.topology.world import World


class Scope(str, Enum):
    """The groups that a phase runs in."""

    WORLD = "world"
    INTRA = "intra"
    INTER = "inter"


class Verb(str, Enum):
    """What a phase does, by MPI's names."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"


@dataclass(frozen=True)
class Phase:
    """One step of a plan."""

    verb: Verb
    scope: Scope

    def __str__(self) -> str:
        return f"{self.scope.value} {self.verb.value}"


@dataclass(frozen=True)
class Plan:
    """A collective on a buffer of `count` elements, as phases on chunks."""

    algorithm: str  # the planner that made it
    world: World
    count: int  # elements of the whole buffer
    itemsize: int  # bytes of one element
    phases: tuple[Phase, ...]  # run on each chunk, in this order
    chunk_count: int  # elements of the largest chunk, a multiple of `world.num_shards`, to which chunks are padded
    depth: int = 1  # chunks in flight at a time; 1: one after the other
    in_order: bool = False  # whether addends are combined in the order of the ranks: the deterministic mode
    wire_itemsize: int = 0  # bytes of one element between nodes; 0: `itemsize`. Not for phases of scope WORLD
    bounds: tuple[int, ...] = ()
    """Of a reduce-scatter: rank r gets elements ``bounds[r]:bounds[r + 1]``, and a chunk has equally many of each part, see
    `parts`. Empty: an all-reduce."""
    is_direct: bool = False  # whether transports combine the caller's arrays where they lie, without a buffer

    @cached_property
    def scopes(self) -> frozenset[Scope]:
        """The scopes of all phases."""
        return frozenset(phase.scope for phase in self.phases)

    def in_one_phase(self, scope: Scope, is_direct: bool = False) -> Plan:
        """Return the plan of one all-reduce in a scope, of the whole buffer at once; of nothing if there is nothing to do."""
        phases = (Phase(Verb.ALL_REDUCE, scope),) if self.phases else ()
        whole = self.padded(max(self.count, 1))
        return replace(self, phases=phases, chunk_count=whole, depth=1, is_direct=is_direct)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole buffer, without padding."""
        return self.count * self.itemsize

    @property
    def num_chunks(self) -> int:
        """Number of chunks; 0 for an empty buffer."""
        return len(self.parts() if self.bounds else self.chunks)

    def padded(self, count: int) -> int:
        """Return `count` rounded up to a multiple of the number of shards."""
        return padded(self.world, count)

    @cached_property
    def chunks(self) -> list[tuple[int, int]]:
        """(First element, elements) of each chunk of an all-reduce, without padding."""
        step = self.chunk_count
        return [(start, min(step, self.count - start)) for start in range(0, self.count, step)]

    @property
    def order(self) -> tuple[int, ...]:
        """In which order parts follow each other in a chunk of a reduce-scatter: rail after rail.

        Shard s of the phase inside nodes is then what the ranks of rail s divide between them in the other one.
        """
        return tuple(rank for rail in self.world.rails for rank in rail)

    def parts(self) -> list[list[slice]]:
        """Return, for each chunk of a reduce-scatter, which elements of the buffer it has: of each part, in `order`."""
        step, parts = self.chunk_count // self.world.size, list(pairwise(self.bounds))
        longest = max(stop - start for start, stop in parts)
        in_order = [parts[rank] for rank in self.order]
        return [
            [slice(min(start + first, stop), min(start + first + step, stop)) for start, stop in in_order]
            for first in range(0, longest, step)
        ]

    def __str__(self) -> str:
        steps = " -> ".join(map(str, self.phases)) or "nothing to do"
        chunked = f", {self.num_chunks} chunks, {self.depth} at a time" if self.num_chunks > 1 else ""
        return f"{self.algorithm}: {steps} ({self.num_bytes} bytes{chunked})"


def padded(world: World, count: int) -> int:
    """Return `count` rounded up to a multiple of the number of shards."""
    return _ceil_div(count, world.num_shards) * world.num_shards


def chunk_elements(world: World, count: int, itemsize: int, max_bytes: int) -> int:
    """Return the elements of a chunk, so that the buffer has as few chunks as possible, of about equal length.

    They are a multiple of the number of shards, and have at most `max_bytes`, unless one element per shard is more.
    """
    # rounded down: slots, of sizes that are powers of two, hold the largest without one byte more
    largest = max(max_bytes // itemsize // world.num_shards, 1) * world.num_shards
    return padded(world, max(_ceil_div(count, max(_ceil_div(count, largest), 1)), 1))


def _ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


def phase_bytes(plan: Plan, phase: Phase) -> tuple[int, int]:
    """Return, over the whole buffer, the bytes that the busiest rank sends, and those that leave each node: at least these."""
    sent, link = _shares(plan.world, phase)
    itemsize = plan.wire_itemsize if phase.scope is Scope.INTER and plan.wire_itemsize else plan.itemsize
    return round(sent * plan.count * itemsize), round(link * plan.count * itemsize)


def _shares(world: World, phase: Phase) -> tuple[float, float]:
    """Return the bytes that the busiest rank sends, and those that leave each node, for each byte of the buffer."""
    ranks, between = world.num_shards, _ring(world.num_nodes)
    if phase.scope is Scope.WORLD:
        return _ring(world.size), between
    if phase.scope is Scope.INTER:  # the busiest rank, on the smallest node, owns the most shards
        return between * -(-ranks // min(world.local_sizes)) / ranks, between
    return _ring(ranks) if phase.verb is Verb.ALL_REDUCE else (ranks - 1) / ranks, 0


def _ring(members: int) -> float:
    """Return the bytes that each member of a bandwidth-optimal all-reduce sends, for each byte of the buffer."""
    return 2 * (members - 1) / members


def chunks_text(plan: Plan) -> str:
    """Return the number of elements of a plan's buffer, and how they are cut into chunks."""
    elements = format_count(plan.count, "element")
    if plan.num_chunks < 2:
        return elements
    chunk_bytes = format_bytes(plan.chunk_count * plan.itemsize)
    return f"{elements} in {plan.num_chunks} chunks of {chunk_bytes}, {plan.depth} at a time"


def phases_text(plan: Plan) -> str:
    """Return the phases of a plan, with bytes per rank and per link, as a table."""
    rows = [("phase", "sent per rank", "per node link")]
    for phase in plan.phases:
        sent, link = map(format_bytes, phase_bytes(plan, phase))
        # which algorithm MPI uses is not known, so the minimum is shown
        least = "at least " if phase.scope is Scope.WORLD and plan.world.num_nodes > 1 else ""
        rows.append((str(phase), sent, least + link))
    return format_table(rows, right=(1, 2))
