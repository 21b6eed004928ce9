"""`nccl.bindings.nccl` as of nccl4py 0.6, over the stand-in for CuPy's binding: what this library calls of it.

Communicators are handles, types and operations are numbers, as there.
"""

from __future__ import annotations

import pickle
import sys
from enum import IntEnum
from types import ModuleType
from typing import Any
from unittest.mock import patch

from mpistrat.transports.nccl_bindings import Nccl4py
from tests.gpu.stand_in_nccl import StandInNccl

ID_BYTES, SUCCESS, FAILED = 128, 0, 3

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


class FakeNccl4py(ModuleType):
    """A module to put into `sys.modules`; `library` does the work, and counts it."""

    DataType, RedOp, UniqueId, NCCLError = DataType, RedOp, UniqueId, NCCLError

    def __init__(self, library: StandInNccl) -> None:
        super().__init__("nccl.bindings.nccl")
        self.library = library
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

    def comm_abort(self, comm: Any) -> None:
        comm.abort()

    def comm_destroy(self, comm: Any) -> None:
        comm.destroy()

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
