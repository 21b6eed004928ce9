"""Hierarchical: reduce-scatter inside each node, all-reduce along the rails, all-gather inside each node.

Phases
    ``intra reduce_scatter -> inter all_reduce -> intra all_gather``
Communication steps
    2(n-1) between nodes by a ring per rail; a few synchronisations inside a node.
Bytes on the wire per node
    2(n-1)/n·S, the least possible, shared out over all ranks of the node.
Good when
    nodes have several ranks and the buffer is not small: each byte crosses a wire as rarely as it can, and every rank
    sums its share. Unequal nodes work alike: a smaller node's ranks own several shards. One node needs no rails, one rank
    per node nothing but the rail, one rank in all no phases. Two ranks on one node each sum everything (one ``intra
    all_reduce``): that is one pass over memory less than sharing the sum out.
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
    """Plan an all-reduce in which every rank works on the shards it owns.

    Parameters
    ----------
    world : World
        Whom the plan is for: any world.
    count : int
        Elements of the buffer.
    itemsize : int
        Bytes of one element.
    chunk_bytes : int
        Not used: a chunk is the whole buffer, or as much of it as the bound for scratch memory allows.
    """
    chunk_count = chunk_elements(world, count, itemsize, SCRATCH_BYTES)
    return Plan("hierarchical", world, count, itemsize, phases(world), chunk_count)


def phases(world: World) -> tuple[Phase, ...]:
    """Return the phases that a hierarchical all-reduce needs on this world."""
    rails = (Phase(Verb.ALL_REDUCE, Scope.INTER),) if world.num_nodes > 1 else ()
    if world.num_shards == 1:
        return rails
    if world.size == 2:
        return (Phase(Verb.ALL_REDUCE, Scope.INTRA),)
    return (Phase(Verb.REDUCE_SCATTER, Scope.INTRA), *rails, Phase(Verb.ALL_GATHER, Scope.INTRA))
