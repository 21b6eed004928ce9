"""mpi: buffers handed straight to MPI's own collectives.

Operations start collectives that do not block, so that every wait has its deadline and ends when ranks turn out to be in
different calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat import settings
from mpistrat.arrays import Array
from mpistrat.groups.group import Group
from mpistrat.reduction import ReduceOp, combine
from mpistrat.transports.base import Operation, Part, Transport
from mpistrat.transports.steps import WAITING, Steps, leave_to_peers

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MpiTransport", "mpi_datatype", "mpi_op", "until_complete"]


class MpiTransport(Transport):
    """Every verb is one call of MPI per message of at most MPISTRAT_MAX_MESSAGE_BYTES."""

    name = "mpi"

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._ops: dict[tuple[ReduceOp, np.dtype[Any]], MPI.Op] = {}
        self._limit_bytes = settings.MAX_MESSAGE_BYTES.read()

    @classmethod
    def probe(cls, group: Group) -> str:
        """Return an empty text: host buffers always work."""
        return ""

    def allocate(self, nbytes: int) -> Array:
        """Return ordinary memory."""
        return np.empty(nbytes, np.uint8)

    def all_reduce(self, buffer: Array, op: ReduceOp, channel: int = 0) -> Operation:
        """Bind MPI_Iallreduce, in place."""
        from mpi4py import MPI

        start, native = self.group.comm.Iallreduce, self.native_op(op, buffer.dtype)
        return _operation(buffer, [partial(start, MPI.IN_PLACE, _message(piece), native) for piece in self._pieces(buffer)])

    def reduce_scatter(self, buffer: Array, bounds: Sequence[int], op: ReduceOp) -> Operation:
        """Bind one MPI_Ireduce per part, each to the rank that owns it."""
        reductions = [
            self._reduction(piece, op, root)
            for root in range(self.group.size)
            for piece in self._pieces(buffer[bounds[root] : bounds[root + 1]])
        ]
        return _operation(buffer, reductions)

    def all_gather(self, buffer: Array, bounds: Sequence[int]) -> Operation:
        """Bind MPI_Iallgatherv in place, or one MPI_Ibcast per part where that would exceed the message limit."""
        from mpi4py import MPI

        comm = self.group.comm
        if buffer.nbytes <= self._limit_bytes:
            counts = [bounds[rank + 1] - bounds[rank] for rank in range(self.group.size)]
            message = [buffer, counts, list(bounds[:-1]), mpi_datatype(buffer.dtype)]
            return _operation(buffer, [partial(comm.Iallgatherv, MPI.IN_PLACE, message)])
        calls = [
            partial(comm.Ibcast, _message(piece), root)
            for root in range(self.group.size)
            for piece in self._pieces(buffer[bounds[root] : bounds[root + 1]])
        ]
        return _operation(buffer, calls)

    def reduce(self, buffer: Array, op: ReduceOp, root: int = 0) -> Operation:
        """Bind MPI_Ireduce, in place at the root."""
        return _operation(buffer, [self._reduction(piece, op, root) for piece in self._pieces(buffer)])

    def broadcast(self, buffer: Array, root: int = 0) -> Operation:
        """Bind MPI_Ibcast."""
        comm = self.group.comm
        return _operation(buffer, [partial(comm.Ibcast, _message(piece), root) for piece in self._pieces(buffer)])

    def _pieces(self, buffer: Array) -> list[Array]:
        """Return views that tile the buffer, each at most as long as a message may be."""
        if buffer.nbytes <= self._limit_bytes:
            return [buffer] if buffer.size else []
        step = max(1, self._limit_bytes // buffer.itemsize)
        return [buffer[start : start + step] for start in range(0, buffer.size, step)]

    def _reduction(self, piece: Array, op: ReduceOp, root: int) -> Callable[[], MPI.Request]:
        from mpi4py import MPI

        comm, native, message = self.group.comm, self.native_op(op, piece.dtype), _message(piece)
        if self.group.rank == root:
            return partial(comm.Ireduce, MPI.IN_PLACE, message, native, root)
        return partial(comm.Ireduce, message, None, native, root)

    def native_op(self, op: ReduceOp, dtype: np.dtype[Any]) -> MPI.Op:
        """Return the MPI operation for `op` on `dtype`, made once."""
        if (op, dtype) not in self._ops:
            self._ops[op, dtype] = mpi_op(op, dtype)
        return self._ops[op, dtype]


def mpi_datatype(dtype: np.dtype[Any]) -> MPI.Datatype:
    """Return MPI's name for a NumPy dtype of numbers."""
    from mpi4py import MPI

    return MPI.Datatype.fromcode(dtype.char)


def mpi_op(op: ReduceOp, dtype: np.dtype[Any]) -> MPI.Op:
    """Return the MPI operation that means what `reduction` says `op` means for `dtype`."""
    from mpi4py import MPI

    if dtype.kind == "b":
        return MPI.LOR if op in (ReduceOp.SUM, ReduceOp.MAX) else MPI.LAND
    # what MPI_MIN makes of NaN depends on the order of the ranks; Open MPI sums 8 and 16-bit integers with saturation
    order_of_nan = dtype.kind == "f" and op in (ReduceOp.MIN, ReduceOp.MAX)
    saturation = dtype.kind in "iu" and dtype.itemsize < 4 and op in (ReduceOp.SUM, ReduceOp.MEAN)
    if order_of_nan or saturation:
        return _folding(combine(op), dtype)
    sums = {ReduceOp.SUM: MPI.SUM, ReduceOp.MEAN: MPI.SUM}
    others = {ReduceOp.MIN: MPI.MIN, ReduceOp.MAX: MPI.MAX, ReduceOp.PROD: MPI.PROD}
    return (sums | others)[op]


@cache  # mpi4py can make 32 of them in a process
def _folding(fold: np.ufunc, dtype: np.dtype[Any]) -> MPI.Op:
    """Return an operation that does exactly what the ufunc does."""
    from mpi4py import MPI

    def combine_buffers(arriving: Any, kept: Any, datatype: MPI.Datatype) -> None:
        target = np.frombuffer(kept, dtype)
        fold(np.frombuffer(arriving, dtype), target, out=target)

    return MPI.Op.Create(combine_buffers, commute=True)


def _message(piece: Array) -> list[Any]:
    return [piece, piece.size, mpi_datatype(piece.dtype)]


def until_complete(request: MPI.Request, memory: object) -> Steps:
    """Wait for a request, which works on some memory."""
    try:
        while not request.Test():
            yield WAITING
    except BaseException:  # MPI may go on reading and writing there
        leave_to_peers((request, memory))
        raise


def _operation(buffer: Array, starts: Sequence[Callable[[], MPI.Request]]) -> Operation:
    def run() -> Steps:
        for start in starts:
            yield from until_complete(start(), buffer)

    return Operation(run, [Part(0, buffer.size, (buffer,))])
