"""Flat: one all-reduce over all ranks: small buffers by shared memory and the leaders of the nodes, others by MPI.

Phases
    ``world all_reduce``
Communication steps
    On one node, none up to 512 KiB. On up to 4 nodes, one exchange between the leaders up to 32 KiB (see `transports.small`).
    Else as MPI chooses: ceil(log2 p) by recursive doubling for small buffers, up to 2(p-1) by a ring for large ones.
Bytes on the wire per node
    At least 2(n-1)/n·S. MPI libraries that send for each rank of a node separately send several times that.
Good when
    the buffer is small, so that latency dominates; or there is one rank per node. With a single rank the plan has no phases.
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
    """Plan an all-reduce in one phase: see `choose.PLANNERS`."""
    phases = (Phase(Verb.ALL_REDUCE, Scope.WORLD),) if world.size > 1 else ()
    return Plan("flat", world, count, itemsize, phases, chunk_elements(world, count, itemsize, SCRATCH_BYTES))
