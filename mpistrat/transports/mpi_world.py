"""All-reduce over all ranks at once: small arrays by way of `small`, others by MPI's own collectives.

MPI is called once, or three times by way of a leader of each node. Ranks of a node compare their calls before.

Open MPI as it comes hands an all-reduce over several nodes to its component han, which other components of it beat nearly
everywhere. Which component serves a communicator can be said when that is made, so this transport makes its own ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat.arrays import Array
from mpistrat.groups.group import Group
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.launch import openmpi
from mpistrat.reduction import Fold, ReduceOp, divide
from mpistrat.topology.world import World
from mpistrat.transports.base import Operation, Part
from mpistrat.transports.flat_arrays import FlatArrays
from mpistrat.transports.mpi import MpiTransport, until_complete
from mpistrat.transports.small import SmallAllReduce, SmallExchange
from mpistrat.transports.steps import Steps
from mpistrat.transports.window import NodeWindow

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Route", "WorldTransport", "route"]

AllReduce = Callable[[Any, Any, "MPI.Op"], None]

KIB = 1 << 10
POLL_FROM_BYTES = 512 * KIB
"""Between nodes: smaller arrays go by collectives that block. 64 KiB on 4x2 take 0.9 ms so, and 1.9 by MPI_Iallreduce."""
_KEPT = 64
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
    window : NodeWindow, optional
        Of the ranks of this node, where they share memory.

    Attributes
    ----------
    small : SmallExchange
        What small arrays go by.
    """

    combines_arrays = True

    def __init__(self, hierarchy: Hierarchy, window: NodeWindow | None = None) -> None:
        self._world, self._call = hierarchy.world, hierarchy.call
        self._window = window if hierarchy.intra.size > 1 else None
        self.small = SmallExchange(hierarchy, self._window)
        several = self._world.num_nodes > 1
        self._own: list[MPI.Intracomm] = []
        self._small: dict[tuple[ReduceOp, np.dtype[Any], tuple[int, ...]], SmallAllReduce] = {}
        self._advises = several and _may_advise(hierarchy)
        super().__init__(self._in_order_of_nodes(hierarchy) if several else hierarchy.world_group)
        self._through_leaders: dict[bool, AllReduce] = {}
        if self._advises and self._world.num_shards > 1:
            self._join_leaders(hierarchy)

    def all_reduce(self, buffer: Array, op: ReduceOp, channel: int = 0) -> Operation:
        """Bind an all-reduce, in place."""
        steps = self.steps_of(op, buffer.dtype, buffer.shape)
        return Operation(lambda: steps(buffer, buffer), [Part(0, buffer.size, (buffer,))])

    def all_reduce_between(self, arrays: FlatArrays, fold: Fold) -> Steps:
        """Combine the one array of the caller of all ranks, as `fold` does, if that does not widen it."""
        [source], [target] = arrays.sources, arrays.targets
        yield from self.steps_of(fold.op, source.dtype, source.shape)(source, target)
        if fold.divisor > 1:
            divide(target, fold.divisor, out=target)

    def steps_of(self, op: ReduceOp, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Callable[[Array, Array], Steps]:
        """Return what combines a C-contiguous array of this shape and dtype on all ranks, step by step."""
        key = op, dtype, shape
        if self.small.serves(_nbytes(dtype, shape)):
            if key not in self._small:
                if len(self._small) == _KEPT:
                    self._small.clear()
                self._small[key] = SmallAllReduce(self.small, op, dtype, shape)
            return self._small[key].steps
        return lambda source, target: self._by_mpi(op, source, target)

    def at_once(self, op: ReduceOp, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Callable[[Array, Array | None], Array]:
        """Return what combines such an array at once, by way of `small` or of MPI."""
        nbytes = _nbytes(dtype, shape)
        if self.small.serves(nbytes):
            return SmallAllReduce(self.small, op, dtype, shape).at_once()
        if self._world.size == 1:
            return _copy
        call, window, meet = self._call, self._window, self.small.meet
        is_polled, combine = self._is_polled(nbytes), self._combining(op, dtype, nbytes)

        def run(source: Array, target: Array | None = None) -> Array:
            if target is None:
                target = np.empty(shape, source.dtype)  # dtypes that are equal may have names of their own in MPI
            if not (source.flags.c_contiguous and source.flags.aligned):
                source = np.require(source, requirements=["C", "A"])
            if is_polled or call.must_poll:
                call.drive(self._by_mpi(op, source, target))
                return target
            if window is not None:
                meet(window)
            combine(source, target)
            return target

        return run

    def _by_mpi(self, op: ReduceOp, source: Array, target: Array) -> Steps:
        """Let the ranks of this node meet, then combine the arrays by MPI."""
        if self._window is not None:
            yield from self._window.meet()
        if not (self._call.must_poll or self._is_polled(source.nbytes)):
            self._combining(op, source.dtype, source.nbytes)(source, target)
            return
        native = self.native_op(op, source.dtype)
        for given, result in self._parts(source, target):
            yield from until_complete(self.group.comm.Iallreduce(given, result, native), (source, result))
        self._note(source.nbytes)

    def _is_polled(self, nbytes: int) -> bool:
        return self._world.num_nodes > 1 and nbytes >= POLL_FROM_BYTES

    def _combining(self, op: ReduceOp, dtype: np.dtype[Any], nbytes: int) -> Callable[[Array, Array], None]:
        """Return what combines arrays of so many bytes by collectives of MPI that block."""
        native, all_reduce = self.native_op(op, dtype), self._blocking(nbytes)

        def combine(source: Array, target: Array) -> None:
            for given, result in self._parts(source, target):
                all_reduce(given, result, native)
            self._note(nbytes)

        return combine

    def _parts(self, source: Array, target: Array) -> list[tuple[Any, Array]]:
        """Return what MPI is given in each of its calls, and where the result goes."""
        from mpi4py import MPI

        in_place = np.may_share_memory(source, target)  # arrays that overlap otherwise have been copied
        if source.nbytes <= self._limit_bytes:
            return [(MPI.IN_PLACE if in_place else source, target)] if source.size else []
        pairs = zip(self._pieces(source.reshape(-1)), self._pieces(target.reshape(-1)), strict=True)
        return [(MPI.IN_PLACE if in_place else part, result) for part, result in pairs]

    def _note(self, nbytes: int) -> None:
        if self._world.num_nodes > 1 or self._window is None:
            self._call.add_unconfirmed(nbytes)

    def _blocking(self, nbytes: int) -> AllReduce:
        """Return what combines a buffer of `nbytes` bytes: called as MPI_Allreduce is."""
        way = route(self._world, nbytes)
        if self._through_leaders and way.through_leaders:
            return self._through_leaders[way.in_turn]
        return self.group.comm.Allreduce

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


def _copy(source: Array, target: Array | None = None) -> Array:
    """Return what a single rank combines."""
    if target is None:
        target = np.empty(source.shape, source.dtype)
    target[...] = source
    return target


def _nbytes(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    return prod(shape) * dtype.itemsize


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
