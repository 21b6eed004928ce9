"""Leader: reduce to the leader of each node, all-reduce between the leaders, broadcast inside each node.

Phases
    ``intra reduce -> leaders all_reduce -> intra broadcast``
Communication steps
    2(n-1) between nodes by a ring; a few synchronisations inside a node.
Bytes on the wire per node
    2(n-1)/n·S, all sent and summed by one rank.
Good when
    there are many nodes and the buffer is small: only one rank per node sends to other nodes. Declines a single node, where
    there is nothing to reduce between leaders, and one rank per node, where every rank is a leader.
Source
    Karonis, de Supinski, Foster, Gropp, Lusk, Bresnahan: Exploiting Hierarchy in Parallel Computer Networks to Optimize
    Collective Operation Performance. IPDPS 2000.

n: nodes, S: bytes of the buffer.
"""

from __future__ import annotations

from mpistrat.algorithms.chunks import SCRATCH_BYTES, chunk_elements
from mpistrat.algorithms.plan import Phase, Plan, Scope, Verb
from mpistrat.errors import Unsuitable
from mpistrat.topology.world import World

__all__ = ["plan"]


def plan(world: World, count: int, itemsize: int, chunk_bytes: int = 0) -> Plan:
    """Plan an all-reduce through one leader per node: see `choose.PLANNERS`.

    Raises
    ------
    Unsuitable
        If there is one node, or one rank per node.
    """
    if world.num_nodes == 1:
        raise Unsuitable("because all ranks are on one node, which has only one leader")
    if world.num_shards == 1:
        raise Unsuitable("because each node has one rank, so every rank would be a leader")
    phases = (
        Phase(Verb.REDUCE, Scope.INTRA),
        Phase(Verb.ALL_REDUCE, Scope.LEADERS),
        Phase(Verb.BROADCAST, Scope.INTRA),
    )
    return Plan("leader", world, count, itemsize, phases, chunk_elements(world, count, itemsize, SCRATCH_BYTES))
