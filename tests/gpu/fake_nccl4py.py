"""`nccl.bindings.nccl` as of nccl4py 0.6, over the stand-in for CuPy's binding: what this library calls of it.

Communicators are handles, types and operations are numbers, as there.
"""

import os
import pickle
import sys
from enum import IntEnum
from types import ModuleType
from unittest.mock import patch

import numpy as np

from mpistrat.transports.nccl_bindings import Nccl4py
from tests.gpu.stand_in import RUBBISH
from tests.gpu.stand_in_nccl import await_peers

ID_BYTES, SUCCESS, FAILED, SYMMETRIC = 128, 0, 3, 1

DataType = IntEnum("DataType", "Int8 Uint8 Int32 Uint32 Int64 Uint64 Float16 Float32 Float64 Bfloat16", start=0)
RedOp = IntEnum("RedOp", "Sum Prod Max Min", start=0)


class NCCLError(Exception):
    pass


class UniqueId:
    def __init__(self, identifier):
        self._identifier = identifier

    def __bytes__(self):
        return self._identifier

    @staticmethod
    def from_buffer(buffer):
        assert isinstance(buffer, bytearray), "it wants memory that can be written"
        assert len(buffer) == ID_BYTES
        return UniqueId(bytes(buffer))


class Window:
    """A window that a communicator has, unless it has ended, at a place of its address space; false if it could not be had."""

    def __init__(self, comm, start, is_there, place=-1):
        self.comm, self.start, self._is_there, self.place = comm, start, is_there, place

    def __bool__(self):
        return self._is_there


class FakeNccl4py(ModuleType):
    """A module to put into `sys.modules`; `library` does the work, and counts it."""

    DataType, RedOp, UniqueId, NCCLError = DataType, RedOp, UniqueId, NCCLError

    def __init__(self, library):
        super().__init__("nccl.bindings.nccl")
        self.library = library
        self.memory: dict[int, np.ndarray] = {}
        self.windows: list[Window] = []
        self.registered = 0  # how often
        self.ended: list[str] = []
        self.has_windows, self.problem = True, ""
        self.group_start, self.group_end, self.get_version = library.groupStart, library.groupEnd, library.get_version

    def get_unique_id(self):
        return UniqueId(pickle.dumps(self.library.get_unique_id()).ljust(ID_BYTES, b"\0"))

    def comm_init_rank(self, nranks, comm_id, rank):
        return self.library.NcclCommunicator(nranks, pickle.loads(bytes(comm_id)), rank)

    def comm_get_async_error(self, comm):
        try:
            comm.check_async_error()
        except RuntimeError:
            return FAILED
        return SUCCESS

    def check_status(self, status):
        if status != SUCCESS:
            raise NCCLError(f"InternalError ({status}): {self.library.error}")

    def comm_revoke(self, comm, revoke_flags):
        assert (revoke_flags, comm.is_over) == (0, False)
        self.ended.append("revoked")
        comm.is_over = True

    def comm_abort(self, comm):
        self.ended.append("aborted")
        comm.abort()

    def comm_destroy(self, comm):
        comm.destroy()

    def mem_alloc(self, size):
        self.library.device.keep(memory := np.full(size, RUBBISH, np.uint8))
        self.memory[memory.ctypes.data] = memory
        return memory.ctypes.data

    def mem_free(self, ptr):
        is_used = any(window.start == ptr and not window.comm.is_over for window in self.windows)
        if is_used:  # nobody sees what a finalizer raises
            self.library.device.errors.append("memory of a window was freed")
        self.memory.pop(ptr)[...] = RUBBISH

    def comm_window_register(self, comm, buff, size, win_flags):
        assert win_flags == SYMMETRIC
        assert self.memory[buff].nbytes == size, "only whole memory from mem_alloc is symmetric"
        if os.environ.get("NCCL_WIN_ENABLE") == "0":
            return Window(comm, 0, False)
        taken = {window.place for window in self.windows if window.comm is comm}
        place = next(place for place in range(len(taken) + 1) if place not in taken)  # each rank finds one by itself
        found = np.empty((comm.comm.size, 2), np.int64)
        await_peers([comm.comm.Iallgather(np.array([size, place]), found)], "window")
        assert (found == found[0]).all(), "windows have one size on all ranks, and lie at one place: kernels would miss them"
        if self.problem:
            raise NCCLError(self.problem)
        self.registered += 1
        window = Window(comm, buff, self.has_windows, place)
        self.windows += [window] if window else []
        return window

    def comm_window_deregister(self, comm, win):
        assert not comm.is_over, "a window of a communicator that has ended"
        self.windows.remove(win)

    def all_reduce(self, sendbuff, recvbuff, count, datatype, op, comm, stream):
        comm.allReduce(sendbuff, recvbuff, count, self._type(datatype), self._op(op), stream)

    def reduce(self, sendbuff, recvbuff, count, datatype, op, root, comm, stream):
        comm.reduce(sendbuff, recvbuff, count, self._type(datatype), self._op(op), root, stream)

    def broadcast(self, sendbuff, recvbuff, count, datatype, root, comm, stream):
        comm.broadcast(sendbuff, recvbuff, count, self._type(datatype), root, stream)

    def reduce_scatter(self, sendbuff, recvbuff, recvcount, datatype, op, comm, stream):
        comm.reduceScatter(sendbuff, recvbuff, recvcount, self._type(datatype), self._op(op), stream)

    def all_gather(self, sendbuff, recvbuff, sendcount, datatype, comm, stream):
        comm.allGather(sendbuff, recvbuff, sendcount, self._type(datatype), stream)

    def send(self, sendbuff, count, datatype, peer, comm, stream):
        comm.send(sendbuff, count, self._type(datatype), peer, stream)

    def recv(self, recvbuff, count, datatype, peer, comm, stream):
        comm.recv(recvbuff, count, self._type(datatype), peer, stream)

    def _type(self, number):
        return getattr(self.library, f"NCCL_{DataType(number).name.upper()}")

    def _op(self, number):
        return getattr(self.library, f"NCCL_{RedOp(number).name.upper()}")


def modules(library):
    """Return what an import of it finds, for `sys.modules`."""
    package, bindings, fake = ModuleType("nccl"), ModuleType("nccl.bindings"), FakeNccl4py(library)
    package.bindings, bindings.nccl = bindings, fake  # type: ignore[attr-defined]
    return {"nccl": package, "nccl.bindings": bindings, "nccl.bindings.nccl": fake}


def bound_by(library, name):
    """Return a binding of a stand-in for NCCL, by its name."""
    with patch.dict(sys.modules, modules(library)):
        return {"CuPy": lambda: library, "nccl4py": Nccl4py}[name]()
