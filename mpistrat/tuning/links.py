"""Measure how many links of a node its ranks use at the same time: one that all share, or an adapter near each GPU."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from mpistrat.topology.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

LINK_BYTES = 1 << 22
_ROUNDS = 6  # the first one connects


def measure_links(comm: MPI.Intracomm, world: World) -> int:
    """Return the links of a node, by how much faster its ranks exchange together than one does alone. A collective call.

    One rank of each node sends to its like on the next node; then as many do as the smallest node has ranks.

    Parameters
    ----------
    comm : MPI.Intracomm
        The ranks of `world`, in order; only duplicated.
    world : World
        The placement of the ranks.

    Returns
    -------
    int
        The same on all ranks: at least 1, at most the ranks of the smallest node. 1 where there is one node.
    """
    most = min(world.local_sizes)
    if world.num_nodes == 1 or most == 1:
        return 1
    own = comm.Dup()
    alone, together = _exchange_seconds(own, world, 1), _exchange_seconds(own, world, most)
    own.Free()
    return min(max(int(most * alone / together + 0.5), 1), most)


def _exchange_seconds(comm: MPI.Intracomm, world: World, ranks: int) -> float:
    """Return the shortest time of an exchange between neighbouring nodes by so many ranks of each. A collective call."""
    from mpi4py import MPI

    place = world.place(comm.Get_rank())
    sent, received = np.zeros((2, LINK_BYTES), np.uint8)
    before, after = (
        world.nodes[(place.node_index + step) % world.num_nodes].ranks[place.local_rank % ranks] for step in (-1, 1)
    )
    mine, slowest = np.zeros(_ROUNDS), np.empty(_ROUNDS)
    for index in range(_ROUNDS):
        comm.Barrier()
        started = time.perf_counter()
        if place.local_rank < ranks:
            comm.Sendrecv(sent, after, recvbuf=received, source=before)
            mine[index] = time.perf_counter() - started
    comm.Allreduce(mine, slowest, MPI.MAX)
    return float(slowest.min())
