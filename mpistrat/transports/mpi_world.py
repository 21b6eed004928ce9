"""All-reduce over all ranks by MPI's own collectives: one call, or three by way of a leader of each node.

Open MPI as it comes hands an all-reduce over several nodes to its component han, which other components of it beat nearly
everywhere. Which component serves a communicator can be said when that is made, so this transport makes its own ones.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpistrat.groups.group import Group
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.launch import openmpi
from mpistrat.topology.world import World
from mpistrat.transports.mpi import AllReduce, MpiTransport

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Route", "WorldTransport", "route"]

KIB = 1 << 10
LINEAR_UP_TO = 4  # beyond, Open MPI's component basic climbs trees instead of serving each rank in turn


@dataclass(frozen=True)
class Route:
    """How MPI is asked: once for all ranks, or through leaders; and whether these serve each other in turn."""

    through_leaders: bool
    in_turn: bool = False


def route(world: World, nbytes: int) -> Route:
    """Return the shorter way for a buffer of `nbytes` bytes with Open MPI.

    Medians of one run for each shape: hosts on two cores, joined by links of 1 Gbit/s; µs.

    =======  =======  ===========  ===========  ===============  ================
    shape    bytes    as it comes  without han  through leaders  leaders, in turn
    =======  =======  ===========  ===========  ===============  ================
    4x2          8 B          185          214              150               136
    4x2        1 KiB          310          235              188               188
    4x2        4 KiB          386          324              270               269
    4x2        8 KiB          433          468              424               245
    4x2       16 KiB          454          512              464               345
    4x2       32 KiB          966          609              547               759
    4x2       64 KiB         1903          896             1028                 -
    4x4        2 KiB          771          792              599               494
    2x4        2 KiB          134          160              110               100
    2x2        4 KiB          154          102              162               135
    2x4       32 KiB          426          630              753               447
    2x4       64 KiB          698          804              575               646
    2x4      128 KiB         1824         1021             1441                 -
    3+1+2+2    1 KiB          374          300              196                 -
    3+1+2+2  128 KiB         3928         2327             1562                 -
    8x2        4 KiB         2450         2319             1662                 -
    3x2       64 KiB         1616          808              717                 -
    3x2      256 KiB         6366         3131             5356                 -
    =======  =======  ===========  ===========  ===============  ================
    """
    two = world.num_nodes == 2
    # beyond 4 KiB ranks of a node take more turns for a message: two leaders have to save other bytes to make up for it
    is_awkward = two and 4 * KIB <= nbytes < 8 * KIB
    if world.num_nodes == 1 or world.num_shards == 1 or is_awkward or nbytes >= _leaders_below(world):
        return Route(through_leaders=False)
    least, below = (8 * KIB, 64 * KIB) if two else (0, 32 * KIB)
    return Route(True, in_turn=world.num_nodes <= LINEAR_UP_TO and least <= nbytes < below)


class WorldTransport(MpiTransport):
    """An all-reduce over all ranks of a hierarchy. Making one is a collective call.

    Where MPI is asked once, the ranks stand in the order of their nodes: its algorithms pair neighbours first, and so send
    least between nodes, however the ranks were placed.

    Parameters
    ----------
    hierarchy : Hierarchy
        Its communicators are duplicated, and given what we ask of Open MPI on the way.
    """

    def __init__(self, hierarchy: Hierarchy) -> None:
        self._world = hierarchy.world
        several = self._world.num_nodes > 1
        self._own: list[MPI.Intracomm] = []
        self._advises = several and _may_advise(hierarchy)
        super().__init__(self._in_order_of_nodes(hierarchy) if several else hierarchy.world_group)
        self._through_leaders: dict[bool, AllReduce] = {}
        if self._advises and self._world.num_shards > 1:
            self._join_leaders(hierarchy)

    def call(self, nbytes: int) -> AllReduce:
        """Return what combines a buffer of `nbytes` bytes: called as MPI_Allreduce is."""
        way = route(self._world, nbytes)
        if self._through_leaders and way.through_leaders:
            return self._through_leaders[way.in_turn]
        return super().call(nbytes)

    def close(self) -> None:
        """Free the communicators."""
        while self._own:
            self._own.pop().Free()

    def _in_order_of_nodes(self, hierarchy: Hierarchy) -> Group:
        from mpi4py import MPI

        world, comm = hierarchy.world, hierarchy.world_group.comm
        ranks = tuple(rank for node in world.nodes for rank in node.ranks)
        ordered = comm.Split(0, ranks.index(comm.rank))
        assert isinstance(ordered, MPI.Intracomm), f"{ordered!r} was split off an intracommunicator, and is none"
        joined = self._duplicate(ordered, openmpi.WITHOUT_HAN)
        ordered.Free()
        return Group(joined, "world by nodes", ranks)

    def _join_leaders(self, hierarchy: Hierarchy) -> None:
        inside = self._duplicate(hierarchy.intra.comm, openmpi.ONLY_BASIC)
        ways = {False: openmpi.WITHOUT_HAN}
        if self._world.num_nodes <= LINEAR_UP_TO:
            ways[True] = openmpi.ONLY_BASIC
        for in_turn, components in ways.items():
            leaders = self._duplicate(hierarchy.leaders.comm, components) if hierarchy.leaders else None
            self._through_leaders[in_turn] = _through(inside, leaders)

    def _duplicate(self, comm: MPI.Intracomm, components: str) -> MPI.Intracomm:
        from mpi4py import MPI

        info = MPI.Info.Create({openmpi.COMPONENTS_KEY: components} if self._advises else {})
        self._own.append(comm.Dup_with_info(info))
        info.Free()
        return self._own[-1]


def _through(inside: MPI.Intracomm, leaders: MPI.Intracomm | None) -> AllReduce:
    """Return an all-reduce in three calls of MPI: to the leader, between the leaders, back."""
    from mpi4py import MPI

    in_place = MPI.IN_PLACE
    reduce, broadcast = inside.Reduce, inside.Bcast

    if leaders is None:

        def follow(source: Any, target: Any, op: MPI.Op) -> None:
            reduce(target if source is in_place else source, None, op)
            broadcast(target)

        return follow
    combine = leaders.Allreduce

    def lead(source: Any, target: Any, op: MPI.Op) -> None:
        reduce(source, target, op)
        combine(in_place, target, op)
        broadcast(target)

    return lead


def _leaders_below(world: World) -> int:
    """Return from how many bytes on MPI sends less between nodes when it is asked once."""
    if world.is_uniform and _is_power_of_two(world.size):
        return 128 * KIB if world.num_nodes == 2 else 64 * KIB
    return 512 * KIB if _is_power_of_two(world.num_nodes) else 128 * KIB


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _may_advise(hierarchy: Hierarchy) -> bool:
    """Return whether all ranks run an Open MPI that we know, whose collectives the user has left as they come."""
    from mpi4py import MPI

    is_known = MPI.get_vendor()[0] == "Open MPI" and openmpi.has_wheel(os.environ)
    free = is_known and not openmpi.has_chosen_collectives(os.environ)
    return bool(hierarchy.world_group.comm.allreduce(free, MPI.LAND))
