"""All-reduce over all ranks: small arrays by `small`, others by MPI's collectives.

MPI is called once for all ranks, or three times through a leader of each node. Ranks of a node compare their calls first.

By default Open MPI's component han serves all-reduces over several nodes, but other components are nearly always faster.
Components can be selected when a communicator is made, so this transport makes its own ones.
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
"""Between nodes, smaller arrays use blocking collectives: 64 KiB on 4x2 take 0.9 ms, and 1.9 ms by MPI_Iallreduce."""
_CACHE_SIZE = 64
LINEAR_UP_TO = 4  # with more ranks Open MPI's component basic uses trees instead of a linear algorithm


@dataclass(frozen=True)
class Route:
    """Whether MPI is called for all ranks or through leaders, and whether leaders use a linear algorithm."""

    through_leaders: bool
    linear: bool = False


def route(world: World, nbytes: int) -> Route:
    """Return the faster route for a buffer of `nbytes` bytes with Open MPI.

    Medians of one run for each shape, in µs; hosts with two cores, connected by links of 1 Gbit/s.

    =======  =======  ===========  ===========  ===============  ================
    shape    bytes    default      without han  through leaders  linear leaders
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
    # from 4 KiB on a message inside a node takes more steps, which two leaders make up for only with larger buffers
    is_awkward = two and 4 * KIB <= nbytes < 8 * KIB
    if world.num_nodes == 1 or world.num_shards == 1 or is_awkward or nbytes >= _leaders_below(world):
        return Route(through_leaders=False)
    least, below = (8 * KIB, 64 * KIB) if two else (0, 32 * KIB)
    return Route(True, linear=world.num_nodes <= LINEAR_UP_TO and least <= nbytes < below)


class WorldTransport(MpiTransport):
    """All-reduces over all ranks of a hierarchy. Making one is a collective call.

    On the communicator of all ranks, the ranks are ordered by node: MPI's algorithms pair neighbours first, and so send least
    between nodes, however the launcher has placed the ranks.

    Parameters
    ----------
    hierarchy : Hierarchy
        Its communicators are duplicated, with hints that select Open MPI's components.
    window : NodeWindow, optional
        Of the ranks of this node, if they share memory.

    Attributes
    ----------
    small : SmallExchange
        For small arrays.
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

    def all_reduce_arrays(self, arrays: FlatArrays, fold: Fold) -> Steps:
        """Combine the caller's one array, if `fold` does not widen it."""
        [source], [target] = arrays.sources, arrays.targets
        yield from self.steps_of(fold.op, source.dtype, source.shape)(source, target)
        if fold.divisor > 1:
            divide(target, fold.divisor, out=target)

    def steps_of(self, op: ReduceOp, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Callable[[Array, Array], Steps]:
        """Return the nonblocking all-reduce of a C-contiguous array of this shape and dtype: ``steps(source, target)``."""
        key = op, dtype, shape
        if self.small.serves(_nbytes(dtype, shape)):
            if key not in self._small:
                if len(self._small) == _CACHE_SIZE:
                    self._small.clear()
                self._small[key] = SmallAllReduce(self.small, op, dtype, shape)
            return self._small[key].steps
        return lambda source, target: self._by_mpi(op, source, target)

    def blocking_all_reduce(
        self, op: ReduceOp, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> Callable[[Array, Array | None], Array]:
        """Return a blocking all-reduce, by `small` or MPI: see `Transport.blocking_all_reduce`."""
        nbytes = _nbytes(dtype, shape)
        if self.small.serves(nbytes):
            return SmallAllReduce(self.small, op, dtype, shape).blocking()
        if self._world.size == 1:
            return _copy
        call, window, barrier = self._call, self._window, self.small.barrier
        is_polled, combine = self._is_polled(nbytes), self._combining(op, dtype, nbytes)

        def run(source: Array, target: Array | None = None) -> Array:
            if target is None:
                target = np.empty(shape, source.dtype)  # not `dtype`: equal NumPy dtypes may be different MPI datatypes
            if not (source.flags.c_contiguous and source.flags.aligned):
                source = np.require(source, requirements=["C", "A"])
            if is_polled or call.must_poll:
                call.drive(self._by_mpi(op, source, target))
                return target
            if window is not None:
                barrier(window)
            combine(source, target)
            return target

        return run

    def _by_mpi(self, op: ReduceOp, source: Array, target: Array) -> Steps:
        """Return the steps of a barrier of this node, then of MPI's all-reduce."""
        if self._window is not None:
            yield from self._window.barrier()
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
        """Return the all-reduce of arrays of `nbytes` bytes by MPI's blocking collectives."""
        native, all_reduce = self.native_op(op, dtype), self._blocking(nbytes)

        def combine(source: Array, target: Array) -> None:
            for given, result in self._parts(source, target):
                all_reduce(given, result, native)
            self._note(nbytes)

        return combine

    def _parts(self, source: Array, target: Array) -> list[tuple[Any, Array]]:
        """Return the send and receive buffer of each call of MPI."""
        from mpi4py import MPI

        in_place = np.may_share_memory(source, target)  # they are equal: others that overlap have been copied
        if source.nbytes <= self._limit_bytes:
            return [(MPI.IN_PLACE if in_place else source, target)] if source.size else []
        pairs = zip(self._split(source.reshape(-1)), self._split(target.reshape(-1)), strict=True)
        return [(MPI.IN_PLACE if in_place else part, result) for part, result in pairs]

    def _note(self, nbytes: int) -> None:
        if self._world.num_nodes > 1 or self._window is None:
            self._call.add_unconfirmed(nbytes)

    def _blocking(self, nbytes: int) -> AllReduce:
        """Return the all-reduce for a buffer of `nbytes` bytes, with the arguments of MPI_Allreduce."""
        best = route(self._world, nbytes)
        if self._through_leaders and best.through_leaders:
            return self._through_leaders[best.linear]
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
        assert isinstance(ordered, MPI.Intracomm)
        joined = self._duplicate(ordered, openmpi.WITHOUT_HAN)
        ordered.Free()
        return Group(joined, "world by nodes", ranks)

    def _join_leaders(self, hierarchy: Hierarchy) -> None:
        inside = self._duplicate(hierarchy.intra.comm, openmpi.ONLY_BASIC)
        components_of = {False: openmpi.WITHOUT_HAN}
        if self._world.num_nodes <= LINEAR_UP_TO:
            components_of[True] = openmpi.ONLY_BASIC
        for linear, components in components_of.items():
            leaders = self._duplicate(hierarchy.leaders.comm, components) if hierarchy.leaders else None
            self._through_leaders[linear] = _through(inside, leaders)

    def _duplicate(self, comm: MPI.Intracomm, components: str) -> MPI.Intracomm:
        from mpi4py import MPI

        info = MPI.Info.Create({openmpi.COMPONENTS_KEY: components} if self._advises else {})
        self._own.append(comm.Dup_with_info(info))
        info.Free()
        return self._own[-1]


def _copy(source: Array, target: Array | None = None) -> Array:
    """All-reduce over a single rank."""
    if target is None:
        target = np.empty(source.shape, source.dtype)
    target[...] = source
    return target


def _nbytes(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    return prod(shape) * dtype.itemsize


def _through(inside: MPI.Intracomm, leaders: MPI.Intracomm | None) -> AllReduce:
    """Return an all-reduce in three calls of MPI: reduce to the leader, all-reduce between leaders, broadcast."""
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
    """Return the size in bytes from which one MPI call for all ranks sends less between nodes."""
    if world.is_uniform and _is_power_of_two(world.size):
        return 128 * KIB if world.num_nodes == 2 else 64 * KIB
    return 512 * KIB if _is_power_of_two(world.num_nodes) else 128 * KIB


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _may_advise(hierarchy: Hierarchy) -> bool:
    """Return whether all ranks run the Open MPI of the wheel, and the user has not selected components."""
    from mpi4py import MPI

    is_known = MPI.get_vendor()[0] == "Open MPI" and openmpi.has_wheel(os.environ)
    free = is_known and not openmpi.has_chosen_collectives(os.environ)
    return bool(hierarchy.world_group.comm.allreduce(free, MPI.LAND))
