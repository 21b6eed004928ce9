"""Bindings of NCCL: NVIDIA's own, nccl4py, under the names that CuPy's has, or CuPy's.

nccl4py is called by its lower half, `nccl.bindings`: the upper one, `nccl.core`, looks for DLPack in every call. Beyond what
CuPy's binding has, it registers memory of NCCL in windows, which have the same layout on all ranks: NCCL has faster kernels for
buffers there, and lets the switches of NVLink add.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np

from mpistrat.device.cuda import Allocator
from mpistrat.device.kernels import fold_name
from mpistrat.errors import TransportError
from mpistrat.reduction import HALF_DTYPES, ReduceOp

GRACE_SECONDS = 0.25  # in which peers learn that a communicator is given up
_FIRST_WITH_REVOKE = 22807
_SYMMETRIC = 1  # NCCL_WIN_COLL_SYMMETRIC
_VERBS = {"allReduce": "all_reduce", "reduceScatter": "reduce_scatter", "allGather": "all_gather"}
_VERBS |= {name: name for name in ("reduce", "broadcast", "send", "recv")}
_TYPES = {"int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32", "float64"}


@cache
def native_type(dtype: np.dtype[Any], op: ReduceOp) -> tuple[str, int, str] | None:
    """Return how NCCL combines such values, or None: its type, how many of these make one value, and its operation."""
    native = fold_name(dtype, op).upper()
    if dtype.kind == "b":
        return "UINT8", 1, native
    if dtype.kind == "c" and native == "SUM":
        return f"FLOAT{4 * dtype.itemsize}", 2, native
    # NCCL's minimum and maximum pass NaN over
    loses_nan = (dtype.kind == "f" or dtype in HALF_DTYPES) and op in (ReduceOp.MIN, ReduceOp.MAX)
    return None if loses_nan or dtype.name not in _TYPES else (dtype.name.upper(), 1, native)


def nccl_refusal(dtype: np.dtype[Any], op: ReduceOp) -> str:
    """Return why NCCL does not combine such values, or an empty text."""
    return "" if native_type(dtype, op) else f"NCCL does not combine {dtype} by {op.name} as this library defines it"


@contextmanager
def connecting_first() -> Iterator[None]:
    """Have NCCL connect ranks where they join, and not where it is first used; jobs that this process starts are their own."""
    name = "NCCL_RUNTIME_CONNECT"
    if name in os.environ:
        yield
        return
    os.environ[name] = "0"
    try:
        yield
    finally:
        os.environ.pop(name, None)


@cache
def find_binding() -> Any:
    """Return nccl4py's binding, where that is installed and can be used, or else CuPy's; raise ImportError without CuPy."""
    return BINDINGS["CuPy" if nccl4py_refusal() else Nccl4py.name]()


def cupy_binding() -> Any:
    """Return CuPy's binding, which has no NCCL if its `available` is False."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a missing NCCL, which `NcclTransport.probe` reports
        from cupy.cuda import nccl
    return nccl


def nccl4py_refusal() -> str:
    """Return why nccl4py cannot be used in this process, or an empty text."""
    cupy = cupy_binding()
    try:
        found = Nccl4py().get_version()
    except Exception as error:  # it may be too old, or find no libnccl
        return f"{type(error).__name__}: {error}".strip()
    known = cupy.get_version() if cupy.available else found
    return "" if known == found else f"it finds NCCL {version_text(found)}, and CuPy {version_text(known)}"


def version_text(number: int) -> str:
    """Return ``2.28.9`` for NCCL's 22809."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


class Nccl4py:
    """What `cupy.cuda.nccl` offers, by nccl4py."""

    name, available = "nccl4py", True

    def __init__(self) -> None:
        from nccl.bindings import nccl

        self._calls = nccl
        for kind in (nccl.DataType, nccl.RedOp):
            for name, member in kind.__members__.items():
                setattr(self, f"NCCL_{name.upper()}", int(member))
        self.get_version: Callable[[], int] = nccl.get_version
        self.groupStart, self.groupEnd = nccl.group_start, nccl.group_end
        self.allocator = Allocator(self._allocate, nccl.mem_free)

    def get_unique_id(self) -> bytes:
        return bytes(self._calls.get_unique_id())

    def NcclCommunicator(self, size: int, identifier: bytes, rank: int) -> _Communicator:  # noqa: N802 - CuPy's name
        # Blocking: a non-blocking one starts a thread in each call. Not split from another: aborting it can break the others.
        identifier = self._calls.UniqueId.from_buffer(bytearray(identifier))
        return _Communicator(self._calls, self._calls.comm_init_rank(size, identifier, rank))

    def _allocate(self, nbytes: int) -> int:
        try:
            return int(self._calls.mem_alloc(nbytes))
        except self._calls.NCCLError as error:
            raise MemoryError(f"{error}") from None


class _Communicator:
    """A communicator of NCCL; unlike CuPy's it is never destroyed by the garbage collector."""

    def __init__(self, calls: Any, comm: Any) -> None:
        self._calls, self._comm = calls, comm
        for name, theirs in _VERBS.items():
            setattr(self, name, _with_comm(getattr(calls, theirs), comm))

    def check_async_error(self) -> None:
        self._calls.check_status(self._calls.comm_get_async_error(self._comm))

    def register(self, start: int, nbytes: int) -> Any:
        """Return a window on memory from the allocator, false where there can be none. A collective call of equal sizes."""
        try:
            return self._calls.comm_window_register(self._comm, start, nbytes, _SYMMETRIC)
        except self._calls.NCCLError as error:
            raise TransportError(f"NCCL registers no window of {nbytes} bytes: {error}; NCCL_WIN_ENABLE=0 avoids it") from error

    def deregister(self, window: Any) -> None:
        """End a window, which nothing under way uses any more; it concerns this rank alone."""
        self._calls.comm_window_deregister(self._comm, window)

    def abort(self) -> None:
        """End what is under way, which waits for nobody, and free later what NCCL holds: kernels of the peers may still use it.

        What has been enqueued, but not begun, ends when that is freed.
        """
        try:
            if self._calls.get_version() >= _FIRST_WITH_REVOKE:
                self._calls.comm_revoke(self._comm, 0)
                time.sleep(GRACE_SECONDS)
        finally:
            self._calls.comm_abort(self._comm)

    def destroy(self) -> None:
        self._calls.comm_destroy(self._comm)


def _with_comm(call: Callable[..., None], comm: Any) -> Callable[..., None]:
    """Return a verb that is called without the communicator, which nccl4py takes before the last argument, the stream."""

    def issue(*arguments: int) -> None:
        call(*arguments[:-1], comm, arguments[-1])

    return issue


BINDINGS: dict[str, Callable[[], Any]] = {Nccl4py.name: Nccl4py, "CuPy": cupy_binding}
