"""The α-β-γ cost model: predicts the time of a plan from latency, bytes over links and bytes read and written in memory.

It is one of host memory: for GPUs nobody has measured its constants.

A phase costs its call, its steps (α), and the longer of two times that overlap: its bytes over the links of the node (β), which
all ranks of the node share, and the bytes that the busiest rank reads and writes in memory, sums included (γ). In a plan with
depth > 1 the phases inside a node overlap those between nodes.

Sources: Hockney: The communication challenge for MPP: Intel Paragon and Meiko CS-2. Parallel Computing 20(3), 1994 (α-β).
Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH. IJHPCA 19(1), 2005 (γ, and the
costs of rings and recursive doubling).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from mpistrat.algorithms.plan import Phase, Plan, Scope, Verb
from mpistrat.topology.world import World


@dataclass(frozen=True)
class Correction:
    """Measured time over predicted time of an algorithm on one world, by size."""

    algorithm: str  # a name in `PLANNERS`
    # bytes and ratio, in increasing order; between them it is interpolated over the logarithm of the size, outside constant
    points: tuple[tuple[int, float], ...]

    def ratio(self, num_bytes: int) -> float:
        """Return measured time over predicted time at a size."""
        index = bisect_left(self.points, (num_bytes, 0.0))
        if index in (0, len(self.points)):
            return self.points[min(index, len(self.points) - 1)][1]
        (lower, before), (upper, after) = self.points[index - 1 : index + 1]
        share = (_logarithm(num_bytes) - _logarithm(lower)) / (_logarithm(upper) - _logarithm(lower))
        return before + (after - before) * share


@dataclass(frozen=True)
class CostModel:
    """The cost of a call, a step and a byte."""

    call_seconds: float = 20e-6  # overhead of each phase of each chunk; or of one that is one MPI call over all ranks
    flat_call_seconds: float = 20e-6
    intra_step_seconds: float = 1e-6  # α: a synchronisation of two ranks inside a node, and a message between nodes
    inter_step_seconds: float = 20e-6
    link_bytes_per_second: float = 1.2e9  # 1/β: bandwidth of the link of a node, in each direction
    link_efficiency: float = 0.95  # the fraction of the bandwidth that a ring along a rail reaches
    memory_bytes_per_second: float = 20e9  # 1/γ: bytes that one rank reads and writes, for chunks that do not stay in the cache
    cache_bytes_per_second: float = 30e9
    cache_bytes: int = 2**21
    # fractions that MPI's own all-reduce reaches: of the link on two nodes of one rank; elsewhere, where MPI's ring waits, or
    # sends bytes more than once; and of cache and memory, where it copies less than the shared window requires
    flat_link_efficiency: float = 0.9
    flat_crowded_link_efficiency: float = 0.65
    flat_cache_efficiency: float = 2.0
    flat_memory_efficiency: float = 0.9
    corrections: tuple[Correction, ...] = ()  # for algorithms that were measured on this world
    source: str = "defaults"  # of the constants

    def correction(self, algorithm: str, num_bytes: int) -> float:
        """Return measured time over predicted time of an algorithm; 1 if it was not measured."""
        ratios = [correction.ratio(num_bytes) for correction in self.corrections if correction.algorithm == algorithm]
        return ratios[0] if ratios else 1.0


DEFAULT = CostModel()


@dataclass(frozen=True)
class _Load:
    """Bytes that a phase sends, moves over the link and moves in memory, for each byte of its buffer; and its steps."""

    sent: float
    link: float
    memory: float
    intra_steps: int = 0
    inter_steps: int = 0


def phase_bytes(plan: Plan, phase: Phase) -> int:
    """Return the bytes that the busiest rank sends in a phase, over the whole buffer."""
    return round(_load(plan.world, phase).sent * plan.num_bytes * _wire_ratio(plan, phase))


def link_bytes(plan: Plan, phase: Phase) -> int:
    """Return the bytes that leave each node in a phase, over the whole buffer; for a flat phase the minimum."""
    return round(_load(plan.world, phase).link * plan.num_bytes * _wire_ratio(plan, phase))


def phase_seconds(plan: Plan, phase: Phase, model: CostModel = DEFAULT) -> float:
    """Return the predicted time of a phase, for all chunks one after the other, with the correction of its algorithm."""
    if plan.count == 0:
        return 0.0
    load, chunk_bytes = _load(plan.world, phase), plan.num_bytes / plan.num_chunks
    link_rate, memory_rate = _rates(plan, phase, chunk_bytes, model)
    steps = load.intra_steps * model.intra_step_seconds + load.inter_steps * model.inter_step_seconds
    moving = max(load.link * chunk_bytes * _wire_ratio(plan, phase) / link_rate, load.memory * chunk_bytes / memory_rate)
    call_seconds = model.flat_call_seconds if phase.scope is Scope.WORLD else model.call_seconds
    return plan.num_chunks * (call_seconds + steps + moving) * model.correction(plan.algorithm, plan.num_bytes)


def predict_seconds(plan: Plan, model: CostModel = DEFAULT) -> float:
    """Return the predicted time of a plan.

    If chunks overlap, the slower of the two lanes (inside a node, between nodes) is always busy, and the other one adds its
    time for one chunk: to fill the pipeline and to drain it.
    """
    lanes = {True: 0.0, False: 0.0}
    for phase in plan.phases:
        lanes[phase.scope is Scope.INTRA] += phase_seconds(plan, phase, model)
    busier, other = max(lanes.values()), min(lanes.values())
    return busier + (other if plan.depth == 1 else other / max(plan.num_chunks, 1))


def _wire_ratio(plan: Plan, phase: Phase) -> float:
    """Return the bytes that a phase sends for each byte of the buffer: less than 1 if values are cast between nodes."""
    crosses = phase.scope is Scope.INTER
    return plan.wire_itemsize / plan.itemsize if crosses and plan.wire_itemsize else 1.0


def _rates(plan: Plan, phase: Phase, chunk_bytes: float, model: CostModel) -> tuple[float, float]:
    """Return the bytes per second of the link of a node and of the memory of a rank."""
    world, is_cached = plan.world, chunk_bytes <= model.cache_bytes
    memory = model.cache_bytes_per_second if is_cached else model.memory_bytes_per_second
    if phase.scope is not Scope.WORLD:
        return model.link_bytes_per_second * model.link_efficiency, memory
    crowded = world.num_nodes > 2 or world.num_shards > 1
    efficiency = model.flat_crowded_link_efficiency if crowded else model.flat_link_efficiency
    share = model.flat_cache_efficiency if is_cached else model.flat_memory_efficiency
    return model.link_bytes_per_second * efficiency, memory * share


# Bytes in memory: a copy reads and writes (2); adding an operand to a sum reads two and writes one (3). The ranks of a node
# work through shared memory: each copies its buffer in, sums its shard over all ranks, and copies the result out.


def _world_all_reduce(world: World) -> _Load:
    # a rank sends and receives 2(l-1)/l of the buffer, which is copied in and out (2 + 2), and adds half of it (3)
    return _Load(
        sent=_ring(world.size),
        link=_ring(world.num_nodes),
        memory=_ring(world.num_shards) * (2 + 2 + 3 / 2),
        intra_steps=_doublings(world.num_shards),
        inter_steps=_doublings(world.num_nodes),
    )


def _intra_reduce_scatter(world: World) -> _Load:
    ranks = world.num_shards
    return _Load((ranks - 1) / ranks, 0, memory=2 + 1 + 1 / ranks, intra_steps=2 * _doublings(ranks))


def _intra_all_gather(world: World) -> _Load:
    ranks = world.num_shards
    return _Load((ranks - 1) / ranks, 0, memory=2, intra_steps=_doublings(ranks))


def _intra_all_reduce(world: World) -> _Load:
    # two ranks: copied in, and summed directly into the results; reads hit the cache, and count half (1/2 of 4.5)
    ranks = world.num_shards
    return _Load(1, 0, memory=9 / 4 * ranks / 2, intra_steps=2 * _doublings(ranks))


def _inter_all_reduce(world: World) -> _Load:
    nodes, share = world.num_nodes, _most_shards(world) / world.num_shards  # of the buffer, that the busiest rank works on
    return _Load(_ring(nodes) * share, _ring(nodes), memory=_ring(nodes) * share * 3 / 2, inter_steps=2 * (nodes - 1))


def _most_shards(world: World) -> int:
    """Return the shards that a rank owns at most: one of the smallest node."""
    return -(-world.num_shards // min(world.local_sizes))


def _ring(members: int) -> float:
    """Return the bytes that each member of a bandwidth-optimal all-reduce sends, for each byte of the buffer."""
    return 2 * (members - 1) / members


def _logarithm(number: int) -> float:
    """Return about log2 of a positive number: exact for powers of two, linear between them, the same on every machine."""
    exponent = number.bit_length() - 1
    return exponent + number / (1 << exponent) - 1


def _doublings(members: int) -> int:
    """Return ceil(log2 members), in integers so that every rank gets the same."""
    return (members - 1).bit_length()


_LOADS: dict[tuple[Verb, Scope], Callable[[World], _Load]] = {
    (Verb.ALL_REDUCE, Scope.WORLD): _world_all_reduce,
    (Verb.REDUCE_SCATTER, Scope.INTRA): _intra_reduce_scatter,
    (Verb.ALL_GATHER, Scope.INTRA): _intra_all_gather,
    (Verb.ALL_REDUCE, Scope.INTRA): _intra_all_reduce,
    (Verb.ALL_REDUCE, Scope.INTER): _inter_all_reduce,
}


def _load(world: World, phase: Phase) -> _Load:
    return _LOADS[phase.verb, phase.scope](world)
