"""Discover the topology of a running job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpistrat import settings
from mpistrat.errors import TopologyError
from mpistrat.topology.world import World

if TYPE_CHECKING:
    from mpi4py import MPI


def discover(comm: MPI.Intracomm, virtual_nodes: str | None = None) -> World:
    """Return the topology of the ranks of `comm`. A collective call.

    Ranks are on one node if they can share memory. The launcher's variables are not used: they often describe the launcher's
    daemon instead of the rank. The shape of virtual nodes is by default MPISTRAT_VIRTUAL_NODES of rank 0, which is that of the
    whole job: the ranks of a smaller `comm` keep their places in it. Every rank raises a TopologyError if the shape is
    malformed, has another number of ranks, or puts ranks of two machines on one node.
    """
    labels, names = _real_nodes(comm)
    shape = comm.bcast(settings.VIRTUAL_NODES.read() if virtual_nodes is None else virtual_nodes)
    if not shape:
        return World.from_node_of_rank(labels, names)
    world = _part_of_job(comm, shape) if virtual_nodes is None else World.from_shape(shape, comm.Get_size())
    for node in world.nodes:
        machines = sorted({names[rank] for rank in node.ranks})
        if len({labels[rank] for rank in node.ranks}) > 1:
            raise TopologyError(
                f"virtual node {node.index} of shape {shape!r} would hold ranks {', '.join(map(str, node.ranks))} of several "
                f"machines ({', '.join(machines)}); a virtual node must lie within one machine: unset MPISTRAT_VIRTUAL_NODES "
                "or choose a shape that divides each machine"
            )
    return world


def _part_of_job(comm: MPI.Intracomm, shape: str) -> World:
    """Return the picture of the ranks of `comm` in a job of a shape; where they are all of them, in the order of `comm`."""
    from mpi4py import MPI

    if comm.Get_size() == MPI.COMM_WORLD.Get_size():
        return World.from_shape(shape, comm.Get_size())
    job = World.from_shape(shape, MPI.COMM_WORLD.Get_size())
    places = [job.place(rank) for rank in comm.allgather(MPI.COMM_WORLD.Get_rank())]
    return World.from_node_of_rank(
        [place.node_index for place in places], [job.nodes[place.node_index].name for place in places]
    )


def _real_nodes(comm: MPI.Intracomm) -> tuple[list[int], list[str]]:
    """Return, for each rank, the lowest rank it can share memory with, and the name of its machine."""
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.Get_rank())
    lowest = node.bcast(comm.Get_rank())
    node.Free()
    pairs = comm.allgather((lowest, MPI.Get_processor_name()))
    return [label for label, _ in pairs], [name for _, name in pairs]
