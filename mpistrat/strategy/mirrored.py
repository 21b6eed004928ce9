"""MirroredStrategy: synchronous replicas on the ranks of one node."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from mpistrat.cross_device.options import CommunicationOptions
from mpistrat.errors import LaunchError
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.launch import bootstrap
from mpistrat.strategy.agreed import agreed_collectives
from mpistrat.strategy.base import Strategy
from mpistrat.strategy.extended import StrategyExtended
from mpistrat.topology.discover import discover
from mpistrat.topology.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MirroredStrategy"]


class MirroredStrategy(Strategy):
    """Keeps a copy of each variable on every rank of this node, all equal.

    Making one is a collective call of all ranks of the job.

    Parameters
    ----------
    communication_options : CommunicationOptions, optional
        How to communicate where a call does not say.
    num_packs : int, optional
        Cut the elements of a batch into so many equal packs; 0 reduces each array by itself. None (the default) packs by
        the options' `bytes_per_pack`.
    allow_multiple_nodes : bool
        Where the job spans several nodes, train one model per node, none knowing of the others.

    Raises
    ------
    LaunchError
        On every rank, if the job spans several nodes and that was not allowed.
    InvalidArgumentError
        If the options are no CommunicationOptions, or `num_packs` is negative.
    AgreementError
        If ranks of this node passed different options.
    """

    def __init__(
        self,
        *,
        communication_options: CommunicationOptions | None = None,
        num_packs: int | None = None,
        allow_multiple_nodes: bool = False,
    ) -> None:
        comm = bootstrap.start()
        world = discover(comm)
        if world.num_nodes > 1 and not allow_multiple_nodes:
            raise _several_nodes(world)
        node = world.nodes[world.place(comm.Get_rank()).node_index]
        node_comm = cast("MPI.Intracomm", comm.Split(node.index, comm.Get_rank()))
        names = [node.name] * len(node.ranks)
        hierarchy = Hierarchy(node_comm, World.from_node_of_rank([0] * len(names), names))
        node_comm.Free()
        super().__init__(StrategyExtended(agreed_collectives("MirroredStrategy", hierarchy, communication_options, num_packs)))


def _several_nodes(world: World) -> LaunchError:
    error = LaunchError(
        f"MirroredStrategy trains on the ranks of one node, but this job has {world.size} ranks on {world.num_nodes} nodes "
        f"({', '.join(node.name for node in world.nodes)}), which would train {world.num_nodes} unrelated models. "
        "Use MultiWorkerMirroredStrategy to train one model on all of them, launch on one node, or pass "
        "allow_multiple_nodes=True."
    )
    error.raised_everywhere = True
    return error
