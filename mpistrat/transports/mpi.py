"""mpi: MPI's own nonblocking collectives.

They do not block, so every wait can end at its deadline, or when ranks turn out to be in different calls.

Invariant: an operation starts all its calls of MPI in its first step. Ranks begin operations in one order, but advance them as
messages happen to arrive, and MPI matches the collectives of a communicator by the order in which they start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import chain, pairwise
from typing import Any

import numpy as np

from mpistrat.arrays import Array, as_bytes
from mpistrat.groups.group import Group, keep_alive_for_peers
from mpistrat.lazy import MPI
from mpistrat.reduction import ReduceOp, combine, quiet
from mpistrat.settings import MAX_MESSAGE_BYTES
from mpistrat.steps import Steps, until
from mpistrat.transports.base import Operation, Part, Transport


class MpiTransport(Transport):
    """Every verb is one call of MPI per message of at most MPISTRAT_MAX_MESSAGE_BYTES."""

    name = "mpi"

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._limit_bytes = group.settings[MAX_MESSAGE_BYTES]

    def all_reduce(self, buffer: Array, op: ReduceOp, channel: int = 0) -> Operation:
        """Bind MPI_Iallreduce, in place."""
        start, native = self.group.comm.Iallreduce, mpi_op(op, buffer.dtype)
        return _operation(buffer, [partial(start, MPI.IN_PLACE, as_message(part), native) for part in self._split(buffer)])

    def reduce_scatter(self, buffer: Array, bounds: Sequence[int], op: ReduceOp) -> Operation:
        """Bind one MPI_Ireduce per rank, to that rank."""
        native, calls = mpi_op(op, buffer.dtype), []
        for root, (start, stop) in enumerate(pairwise(bounds)):
            for message in map(as_message, self._split(buffer[start:stop])):
                sent, received = (MPI.IN_PLACE, message) if self.group.rank == root else (message, None)
                calls.append(partial(self.group.comm.Ireduce, sent, received, native, root))
        return _operation(buffer, calls)

    def all_gather(self, buffer: Array, bounds: Sequence[int]) -> Operation:
        """Bind MPI_Iallgatherv in place, or one MPI_Ibcast per rank if it would exceed the message limit."""
        comm = self.group.comm
        if buffer.nbytes <= self._limit_bytes:
            counts = [stop - start for start, stop in pairwise(bounds)]
            message = [buffer, counts, list(bounds[:-1]), mpi_datatype(buffer.dtype)]
            return _operation(buffer, [partial(comm.Iallgatherv, MPI.IN_PLACE, message)])
        calls = [
            partial(comm.Ibcast, as_message(part), root)
            for root, (start, stop) in enumerate(pairwise(bounds))
            for part in self._split(buffer[start:stop])
        ]
        return _operation(buffer, calls)

    def broadcast(self, buffer: Array, root: int = 0) -> Operation:
        """Bind MPI_Ibcast."""
        comm = self.group.comm
        return _operation(buffer, [partial(comm.Ibcast, as_message(part), root) for part in self._split(buffer)])

    def exchange(self, sends: Sequence[Array], receives: Sequence[Array]) -> Steps:
        """Send a C-contiguous array to each peer, and receive one from each. A collective call.

        There is one for each rank; this rank's own is ignored.
        """
        comm, tag, peers = self.group.comm, self.group.call.tag(0), peers_in_turn(self.group)
        arriving = (
            comm.Irecv(as_message(part), peer, tag)
            for peer in reversed(peers)
            for part in self._split(as_bytes(receives[peer]))
        )
        leaving = (comm.Isend(as_message(part), peer, tag) for peer in peers for part in self._split(as_bytes(sends[peer])))
        yield from until_complete(chain(arriving, leaving), (sends, receives))

    def _split(self, buffer: Array) -> list[Array]:
        """Split a buffer into views of at most MPISTRAT_MAX_MESSAGE_BYTES."""
        if buffer.nbytes <= self._limit_bytes:
            return [buffer] if buffer.size else []
        step = max(1, self._limit_bytes // buffer.itemsize)
        return [buffer[start : start + step] for start in range(0, buffer.size, step)]


def peers_in_turn(group: Group) -> list[int]:
    """Return the peers in the order in which a rank sends to them: each begins with the next one, not all with the same."""
    return [(group.rank + distance) % group.size for distance in range(1, group.size)]


def mpi_datatype(dtype: np.dtype[Any]) -> MPI.Datatype:
    """Return MPI's datatype for a NumPy dtype."""
    return MPI.Datatype.fromcode(dtype.char)


@cache
def mpi_op(op: ReduceOp, dtype: np.dtype[Any]) -> MPI.Op:
    """Return the MPI operation that combines `dtype` exactly as `mpistrat.reduction` defines `op`."""
    if dtype.kind == "b":
        return {ReduceOp.SUM: MPI.LOR, ReduceOp.MAX: MPI.LOR, ReduceOp.MIN: MPI.LAND, ReduceOp.PROD: MPI.LAND}[op]
    # MPI_MIN and MPI_MAX treat NaN differently for each order of ranks; Open MPI saturates sums of 8 and 16-bit integers
    order_of_nan = dtype.kind == "f" and op in (ReduceOp.MIN, ReduceOp.MAX)
    saturation = dtype.kind in "iu" and dtype.itemsize < 4 and op in (ReduceOp.SUM, ReduceOp.MEAN)
    if order_of_nan or saturation:
        return _ufunc_op(combine(op), dtype)
    sums = {ReduceOp.SUM: MPI.SUM, ReduceOp.MEAN: MPI.SUM}
    others = {ReduceOp.MIN: MPI.MIN, ReduceOp.MAX: MPI.MAX, ReduceOp.PROD: MPI.PROD}
    return (sums | others)[op]


@cache  # mpi4py allows 32 user-defined operations per process
def _ufunc_op(fold: np.ufunc, dtype: np.dtype[Any]) -> MPI.Op:
    """Return an MPI operation that applies a ufunc."""

    def combine_buffers(source: Any, inout: Any, datatype: MPI.Datatype) -> None:
        target = np.frombuffer(inout, dtype)
        quiet()(fold, np.frombuffer(source, dtype), target, out=target)

    return MPI.Op.Create(combine_buffers, commute=True)


def as_message(array: Array) -> list[Any]:
    """Return an array as a message, as MPI takes it."""
    return [array, array.size, mpi_datatype(array.dtype)]


def byte_message(array: Array) -> list[Any]:
    """Return a C-contiguous array of any dtype as a message of bytes."""
    return [as_bytes(array), array.nbytes, MPI.BYTE]


def until_complete(requests: Iterable[MPI.Request], memory: object) -> Steps:
    """Start all requests, then wait for them; if one fails, the `memory` that they work on is never freed."""
    started: list[MPI.Request] = []
    try:
        started.extend(requests)
        for request in started:
            yield from until(request.Test)
    except BaseException:  # MPI may go on reading and writing there
        keep_alive_for_peers((started, memory))
        raise


def _operation(buffer: Array, starts: Sequence[Callable[[], MPI.Request]]) -> Operation:
    return Operation(lambda: until_complete((start() for start in starts), buffer), [Part(0, buffer.size, (buffer,))])
