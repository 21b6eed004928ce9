"""NCCL over MPI, on streams of the stand-in device: a call returns at once, and ends some time after all ranks made it.

To destroy a communicator, or to abort it, waits on the host for all of its ranks to do so; an abort for three seconds at most,
where NCCL may wait for ever. What is under way ends then, and what it should have written is rubbish.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
from mpi4py import MPI

from mpistrat.reduction import HALF_DTYPES, ReduceOp, combine
from mpistrat.transports.mpi import _ufunc_op, mpi_op
from tests.gpu.stand_in import UNFINISHED, StandInDevice

CONNECT_SECONDS, ABORT_SECONDS = 10.0, 3.0
_CONNECT_TAG, _JOIN_TAG = 1, 2

_TYPES = {"INT8": "i1", "UINT8": "u1", "INT32": "i4", "UINT32": "u4", "INT64": "i8", "UINT64": "u8", "FLOAT32": "f4"}
_TYPES |= {"FLOAT64": "f8", "FLOAT16": "f2", "BFLOAT16": "bfloat16"}

_abandoned: list[MPI.Request] = []
"""Requests of communicators that were aborted, which MPI may still work on."""


class StandInNccl:
    """What `cupy.cuda.nccl` offers."""

    available = True
    NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN = ReduceOp.SUM, ReduceOp.PROD, ReduceOp.MAX, ReduceOp.MIN

    def __init__(self, device: StandInDevice, comm: MPI.Intracomm, version: int = 23203) -> None:
        self.device, self.comm, self.version = device, comm.Dup(), version
        self.grouped: list[tuple[int, _Communicator, Callable[[], MPI.Request]]] | None = None
        self.unconnected: list[MPI.Request] = []
        self.error = ""
        self.aborted = self.destroyed = 0
        self.calls: Counter[str] = Counter()
        self.nbytes = 0  # that reductions were given
        self.communicators: list[weakref.ref[_Communicator]] = []
        self._numbers = count()
        for name, code in _TYPES.items():
            setattr(self, f"NCCL_{name}", np.dtype(code))

    def get_version(self) -> int:
        return self.version

    def get_unique_id(self) -> tuple[int, int]:
        return self.comm.rank, next(self._numbers)

    def groupStart(self) -> None:  # noqa: N802 - NCCL's names
        assert self.grouped is None
        self.grouped = []

    def groupEnd(self) -> None:  # noqa: N802
        calls, self.grouped = self.grouped, None
        assert calls, "an empty group"
        await_peers(self.unconnected, "exchange")
        [(stream, comm)] = {(stream, comm) for stream, comm, _ in calls}
        self._put(stream, comm, [start for *_, start in calls])

    def issue(self, stream: int, comm: _Communicator, start: Callable[[], MPI.Request]) -> None:
        if self.grouped is None:
            await_peers(self.unconnected, "call")
            self._put(stream, comm, [start])
        else:
            self.grouped.append((stream, comm, start))

    def _put(self, stream: int, comm: _Communicator, starts: list[Callable[[], MPI.Request]]) -> None:
        requests: list[MPI.Request] = []

        def work() -> object:
            if comm.is_over:
                _abandoned.extend(requests)
                return None
            if not requests:
                requests.extend(start() for start in starts)
            if not MPI.Request.Testall(requests):
                return UNFINISHED
            requests.clear()  # a graph does the work again
            return None

        self.device.streams[stream].put(work)

    def NcclCommunicator(self, size: int, identifier: tuple[int, int], rank: int) -> _Communicator:  # noqa: N802
        assert self.device.is_active(), "the communicator would join with GPU 0"
        members = self.comm.group.Incl(self._meet(size, *identifier, rank))
        joined = _Communicator(self, self.comm.Create_group(members))
        assert joined.comm.rank == rank
        self.communicators.append(weakref.ref(joined))
        return joined

    def _meet(self, size: int, root: int, number: int, rank: int) -> np.ndarray:
        """Return which ranks join, in their order: they tell the one that made the identifier, and that one tells all."""
        ranks, tag = np.full(size, self.comm.rank), _JOIN_TAG + number
        if self.comm.rank != root:
            told = np.array([rank, self.comm.rank])
            await_peers([self.comm.Isend(told, root, tag), self.comm.Irecv(ranks, root, tag)], "communicator")
            return ranks
        for _ in range(size - 1):
            told = np.empty(2, np.int64)
            await_peers([self.comm.Irecv(told, MPI.ANY_SOURCE, tag)], "communicator")
            ranks[told[0]] = told[1]
        await_peers([self.comm.Isend(ranks, peer, tag) for peer in ranks if peer != root], "communicator")
        return ranks


class _Communicator:
    def __init__(self, library: StandInNccl, comm: MPI.Intracomm) -> None:
        self._library, self.comm, self._ends = library, comm, comm.Dup()
        self._sent: deque[np.ndarray] = deque(maxlen=1000)
        self._connected: set[str] = set()
        self.is_over = False

    def check_async_error(self) -> None:
        self._require_open()
        if self._library.error:
            raise RuntimeError(self._library.error)

    def abort(self) -> None:
        self._library.aborted += 1
        self.is_over = True
        all_ranks, ends = self._ends.Ibarrier(), time.monotonic() + ABORT_SECONDS
        while time.monotonic() < ends and not (MPI.Is_finalized() or all_ranks.Test()):
            time.sleep(0.001)

    def destroy(self) -> None:
        self._require_open()
        self._library.destroyed += 1
        await_peers([self._ends.Ibarrier()], "destroy")
        self.is_over = True

    def __del__(self) -> None:
        if not self.is_over:
            self._library.device.errors.append("a communicator of NCCL was destroyed by the garbage collector of one rank")

    def _require_open(self) -> None:
        assert not self.is_over, "a communicator of NCCL was used after it was aborted or destroyed"

    def _connect(self, verb: str, reduced_bytes: int = 0) -> None:
        """Wait on the host for all ranks at the first call of a verb, as NCCL does."""
        self._require_open()
        self._library.nbytes += reduced_bytes
        self._library.calls[verb] += 1
        if verb not in self._connected:
            await_peers([self.comm.Ibarrier()], verb)
            self._connected.add(verb)

    def allReduce(self, send: int, receive: int, count: int, kind: Any, op: Any, stream: int) -> None:  # noqa: N802
        self._connect("allReduce", count * kind.itemsize)
        self._check_places(send, receive, count, count, kind)
        mine = lambda: self._copy(send, count, kind)  # noqa: E731
        self._issue(stream, lambda: self.comm.Iallreduce(mine(), _at(receive, count, kind), _op(op, kind)))

    def reduce(self, send: int, receive: int, count: int, kind: Any, op: Any, root: int, stream: int) -> None:
        self._connect("reduce", count * kind.itemsize)
        is_root = self.comm.rank == root  # only there something is written
        self._check_places(send, receive if is_root else send, count, count, kind)
        target = lambda: _at(receive, count, kind) if is_root else None  # noqa: E731
        self._issue(stream, lambda: self.comm.Ireduce(self._copy(send, count, kind), target(), _op(op, kind), root))

    def broadcast(self, send: int, receive: int, count: int, kind: Any, root: int, stream: int) -> None:
        self._connect("broadcast")
        is_root = self.comm.rank == root  # only there it reads what is to be sent
        self._check_places(send if is_root else receive, receive, count, count, kind)

        def start() -> MPI.Request:
            if is_root and count:
                ctypes.memmove(receive, send, count * kind.itemsize)
            return self.comm.Ibcast(_at(receive, count, kind), root)

        self._issue(stream, start)

    def reduceScatter(self, send: int, receive: int, count: int, kind: Any, op: Any, stream: int) -> None:  # noqa: N802
        whole = count * self.comm.size
        self._connect("reduceScatter", whole * kind.itemsize)
        self._check_places(send, receive, whole, count, kind)
        mine, scatter = lambda: self._copy(send, whole, kind), self.comm.Ireduce_scatter_block
        self._issue(stream, lambda: scatter(mine(), _at(receive, count, kind), _op(op, kind)))

    def allGather(self, send: int, receive: int, count: int, kind: Any, stream: int) -> None:  # noqa: N802
        self._connect("allGather")
        whole = count * self.comm.size
        self._check_places(receive, send, whole, count, kind)
        self._issue(stream, lambda: self.comm.Iallgather(self._copy(send, count, kind), _at(receive, whole, kind)))

    def send(self, send: int, count: int, kind: Any, peer: int, stream: int) -> None:
        self._pair(self.comm.Issend, "send", peer)
        self._issue(stream, lambda: self.comm.Isend(self._copy(send, count, kind), peer))

    def recv(self, receive: int, count: int, kind: Any, peer: int, stream: int) -> None:
        self._pair(self.comm.Irecv, "recv", peer)
        self._issue(stream, lambda: self.comm.Irecv(_at(receive, count, kind), peer))

    def _pair(self, start: Callable[..., MPI.Request], verb: str, peer: int) -> None:
        """Have the call, or its group, wait on the host for a peer that nothing was sent to, or received from, before."""
        self._require_open()
        self._library.calls[verb] += 1
        if f"{verb} {peer}" not in self._connected:
            self._library.unconnected.append(start(np.empty(0, np.uint8), peer, _CONNECT_TAG))
            self._connected.add(f"{verb} {peer}")

    def _check_places(self, whole: int, part: int, elements: int, part_elements: int, kind: np.dtype) -> None:
        """Check that the shorter memory is this rank's place in the longer one, which is NCCL's way in place, or apart."""
        own = self.comm.rank * part_elements * kind.itemsize if elements != part_elements else 0
        is_apart = part + part_elements * kind.itemsize <= whole or whole + elements * kind.itemsize <= part
        assert part == whole + own or is_apart, "NCCL gives wrong values where memory overlaps otherwise"

    def _copy(self, address: int, count: int, kind: np.dtype) -> np.ndarray:
        """Return what is there now; mpi4py keeps no hold of what it sends."""
        self._sent.append(_at(address, count, kind).copy())
        return self._sent[-1]

    def _issue(self, stream: int, start: Callable[[], MPI.Request]) -> None:
        self._library.issue(stream, self, start)


def await_peers(requests: list[MPI.Request], verb: str) -> None:
    """Wait on the host, and forget the requests."""
    ends = time.monotonic() + CONNECT_SECONDS
    while not MPI.Request.Testall(requests):
        assert time.monotonic() < ends, f"NCCL blocks in the first {verb}: not all ranks have come"
    requests.clear()


def _at(address: int, count: int, kind: np.dtype) -> np.ndarray:
    """Return memory, 16-bit floats as integers: MPI has no such type."""
    kind = np.dtype(np.uint16) if kind in HALF_DTYPES else kind
    if not count:
        return np.empty(0, kind)
    return np.frombuffer((ctypes.c_char * (count * kind.itemsize)).from_address(address), kind)


def _op(op: ReduceOp, kind: np.dtype) -> MPI.Op:
    """Return MPI's operation; 16-bit floats are rounded after each, as by NCCL."""
    return _ufunc_op(combine(op), kind) if kind in HALF_DTYPES else mpi_op(op, kind)
