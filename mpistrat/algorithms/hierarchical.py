"""Hierarchical: reduce-scatter inside each node, all-reduce along the rails, all-gather inside each node.

Phases
    ``intra reduce_scatter -> inter all_reduce -> intra all_gather``
Communication steps
    2(n-1) between nodes, by a ring along each rail; a few synchronisations inside a node.
Bytes on the wire per node
    2(n-1)/n·S, the minimum, divided between all ranks of the node.
Good when
    nodes have several ranks and the buffer is not small: links carry the minimum of bytes, and every rank sums a shard.
    Nodes may have different numbers of ranks: on a smaller node a rank owns several shards. On one node there is no
    ``inter`` phase, with one rank per node no ``intra`` phase, and with a single rank no phase. Two ranks on one node both
    sum the whole buffer (one ``intra all_reduce``), which takes one pass over memory less.
Source
    Cho, Finkler, Serrano, Kung, Hunter: BlueConnect: Decomposing All-Reduce for Deep Learning on Heterogeneous Network
    Hierarchy. MLSys 2019. Mikami, Suganuma, U-chupala, Tanaka, Kageyama: Massively Distributed SGD: ImageNet/ResNet-50
    Training in a Flash. arXiv:1811.05233, 2018.

n: nodes, S: bytes of the buffer.
"""

from __future__ import annotations

from mpistrat.algorithms.chunks import SCRATCH_BYTES, chunk_elements
from mpistrat.algorithms.plan import Phase, Plan, Scope, Verb
from mpistrat.topology.world import World

__all__ = ["phases", "plan"]


def plan(world: World, count: int, itemsize: int, chunk_bytes: int = 0) -> Plan:
    """Plan an all-reduce in which every rank works on the shards it owns: see `choose.PLANNERS`."""
    chunk_count = chunk_elements(world, count, itemsize, SCRATCH_BYTES)
    return Plan("hierarchical", world, count, itemsize, phases(world), chunk_count)


def phases(world: World) -> tuple[Phase, ...]:
    """Return the phases of a hierarchical all-reduce on this world."""
    rails = (Phase(Verb.ALL_REDUCE, Scope.INTER),) if world.num_nodes > 1 else ()
    if world.num_shards == 1:
        return rails
    if world.size == 2:
        return (Phase(Verb.ALL_REDUCE, Scope.INTRA),)
    return (Phase(Verb.REDUCE_SCATTER, Scope.INTRA), *rails, Phase(Verb.ALL_GATHER, Scope.INTRA))
