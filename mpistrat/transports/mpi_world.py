"""All-reduce over all ranks: small arrays by `small`, others by MPI's collectives.

Ranks of a node compare their calls before MPI is called.

By default Open MPI's component han serves all-reduces over several nodes, and other components are faster: 64 KiB on 4x2 hosts
with links of 1 Gbit/s take 2.0 ms with it, and 0.7 ms without. Components can be selected when a communicator is made, so this
transport makes its own one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat.arrays import Array, new_array
from mpistrat.groups.group import Group
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.launch import openmpi
from mpistrat.reduction import Fold, ReduceOp, divide
from mpistrat.steps import Steps
from mpistrat.transports.base import FlatArrays, Operation, Part
from mpistrat.transports.mpi import MpiTransport, mpi_datatype, mpi_op, until_complete
from mpistrat.transports.small import PiecewiseAllReduce, SmallAllReduce, SmallExchange, small_all_reduce
from mpistrat.transports.window import NodeWindow

if TYPE_CHECKING:
    from mpi4py import MPI

KIB = 1 << 10
POLL_FROM_BYTES = 512 * KIB
"""Between nodes, smaller arrays use blocking collectives: 64 KiB on 4x2 take 0.9 ms, and 1.9 ms by MPI_Iallreduce."""
_CACHE_SIZE = 64


class WorldTransport(MpiTransport):
    """All-reduces over all ranks of a hierarchy. Making one is a collective call.

    On the communicator of all ranks, the ranks are ordered by node: MPI's algorithms pair neighbours first, and so send least
    between nodes, however the launcher has placed the ranks.
    """

    combines_arrays = True
    most_passed_bytes = 0
    """Arrays of at most so many bytes are handed to MPI as they are: their calls are compared later, inside a node too."""

    def __init__(self, hierarchy: Hierarchy, window: NodeWindow | None = None) -> None:
        self._world, self._call = hierarchy.world, hierarchy.call
        self._window = window if hierarchy.intra.size > 1 else None
        self.small = SmallExchange(hierarchy, self._window)
        several = self._world.num_nodes > 1
        self._own: list[MPI.Intracomm] = []
        self._copy = np.empty(0, np.uint8)
        self._small: dict[tuple[ReduceOp, np.dtype[Any], tuple[int, ...]], SmallAllReduce | PiecewiseAllReduce] = {}
        super().__init__(self._in_order_of_nodes(hierarchy) if several else hierarchy.world_group)

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
        key, nbytes = (op, dtype, shape), _nbytes(dtype, shape)
        if self.small.serves(nbytes) and not self._passes(nbytes):
            if key not in self._small:
                if len(self._small) == _CACHE_SIZE:
                    self._small.clear()
                self._small[key] = small_all_reduce(self.small, op, dtype, shape)
            return self._small[key].steps
        return lambda source, target: self._by_mpi(op, source, target)

    def blocking_all_reduce(
        self, op: ReduceOp, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> Callable[[Array, Array | None], Array]:
        """Return a blocking all-reduce of one array of this shape and dtype, by `small` or MPI: ``all_reduce(source, target)``.

        It returns the target, a new array if `target` is None.
        """
        nbytes = _nbytes(dtype, shape)
        if self._world.size == 1:
            return _copy
        if self._passes(nbytes):
            return self._passing(op, dtype, shape)
        if self.small.serves(nbytes):
            return small_all_reduce(self.small, op, dtype, shape).blocking()
        call, barrier = self._call, None if self._window is None else self.small.blocking_barrier(self._window)
        is_polled, combine, native = self._is_polled(nbytes), self._combine, mpi_op(op, dtype)

        def run(source: Array, target: Array | None = None) -> Array:
            if target is None:
                target = new_array(shape, source.dtype)  # not `dtype`: equal NumPy dtypes may be different MPI datatypes
            if not (source.flags.c_contiguous and source.flags.aligned):
                source = np.require(source, requirements=["C", "A"])
            if is_polled or call.must_poll:
                call.drive(self._by_mpi(op, source, target))
                return target
            if barrier is not None:
                barrier(None)
            combine(native, source, target)
            return target

        return run

    def passing_call(self, op: ReduceOp, dtype: np.dtype[Any]) -> tuple[Callable[..., None], MPI.Op, MPI.Datatype]:
        """Return MPI's all-reduce for arrays of at most `most_passed_bytes`, and the operation and datatype that it takes."""
        return self.group.comm.Allreduce, mpi_op(op, dtype), mpi_datatype(dtype)

    def adds_small_in_order(self, nbytes: int) -> bool:
        """Return whether arrays of `nbytes` bytes are added in the order of the ranks."""
        return self.small.is_one_node and self.small.serves(nbytes) and not self._passes(nbytes)

    def _passes(self, nbytes: int) -> bool:
        """Return whether arrays of `nbytes` bytes are handed to MPI as they are: the same on all ranks."""
        return 0 < nbytes <= self.most_passed_bytes

    def _passing(self, op: ReduceOp, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Callable[[Array, Array | None], Array]:
        """Return MPI's all-reduce of a contiguous array of any shape, with as little Python as possible."""
        from mpi4py import MPI

        nbytes, in_place, add_unconfirmed = _nbytes(dtype, shape), MPI.IN_PLACE, self._call.add_unconfirmed
        all_reduce, native, datatype = self.passing_call(op, dtype)
        count = prod(shape)

        def run(source: Array, target: Array | None = None) -> Array:
            if target is None:
                target = np.empty(shape, source.dtype)
            flags = source.flags
            if not (flags.c_contiguous and flags.aligned):
                source = np.require(source, requirements=["C", "A"])
            given = in_place if source is target else (source, count, datatype)
            all_reduce(given, (target, count, datatype), native)
            add_unconfirmed(nbytes)
            return target

        return run

    def _by_mpi(self, op: ReduceOp, source: Array, target: Array) -> Steps:
        """Return the steps of a barrier of this node, then of MPI's all-reduce."""
        if self._window is not None and not self._passes(source.nbytes):
            yield from self._window.barrier()
        native = mpi_op(op, source.dtype)
        if not (self._call.must_poll or self._is_polled(source.nbytes)):
            self._combine(native, source, target)
            return
        for given, result in self._parts(source, target):
            # Open MPI takes another algorithm for MPI.IN_PLACE, which not all ranks may pass
            sent = given if isinstance(given, np.ndarray) else self._copied(result)
            yield from until_complete([self.group.comm.Iallreduce(sent, result, native)], (sent, result))
        self._note(source.nbytes)

    def _copied(self, array: Array) -> Array:
        """Return a copy of an array in memory that is kept: one call is under way at a time."""
        if self._copy.nbytes < array.nbytes:
            self._copy = np.empty(array.nbytes, np.uint8)
        copy: Array = self._copy[: array.nbytes].view(array.dtype).reshape(array.shape)
        copy[...] = array
        return copy

    def _is_polled(self, nbytes: int) -> bool:
        return self._world.num_nodes > 1 and nbytes >= POLL_FROM_BYTES

    def _combine(self, native: MPI.Op, source: Array, target: Array) -> None:
        """All-reduce by MPI's blocking collectives."""
        for given, result in self._parts(source, target):
            self.group.comm.Allreduce(given, result, native)
        self._note(source.nbytes)

    def _parts(self, source: Array, target: Array) -> list[tuple[Any, Array]]:
        """Return the send and receive buffer of each call of MPI."""
        from mpi4py import MPI

        in_place = np.may_share_memory(source, target)  # they are equal: others that overlap have been copied
        source = source.view(target.dtype)  # equal dtypes of NumPy may be different datatypes of MPI
        if source.nbytes <= self._limit_bytes:
            return [(MPI.IN_PLACE if in_place else source, target)] if source.size else []
        pairs = zip(self._split(source.reshape(-1)), self._split(target.reshape(-1)), strict=True)
        return [(MPI.IN_PLACE if in_place else part, result) for part, result in pairs]

    def _note(self, nbytes: int) -> None:
        if self._world.num_nodes > 1 or self._window is None or self._passes(nbytes):
            self._call.add_unconfirmed(nbytes)

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
        info = MPI.Info.Create(openmpi.WITHOUT_HAN if _may_advise(hierarchy) else {})
        self._own.append(ordered.Dup_with_info(info))
        info.Free()
        ordered.Free()
        return Group(self._own[0], "world by nodes", ranks, hierarchy.call)


def _copy(source: Array, target: Array | None = None) -> Array:
    """All-reduce over a single rank."""
    if target is None:
        target = np.empty(source.shape, source.dtype)
    target[...] = source
    return target


def _nbytes(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    return prod(shape) * dtype.itemsize


def _may_advise(hierarchy: Hierarchy) -> bool:
    """Return whether all ranks run the Open MPI of the wheel, and the user has not selected components."""
    from mpi4py import MPI

    is_known = MPI.get_vendor()[0] == "Open MPI" and openmpi.has_wheel(os.environ)
    return hierarchy.all_agree(is_known and not openmpi.has_chosen_collectives(os.environ))
