"""Flat: one all-reduce over all ranks at once: small buffers through memory of the node and its leader, others by MPI.

Phases
    ``world all_reduce``
Communication steps
    Up to 32 KiB on up to 4 nodes one exchange between their leaders, up to 256 KiB on one node none, see `transports.small`;
    else MPI's choice: ceil(log2 p) for small buffers by recursive doubling, up to 2(p-1) for large ones by a ring.
Bytes on the wire per node
    2(n-1)/n·S at best. MPI libraries that send for each rank of a node on its own need a multiple of it.
Good when
    the buffer is small, so that the number of steps decides; or there is one rank per node; or one rank in all, where
    the plan has no phases.
Source
    Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH. Int. J. High Performance
    Computing Applications 19(1), 2005.

n: nodes, p: ranks, S: bytes of the buffer.
"""

from __future__ import annotations

from mpistrat.algorithms.chunks import SCRATCH_BYTES, chunk_elements
from mpistrat.algorithms.plan import Phase, Plan, Scope, Verb
from mpistrat.topology.world import World

__all__ = ["plan"]


def plan(world: World, count: int, itemsize: int, chunk_bytes: int = 0) -> Plan:
    """Plan an all-reduce in one phase.

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
    phases = (Phase(Verb.ALL_REDUCE, Scope.WORLD),) if world.size > 1 else ()
    return Plan("flat", world, count, itemsize, phases, chunk_elements(world, count, itemsize, SCRATCH_BYTES))
