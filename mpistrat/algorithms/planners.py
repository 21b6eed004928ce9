"""The planners: an all-reduce or a reduce-scatter as phases on chunks; and which of them is taken, and why.

In what follows, n: nodes, p: ranks, S: bytes of the buffer; 2(n-1)/n·S is the least that an all-reduce sends over the link of a
node.

Invariant: plans and choices depend on nothing but the arguments, so that all ranks make the same ones without communicating.
Every size limit of the planners is here; to tune an algorithm, change one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf

import numpy as np

from mpistrat.algorithms.plan import Phase, Plan, Scope, Verb, chunk_elements
from mpistrat.text import format_bytes, format_seconds, format_table
from mpistrat.topology.world import World

KIB, MIB = 2**10, 2**20

SCRATCH_BYTES = 64 * MIB
"""The largest chunk of a plan without overlapping chunks: it bounds the scratch memory of a rank."""

DEVICE_CHUNK_BYTES = 16 * MIB
"""The chunk of a hierarchical plan on GPUs: larger than on CPUs, because each chunk costs kernel launches. Not measured."""

SCATTER_FROM_BYTES = 512 * KIB
"""The smallest array that is reduced and scattered: below, an all-reduce takes fewer steps, and each rank its part of that."""

CHUNK_BYTES = MIB
"""The largest overlapping chunk, unless the caller sets a size: a few of them stay in the cache.

On 2x2 virtual nodes 16 MiB take 9.3 ms, and 10.2 in chunks of 2 MiB; at 1 Gbit/s between hosts both take as long.
"""

SCATTER_CHUNK_BYTES = 2 * MIB
"""A chunk of a reduce-scatter between nodes, unless the caller sets a size."""

DEPTH = 3
"""How many overlapping chunks are in flight at a time."""


def hierarchical_from_bytes(world: World) -> int:
    """Return from which size on `hierarchical` is taken where nothing was measured: a ring has a step for each node."""
    nodes = world.num_nodes
    if nodes == 1:
        return 64 * KIB if world.size == 2 else 2 * MIB
    if world.num_shards == 1:
        return 448 * KIB if nodes == 2 else 48 * KIB * (nodes - 1)
    return max(288 * KIB, 64 * KIB * nodes)


def chunks_from_bytes(world: World) -> float:
    """Return from which size on chunks overlap: each has all the steps, which take too long for that with many nodes.

    Where each node has one rank, only copies overlap: at 10 Gbit/s between two hosts 64 MiB take 75 ms, and 90 in one piece.
    """
    nodes = world.num_nodes
    if nodes == 1:
        return 2 * MIB
    if world.num_shards == 1:
        return 8 * MIB if nodes <= 4 else inf
    return 128 * KIB * nodes**2 if nodes <= 8 else inf


def flat(world: World, count: int, itemsize: int, chunk_bytes: int = 0) -> Plan:
    """Plan one all-reduce over all ranks: small buffers by shared memory and the leaders of nodes, others by MPI.

    Phases
        ``world all_reduce``; none with a single rank
    Communication steps
        On one node, none up to 512 KiB, and with two ranks up to 4 MiB.
        On up to 4 nodes, one exchange between the leaders up to 32 KiB (`transports.small`).
        Else as MPI chooses: ceil(log2 p) by recursive doubling for small buffers, up to 2(p-1) by a ring for large ones.
    Bytes on the wire per node
        At least 2(n-1)/n·S. MPI libraries that send for each rank of a node separately send several times that.
    Good when
        the buffer is small, so that latency dominates; or there is one rank per node.
    Source
        Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH. Int. J. High Performance
        Computing Applications 19(1), 2005.
    """
    phases = (Phase(Verb.ALL_REDUCE, Scope.WORLD),) if world.size > 1 else ()
    return Plan("flat", world, count, itemsize, phases, chunk_elements(world, count, itemsize, SCRATCH_BYTES))


def hierarchical(world: World, count: int, itemsize: int, chunk_bytes: int = 0) -> Plan:
    """Plan a reduce-scatter in each node, all-reduces along the rails, and an all-gather in each node.

    Large buffers, and all with `chunk_bytes`, are cut into chunks that overlap: one is between nodes while others are inside.

    Phases
        ``intra reduce_scatter -> inter all_reduce -> intra all_gather``; on one node without ``inter``, with one rank per node
        without ``intra``. Two ranks on one node both sum the whole buffer (``intra all_reduce``): one pass over memory less.
    Communication steps
        For each chunk, 2(n-1) between nodes, by a ring along each rail; a few synchronisations inside a node.
    Bytes on the wire per node
        2(n-1)/n·S, divided between all ranks of the node.
    Good when
        nodes have several ranks and the buffer is not small: every rank sums a shard. Nodes may have different numbers of
        ranks: on a smaller one a rank owns several shards. Chunks are for large buffers; they also stay in the cache.
    Source
        Cho, Finkler, Serrano, Kung, Hunter: BlueConnect: Decomposing All-Reduce for Deep Learning on Heterogeneous Network
        Hierarchy. MLSys 2019. Mikami, Suganuma, U-chupala, Tanaka, Kageyama: Massively Distributed SGD: ImageNet/ResNet-50
        Training in a Flash. arXiv:1811.05233, 2018. Chunks: Luo, Wu, Bosilca, Pei, Cao, Patinyasakdikul, Zhong, Dongarra: HAN:
        a Hierarchical AutotuNed Collective Communication Framework. IEEE CLUSTER 2020.
    """
    overlaps = bool(chunk_bytes) or count * itemsize >= chunks_from_bytes(world)
    chunk_count = chunk_elements(world, count, itemsize, chunk_bytes or (CHUNK_BYTES if overlaps else SCRATCH_BYTES))
    plan = Plan("hierarchical", world, count, itemsize, _phases(world), chunk_count)
    return replace(plan, depth=max(min(DEPTH, plan.num_chunks), 1)) if overlaps else plan


def reduce_scatter(
    world: World, bounds: Sequence[int], itemsize: int, algorithm: str = "auto", chunk_bytes: int = 0
) -> Plan | None:
    """Plan a reduce-scatter over nodes of equal size; rank r gets elements ``bounds[r]:bounds[r + 1]``.

    Returns None if an all-reduce is to be made instead, of which each rank takes its part: where ranks own several shards, for
    another algorithm, and if the array is so small that steps count more than bytes.

    Phases
        ``intra reduce_scatter -> inter reduce_scatter``
    Communication steps
        n-1 between nodes by a ring per rail for each chunk; a few synchronisations inside a node.
    Bytes on the wire per node
        (n-1)/n·S, half of what an all-reduce needs; divided between all ranks of the node.
    Good when
        bytes count more than steps. ``auto`` declines small arrays, which ``hierarchical`` takes.
    Source
        Thakur, Rabenseifner, Gropp, as for `flat`: the first half of an all-reduce.
    """
    least_bytes = {"auto": SCATTER_FROM_BYTES, "hierarchical": 1}.get(algorithm, inf)
    if not world.is_uniform or world.size == 1 or bounds[-1] * itemsize < least_bytes:
        return None
    longest, depth = max(stop - start for start, stop in pairwise(bounds)), 1
    if world.num_nodes > 1:  # else nothing crosses nodes meanwhile
        num_chunks = -(-longest // max((chunk_bytes or SCATTER_CHUNK_BYTES) // itemsize // world.size, 1))
        longest, depth = -(-longest // num_chunks), min(DEPTH, num_chunks)
    scopes = [Scope.INTRA] * (world.num_shards > 1) + [Scope.INTER] * (world.num_nodes > 1)
    phases, chunk_count = tuple(Phase(Verb.REDUCE_SCATTER, scope) for scope in scopes), longest * world.size
    return Plan("hierarchical", world, bounds[-1], itemsize, phases, chunk_count, depth, bounds=tuple(bounds))


def _phases(world: World) -> tuple[Phase, ...]:
    rails = (Phase(Verb.ALL_REDUCE, Scope.INTER),) if world.num_nodes > 1 else ()
    if world.num_shards == 1:
        return rails
    if world.size == 2:
        return (Phase(Verb.ALL_REDUCE, Scope.INTRA),)
    return (Phase(Verb.REDUCE_SCATTER, Scope.INTRA), *rails, Phase(Verb.ALL_GATHER, Scope.INTRA))


PLANNERS: dict[str, Callable[[World, int, int, int], Plan]] = {"flat": flat, "hierarchical": hierarchical}
"""The planner of each algorithm: ``planner(world, count, itemsize, chunk_bytes)`` returns the plan for a buffer of `count`
elements. `chunk_bytes` is the size of every chunk, 0 if the caller asked for none."""


@dataclass(frozen=True)
class Measured:
    """What `mpistrat tune` has measured on one world: the seconds of each algorithm by bytes of the buffer; and where it is."""

    seconds: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    source: str = ""

    def predict(self, num_bytes: int) -> dict[str, float]:
        """Return the seconds of each algorithm: linear between two sizes, in proportion to the bytes beyond the largest."""
        found = {}
        for name in filter(self.seconds.get, PLANNERS):
            sizes, seconds = zip(*sorted(self.seconds[name].items()), strict=True)
            found[name] = float(np.interp(num_bytes, sizes, seconds)) * max(1.0, num_bytes / sizes[-1])
        return found


NOTHING = Measured()


@dataclass(frozen=True)
class Choice:
    """A plan, why it was chosen, and the seconds that each algorithm is predicted to take: none where nothing was measured."""

    plan: Plan
    reason: str
    seconds: Mapping[str, float] = field(default_factory=dict)


def choose(
    world: World,
    count: int,
    itemsize: int,
    algorithm: str = "auto",
    chunk_bytes: int = 0,
    measured: Measured = NOTHING,
    wire_itemsize: int = 0,
) -> Choice:
    """Choose the plan of an all-reduce of host memory: with ``auto`` of the fastest algorithm, the first of those that tie.

    `chunk_bytes` is the size of the chunks of a hierarchical plan; 0: chosen by the planner. `wire_itemsize` is the size of an
    element between nodes, if it is cast for that.
    """
    seconds = measured.predict(count * itemsize)
    sent_itemsize = wire_itemsize if wire_itemsize and world.num_nodes > 1 else itemsize
    limit = hierarchical_from_bytes(world) * sent_itemsize // itemsize
    best, reason = _fastest(seconds) if seconds else _by_limit(count * itemsize, limit)
    if algorithm != "auto":
        reason = f"{algorithm} was asked for by name; auto would choose {best}"
    planner = PLANNERS[best if algorithm == "auto" else algorithm]
    return Choice(replace(planner(world, count, itemsize, chunk_bytes), wire_itemsize=wire_itemsize), reason, seconds)


def choose_on_gpus(
    world: World, count: int, itemsize: int, algorithm: str = "auto", chunk_bytes: int = 0, wire_itemsize: int = 0
) -> Choice:
    """Choose the plan of an all-reduce of GPU memory; ``auto`` is ``hierarchical``, as nobody has measured where it loses.

    A single node has one INTRA all-reduce instead of a reduce-scatter and an all-gather: NCCL does that faster.
    """
    name, nothing_overlaps = "hierarchical" if algorithm == "auto" else algorithm, world.num_nodes == 1 and not chunk_bytes
    default = SCRATCH_BYTES if nothing_overlaps else DEVICE_CHUNK_BYTES
    plan = replace(PLANNERS[name](world, count, itemsize, chunk_bytes or default), wire_itemsize=wire_itemsize)
    if plan.scopes == {Scope.INTRA}:
        depth = 1 if nothing_overlaps else plan.depth
        plan = replace(plan, phases=(Phase(Verb.ALL_REDUCE, Scope.INTRA),), depth=depth)
    return Choice(plan, "on GPUs auto is hierarchical" if algorithm == "auto" else f"{name} was asked for by name")


def _fastest(seconds: Mapping[str, float]) -> tuple[str, str]:
    fastest, *others = sorted(seconds, key=lambda name: seconds[name])
    next_best = "".join(f"; next: {name} {format_seconds(seconds[name])}" for name in others[:1])
    return fastest, f"{fastest} is the fastest as measured: {format_seconds(seconds[fastest])}{next_best}"


def _by_limit(num_bytes: int, limit: int) -> tuple[str, str]:
    if num_bytes < limit:
        return "flat", f"on such nodes flat takes less than {format_bytes(limit)}"
    return "hierarchical", f"on such nodes hierarchical takes {format_bytes(limit)} and more"


def measured_text(choice: Choice) -> str:
    """Return the time of every algorithm that was measured, as a table."""
    chosen = choice.plan.algorithm
    rows = [(name, format_seconds(time), "chosen" if name == chosen else "") for name, time in choice.seconds.items()]
    return format_table([("algorithm", "as measured", ""), *rows])
