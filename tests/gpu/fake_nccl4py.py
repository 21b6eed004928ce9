"""`nccl.bindings.nccl` as of nccl4py 0.6, over the stand-in for CuPy's binding: what this library calls of it.

Communicators are handles, types and operations are numbers, as there.
"""

from __future__ import annotations

import os
import pickle
import sys
from enum import IntEnum
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np

from mpistrat.transports.nccl_bindings import Nccl4py
from tests.gpu.stand_in import RUBBISH
from tests.gpu.stand_in_nccl import StandInNccl, await_peers

ID_BYTES, SUCCESS, FAILED, SYMMETRIC = 128, 0, 3, 1

DataType = IntEnum("DataType", "Int8 Uint8 Int32 Uint32 Int64 Uint64 Float16 Float32 Float64 Bfloat16", start=0)
RedOp = IntEnum("RedOp", "Sum Prod Max Min", start=0)


class NCCLError(Exception):
    pass


class UniqueId:
    def __init__(self, identifier: bytes) -> None:
        self._identifier = identifier

    def __bytes__(self) -> bytes:
        return self._identifier

    @staticmethod
    def from_buffer(buffer: bytearray) -> UniqueId:
        assert isinstance(buffer, bytearray), "it wants memory that can be written"
        assert len(buffer) == ID_BYTES
        return UniqueId(bytes(buffer))


class Window:
    """A window that a communicator has, unless it has ended; false where it could not be had."""

    def __init__(self, comm: Any, start: int, is_there: bool) -> None:
        self.comm, self.start, self._is_there = comm, start, is_there

    def __bool__(self) -> bool:
        return self._is_there


class FakeNccl4py(ModuleType):
    """A module to put into `sys.modules`; `library` does the work, and counts it."""

    DataType, RedOp, UniqueId, NCCLError = DataType, RedOp, UniqueId, NCCLError

    def __init__(self, library: StandInNccl) -> None:
        super().__init__("nccl.bindings.nccl")
        self.library = library
        self.memory: dict[int, np.ndarray] = {}
        self.windows: list[Window] = []
        self.registered = 0  # how often
        self.ended: list[str] = []
        self.has_windows, self.problem = True, ""
        self.group_start, self.group_end, self.get_version = library.groupStart, library.groupEnd, library.get_version

    def get_unique_id(self) -> UniqueId:
        return UniqueId(pickle.dumps(self.library.get_unique_id()).ljust(ID_BYTES, b"\0"))

    def comm_init_rank(self, nranks: int, comm_id: UniqueId, rank: int) -> Any:
        return self.library.NcclCommunicator(nranks, pickle.loads(bytes(comm_id)), rank)

    def comm_get_async_error(self, comm: Any) -> int:
        try:
            comm.check_async_error()
        except RuntimeError:
            return FAILED
        return SUCCESS

    def check_status(self, status: int) -> None:
        if status != SUCCESS:
            raise NCCLError(f"InternalError ({status}): {self.library.error}")

    def comm_revoke(self, comm: Any, revoke_flags: int) -> None:
        assert (revoke_flags, comm.is_over) == (0, False)
        self.ended.append("revoked")
        comm.is_over = True

    def comm_abort(self, comm: Any) -> None:
        self.ended.append("aborted")
        comm.abort()

    def comm_destroy(self, comm: Any) -> None:
        comm.destroy()

    def mem_alloc(self, size: int) -> int:
        self.library.device.keep(memory := np.full(size, RUBBISH, np.uint8))
        self.memory[memory.ctypes.data] = memory
        return memory.ctypes.data

    def mem_free(self, ptr: int) -> None:
        is_used = any(window.start == ptr and not window.comm.is_over for window in self.windows)
        if is_used:  # nobody sees what a finalizer raises
            self.library.device.errors.append("memory of a window was freed")
        del self.memory[ptr]

    def comm_window_register(self, comm: Any, buff: int, size: int, win_flags: int) -> Window:
        assert win_flags == SYMMETRIC
        assert self.memory[buff].nbytes == size, "only whole memory from mem_alloc is symmetric"
        if os.environ.get("NCCL_WIN_ENABLE") == "0":
            return Window(comm, 0, False)
        sizes = np.empty(comm.comm.size, np.int64)
        await_peers([comm.comm.Iallgather(np.array([size]), sizes)], "window")
        assert len(set(sizes)) == 1, "windows have one size on all ranks"
        if self.problem:
            raise NCCLError(self.problem)
        self.registered += 1
        self.windows += [window := Window(comm, buff, self.has_windows)] if self.has_windows else []
        return window if self.has_windows else Window(comm, 0, False)

    def comm_window_deregister(self, comm: Any, win: Window) -> None:
        assert not comm.is_over, "a window of a communicator that has ended"
        self.windows.remove(win)

    def all_reduce(self, sendbuff: int, recvbuff: int, count: int, datatype: int, op: int, comm: Any, stream: int) -> None:
        comm.allReduce(sendbuff, recvbuff, count, self._type(datatype), self._op(op), stream)

    def reduce(
        self, sendbuff: int, recvbuff: int, count: int, datatype: int, op: int, root: int, comm: Any, stream: int
    ) -> None:
        comm.reduce(sendbuff, recvbuff, count, self._type(datatype), self._op(op), root, stream)

    def broadcast(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, comm: Any, stream: int) -> None:
        comm.broadcast(sendbuff, recvbuff, count, self._type(datatype), root, stream)

    def reduce_scatter(
        self, sendbuff: int, recvbuff: int, recvcount: int, datatype: int, op: int, comm: Any, stream: int
    ) -> None:
        comm.reduceScatter(sendbuff, recvbuff, recvcount, self._type(datatype), self._op(op), stream)

    def all_gather(self, sendbuff: int, recvbuff: int, sendcount: int, datatype: int, comm: Any, stream: int) -> None:
        comm.allGather(sendbuff, recvbuff, sendcount, self._type(datatype), stream)

    def send(self, sendbuff: int, count: int, datatype: int, peer: int, comm: Any, stream: int) -> None:
        comm.send(sendbuff, count, self._type(datatype), peer, stream)

    def recv(self, recvbuff: int, count: int, datatype: int, peer: int, comm: Any, stream: int) -> None:
        comm.recv(recvbuff, count, self._type(datatype), peer, stream)

    def _type(self, number: int) -> Any:
        return getattr(self.library, f"NCCL_{DataType(number).name.upper()}")

    def _op(self, number: int) -> Any:
        return getattr(self.library, f"NCCL_{RedOp(number).name.upper()}")


def modules(library: StandInNccl) -> dict[str, ModuleType]:
    """Return what an import of it finds, for `sys.modules`."""
    package, bindings, fake = ModuleType("nccl"), ModuleType("nccl.bindings"), FakeNccl4py(library)
    package.bindings, bindings.nccl = bindings, fake  # type: ignore[attr-defined]
    return {"nccl": package, "nccl.bindings": bindings, "nccl.bindings.nccl": fake}


def bound_by(library: StandInNccl, name: str) -> Any:
    """Return a binding of a stand-in for NCCL, by its name."""
    with patch.dict(sys.modules, modules(library)):
        return {"CuPy": lambda: library, "nccl4py": Nccl4py}[name]()
