"""The planners: an all-reduce or a reduce-scatter as phases on chunks. Pure functions of a world and a size.

In what follows, n: nodes, p: ranks, S: bytes of the buffer; 2(n-1)/n·S is the least that an all-reduce sends over the link of a
node.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from mpistrat.algorithms.chunks import (
    SCATTER_FROM_BYTES,
    SCRATCH_BYTES,
    chunk_elements,
    chunk_lengths,
    padded,
    pipeline_rule,
    whole_shards,
)
from mpistrat.algorithms.plan import Phase, Plan, Scope, Verb
from mpistrat.errors import Unsuitable
from mpistrat.topology.world import World


def flat(world: World, count: int, itemsize: int, chunk_bytes: int = 0) -> list[Plan]:
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
    return [Plan("flat", world, count, itemsize, phases, chunk_elements(world, count, itemsize, SCRATCH_BYTES))]


def hierarchical(world: World, count: int, itemsize: int, chunk_bytes: int = 0) -> list[Plan]:
    """Plan a reduce-scatter in each node, all-reduces along the rails, and an all-gather in each node.

    There are two plans: on the whole buffer, and on chunks that overlap, one between nodes while others are inside them; with
    `chunk_bytes` only that on chunks of this size.

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
    rule, phases = pipeline_rule(world), _phases(world)
    if chunk_bytes:
        end = largest = whole_shards(world, itemsize, chunk_bytes)
    else:
        # the largest is rounded down: slots, of sizes that are powers of two, hold it without one byte more
        end, largest = padded(world, rule.end_bytes // itemsize), whole_shards(world, itemsize, rule.max_bytes)
    lengths = chunk_lengths(world, count, end, largest)
    chunk_count = padded(world, max(lengths, default=1))
    depth = max(min(rule.depth, len(lengths)), 1)
    end_count = end if end < chunk_count else 0
    in_chunks = Plan("hierarchical", world, count, itemsize, phases, chunk_count, depth, end_count=end_count)
    if chunk_bytes:
        return [in_chunks]
    whole = Plan("hierarchical", world, count, itemsize, phases, chunk_elements(world, count, itemsize, SCRATCH_BYTES))
    return [whole, in_chunks]


def reduce_scatter(world: World, bounds: Sequence[int], itemsize: int, algorithm: str = "auto", chunk_bytes: int = 0) -> Plan:
    """Plan a reduce-scatter over nodes of equal size; rank r gets elements ``bounds[r]:bounds[r + 1]``.

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

    Raises
    ------
    Unsuitable
        If an all-reduce is to be made instead, of which each rank takes its part.
    """
    if not world.is_uniform or world.size == 1:
        raise Unsuitable("because nodes have different numbers of ranks, or there is one rank")
    if algorithm not in ("auto", "hierarchical"):
        raise Unsuitable(f"because algorithm {algorithm!r} was asked for, which divides nothing between ranks")
    if not bounds[-1] or (algorithm == "auto" and bounds[-1] * itemsize < SCATTER_FROM_BYTES):
        raise Unsuitable("because the array is so small that steps count more than bytes")
    longest, depth = max(stop - start for start, stop in pairwise(bounds)), 1
    if world.num_nodes > 1:  # else nothing crosses nodes meanwhile
        rule = pipeline_rule(world)
        num_chunks = -(-longest // max((chunk_bytes or rule.max_bytes) // itemsize // world.size, 1))
        longest, depth = -(-longest // num_chunks), min(rule.depth, num_chunks)
    phases, chunk_count = scatter_phases(world), longest * world.size
    return Plan("hierarchical", world, bounds[-1], itemsize, phases, chunk_count, depth, bounds=tuple(bounds))


def scatter_phases(world: World) -> tuple[Phase, ...]:
    """Return the phases of a reduce-scatter on this world."""
    scopes = [Scope.INTRA] * (world.num_shards > 1) + [Scope.INTER] * (world.num_nodes > 1)
    return tuple(Phase(Verb.REDUCE_SCATTER, scope) for scope in scopes)


def _phases(world: World) -> tuple[Phase, ...]:
    rails = (Phase(Verb.ALL_REDUCE, Scope.INTER),) if world.num_nodes > 1 else ()
    if world.num_shards == 1:
        return rails
    if world.size == 2:
        return (Phase(Verb.ALL_REDUCE, Scope.INTRA),)
    return (Phase(Verb.REDUCE_SCATTER, Scope.INTRA), *rails, Phase(Verb.ALL_GATHER, Scope.INTRA))
