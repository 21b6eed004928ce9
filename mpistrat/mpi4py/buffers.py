"""Buffer: what mpi4py takes as one, an object or a list of it with a count, a displacement and a datatype, read as an array."""

from __future__ import annotations

from functools import cache
from operator import index
from typing import Any

import numpy as np
from mpi4py import MPI

from mpistrat.arrays import Array, as_array, is_on_device
from mpistrat.errors import InvalidArgumentError, UnsupportedDtypeError
from mpistrat.reduction import ReduceOp, check_dtype

_DTYPES = {MPI.Datatype.fromcode(code).handle: np.dtype(code) for code in "bhilqBHILQfdFD"}


class Buffer:
    """A part of memory that is sent or received, as `blocks` equal blocks, one for each rank; a count that is given is of one.

    Given is an array, or anything with a buffer interface; or ``[array, datatype]``, ``[array, count]``,
    ``[array, count, datatype]`` or ``[array, count, displacement, datatype]``, where ``(count, displacement)`` may stand for
    the count. If it is none of these, it raises what mpi4py raises: ValueError, TypeError, KeyError or BufferError.
    """

    def __init__(self, given: Any, blocks: int = 1) -> None:
        obj, count, displacement, datatype = _parts(given)
        flat = _flat(obj, count)
        extent = flat.itemsize if datatype is None else datatype.extent
        if displacement < 0 or (count is not None and count < 0):
            raise ValueError(f"count and displacement must not be negative; got {count} and {displacement}")
        self._memory = flat.view(np.uint8)[displacement * extent :]
        if count is None:
            if not extent or self._memory.nbytes % (extent * blocks):
                raise ValueError(f"{self._memory.nbytes} bytes are not elements of {extent} bytes for each of {blocks} ranks")
            count = self._memory.nbytes // (extent * blocks)
        self._memory = self._memory[: count * blocks * extent]
        if self._memory.nbytes < count * blocks * extent:
            raise ValueError(f"{self._memory.nbytes} bytes are less than {count * blocks} elements of {extent} bytes")
        self._dtype = flat.dtype if datatype is None else _dtype_of(datatype)
        self._gapped = datatype if self._dtype is None else None
        if self._gapped is not None and is_on_device(flat):  # an MPI that is not CUDA-aware would crash packing it
            raise InvalidArgumentError(
                "memory of a GPU is taken with datatypes without gaps only, such as MPI.FLOAT: copy what is to be sent to a "
                "contiguous array, with numpy-like slices"
            )

    def numbers(self, op: ReduceOp) -> Array | None:
        """Return the elements, without a copy; None if `op` is not defined for them here: on all ranks or on none."""
        if self._dtype is None or not _is_combined(op, self._dtype):
            return None
        return self._memory.view(self._dtype)

    def contents(self, comm: MPI.Comm) -> Array:
        """Return the bytes that are sent: where they lie, or, of a datatype that may have gaps, a packed copy."""
        packed = self._packed()
        if self._gapped is not None and packed.size:
            _check_packed(self._gapped.Pack(self._memory, packed, 0, comm), packed)
        return packed

    def receive_memory(self) -> Array:
        """Return where bytes may be received: in the buffer, or in new memory from which `put` unpacks them."""
        check_writable(self._memory)
        return self._packed()

    def put(self, received: Array, comm: MPI.Comm) -> None:
        """Unpack bytes that were received in memory of `receive_memory`, if that is not the buffer itself."""
        if self._gapped is not None and received.size:
            _check_packed(self._gapped.Unpack(received, 0, self._memory, comm), received)

    def _packed(self) -> Array:
        if self._gapped is None:
            return self._memory
        return np.empty(self._memory.nbytes // self._gapped.extent * self._gapped.size, np.uint8)


def numbers_of(given: Any, op: ReduceOp, blocks: int = 1) -> Array | None:
    """Return what ``Buffer(given, blocks).numbers(op)`` does; of a contiguous array of NumPy sooner."""
    given = unwrapped(given)
    if type(given) is np.ndarray and given.flags.c_contiguous and not given.size % blocks:
        return given.reshape(-1) if _is_combined(op, given.dtype) else None
    return Buffer(given, blocks).numbers(op)


def check_writable(array: Array) -> None:
    """Check that a buffer can be received into; a BufferError, as of mpi4py, if it is read-only."""
    if not getattr(array.flags, "writeable", True):  # CuPy has no read-only arrays
        raise BufferError("a buffer that is received into must be writable; pass x.copy()")


def unwrapped(given: Any) -> Any:
    """Return the array of ``[array, datatype]`` or ``[array, count, datatype]`` that mean all of it as it is, else `given`."""
    if type(given) in (list, tuple) and 2 <= len(given) <= 3:
        array, datatype = given[0], given[-1]
        is_whole = type(array) is np.ndarray and (len(given) == 2 or (type(given[1]) is int and given[1] == array.size))
        if is_whole and isinstance(datatype, MPI.Datatype) and _DTYPES.get(datatype.handle) == array.dtype:
            return array
    return given


def is_in_place(given: object) -> bool:
    """Return whether an argument means MPI's in-place option."""
    return given is None or given is MPI.IN_PLACE


def _parts(given: Any) -> tuple[Any, int | None, int, MPI.Datatype | None]:
    """Return the object, count, displacement and datatype of a buffer specification."""
    if not isinstance(given, (list, tuple)):
        return given, None, 0, None
    obj, *others = given
    datatype = None
    if others and isinstance(others[-1], (MPI.Datatype, str)):
        named = others.pop()
        datatype = MPI.Datatype.fromcode(named) if isinstance(named, str) else named
    if len(others) == 1 and isinstance(others[0], (list, tuple)):
        others = list(others[0])
    if len(others) > 2 or len(given) < 2:
        raise ValueError(f"a buffer is given as an array, or a list of 2 to 4 items; got {len(given)}")
    count, displacement = [None if other is None else index(other) for other in (*others, None, None)[:2]]
    return obj, count, displacement or 0, datatype


@cache
def _is_combined(op: ReduceOp, dtype: np.dtype[Any]) -> bool:
    """Return whether elements are numbers that `op` combines; of booleans MPI has operations of its own."""
    try:
        check_dtype(op, dtype)
    except UnsupportedDtypeError:
        return False
    return dtype.kind != "b"


def _flat(obj: Any, count: int | None) -> Array:
    """Return the memory of a contiguous object as an array with one axis."""
    if obj is MPI.BOTTOM or obj is None:
        if obj is None and count == 0:
            return np.empty(0, np.uint8)
        raise InvalidArgumentError("MPI.BOTTOM is not taken here: pass the array that the datatype describes")
    array = _shared(obj)
    if not array.flags.c_contiguous:
        array = array.T
    if not array.flags.c_contiguous:
        raise BufferError("a buffer must be contiguous; pass numpy.ascontiguousarray(x) to send it")
    return array.reshape(-1)


def _shared(obj: Any) -> Array:
    """Return an array that shares the memory of an object."""
    if isinstance(obj, np.ndarray):
        return as_array(obj, "the buffer") if isinstance(obj, np.ma.MaskedArray) else obj.view(np.ndarray)
    if hasattr(obj, "__cuda_array_interface__") or hasattr(obj, "__dlpack__"):
        array = as_array(obj, "the buffer")
        if is_on_device(array) or array.flags.writeable or hasattr(obj, "__array__"):
            return array
        # DLPack before 1.0 does not tell whether memory may be written: NumPy says no, mpi4py yes
        return np.asarray(MPI.buffer(obj)).view(array.dtype)
    shared: Array = np.asarray(memoryview(obj))  # what has no buffer, such as a number, raises
    return shared


def _dtype_of(datatype: MPI.Datatype) -> np.dtype[Any] | None:
    """Return the dtype of a datatype of MPI that is that of an array's elements."""
    if not datatype.is_predefined or datatype.size != datatype.extent:
        return None
    return np.dtype(datatype.typestr)


def _check_packed(position: int, packed: Array) -> None:
    """Check that MPI packs or unpacks the bytes of a datatype, and nothing else."""
    if position != packed.nbytes:
        raise ValueError(f"this MPI packs {packed.nbytes} bytes of the datatype as {position}, which other ranks do not expect")
