"""Pipelined: the hierarchical phases on several chunks, one chunk between nodes while others are inside them.

Phases
    ``intra reduce_scatter -> inter all_reduce -> intra all_gather``
Communication steps
    For each chunk, 2(n-1) between nodes, by a ring along each rail, and a few synchronisations inside a node.
Bytes on the wire per node
    2(n-1)/n·S, the minimum, divided between all ranks of the node.
Good when
    the buffer is large: the phases inside a node overlap those between nodes, and a chunk stays in the cache, which helps on
    one node too. A buffer of one chunk is reduced as by ``hierarchical``. Declines a single rank.
Source
    Luo, Wu, Bosilca, Pei, Cao, Patinyasakdikul, Zhong, Dongarra: HAN: a Hierarchical AutotuNed Collective Communication
    Framework. IEEE CLUSTER 2020.

n: nodes, S: bytes of the buffer.
"""

from __future__ import annotations

from mpistrat.algorithms import hierarchical
from mpistrat.algorithms.chunks import chunk_lengths, padded, pipeline_rule, whole_shards
from mpistrat.algorithms.plan import Plan
from mpistrat.errors import Unsuitable
from mpistrat.topology.world import World

__all__ = ["plan"]


def plan(world: World, count: int, itemsize: int, chunk_bytes: int = 0) -> Plan:
    """Plan a hierarchical all-reduce on chunks that overlap: see `choose.PLANNERS`.

    Without `chunk_bytes` chunks follow the rule in `algorithms.chunks`, with small ones first and last.

    Raises
    ------
    Unsuitable
        If there is one rank.
    """
    if world.size == 1:
        raise Unsuitable("because one rank has nobody to exchange chunks with")
    rule = pipeline_rule(world)
    if chunk_bytes:
        end = largest = whole_shards(world, itemsize, chunk_bytes)
    else:
        end, largest = (padded(world, num_bytes // itemsize) for num_bytes in (rule.end_bytes, rule.max_bytes))
    lengths = chunk_lengths(world, count, end, largest)
    chunk_count = padded(world, max(lengths, default=1))
    depth = max(min(rule.depth, len(lengths)), 1)
    end_count = end if end < chunk_count else 0
    return Plan("pipelined", world, count, itemsize, hierarchical.phases(world), chunk_count, depth, end_count=end_count)
