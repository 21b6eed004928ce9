"""WrappedIntracomm: mpi4py's, with collectives of a `mpistrat.Communicator`; its requests, and the buffers that it takes.

Invariant: whether a call is made here or by MPI follows only from what MPI requires to be the same on all ranks: the
operation, the datatype, and which calls were made before. Where MPI makes a reduction, ranks compare that first, so that no two
ranks are on different sides unnoticed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, partial, wraps
from operator import index
from typing import Any, Literal

import numpy as np
from mpi4py import MPI

from mpistrat.arrays import Array, as_array, as_target, is_a, is_aligned, is_on_device
from mpistrat.communicator.communicator import Communicator
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.communicator.passing import Passing
from mpistrat.communicator.validate import check_comm
from mpistrat.errors import InvalidArgumentError, UnsupportedDtypeError
from mpistrat.execution.engine import Work
from mpistrat.reduction import ReduceOp, check_dtype
from mpistrat.steps import until

_OPS = {
    MPI.SUM.handle: ReduceOp.SUM,
    MPI.PROD.handle: ReduceOp.PROD,
    MPI.MIN.handle: ReduceOp.MIN,
    MPI.MAX.handle: ReduceOp.MAX,
}
_DTYPES = {MPI.Datatype.fromcode(code).handle: np.dtype(code) for code in "bhilqBHILQfdFD"}
# of which mpi4py has it that they are integers
_NO_NUMBERS = {kind.handle for kind in (MPI.LOGICAL, MPI.LOGICAL1, MPI.LOGICAL2, MPI.LOGICAL4, MPI.LOGICAL8, MPI.PACKED)}
# what returns another communicator; that of `Dup` is of the class of the one that is duplicated
_DERIVING = (
    "Clone",
    "Create",
    "Create_cart",
    "Create_dist_graph",
    "Create_dist_graph_adjacent",
    "Create_graph",
    "Create_group",
    "Dup",
    "Dup_with_info",
    "Idup",
    "Idup_with_info",
    "Split",
    "Split_type",
    "Sub",
)


class WrappedIntracomm(MPI.Intracomm):
    """An ``MPI.Intracomm`` whose methods below are made by a `mpistrat.Communicator`; all others are MPI's.

    They take what those of mpi4py take, ``MPI.IN_PLACE`` and lists with a count and a datatype too, write to the receive
    buffer without a copy, and return when it may be read. Ranks compare them: where they differ all raise AgreementError. What
    one rank alone finds wrong, such as buffers of different lengths, it raises as mpi4py does, and the others AgreementError.

    A reduction by another operation than SUM, PROD, MIN and MAX, or of other elements than numbers, is made by MPI, after
    ranks have compared that they make it. So is an ``Iallreduce`` of a communicator that was derived, by ``Split`` say, and
    has made no other collective of these yet: the first one makes its `mpistrat.Communicator`, which takes all its ranks.
    """

    _options: CommunicationOptions | None = None
    _communicator: Communicator | None = None
    _passing: Passing
    _all_reduce: Callable[[Any, Any, MPI.Op], None]

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what it is restored from, if mpi4py restores what it wraps; its collectives are prepared anew then."""
        return wrapped, (_kind(self)(self), self._options)

    def open(self) -> Communicator:
        """Return what makes the collectives; the first call makes that, and is a collective one."""
        if self._communicator is None:
            self._communicator = Communicator(self, self._options)
            self._passing = self._communicator.pass_small_arrays()
            self._all_reduce = self._passing.caller(self._communicator.run_known, unwrapped, self._all_reduce_anew)
            # one call less, where neither a subclass nor a tracer has another one
            if type(self).Allreduce is WrappedIntracomm.Allreduce and "Allreduce" not in vars(self):
                self.Allreduce = self._all_reduce  # type: ignore[method-assign]
        return self._communicator

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> None:  # noqa: N802 - MPI's name
        """Combine arrays of all ranks; each gets the result in `recvbuf`. A collective call."""
        self.open()
        self._all_reduce(sendbuf, recvbuf, op)

    def _all_reduce_anew(self, sendbuf: Any, recvbuf: Any, op: MPI.Op) -> None:
        """Combine arrays unlike those of earlier calls."""
        target = self._combine("Allreduce", self.open().all_reduce, sendbuf, recvbuf, op)
        if target is None:
            super().Allreduce(sendbuf, recvbuf, op)
        else:
            self._passing.add(op.handle, _OPS[op.handle], target)

    def Iallreduce(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> MPI.Request:  # noqa: N802
        """Start what `Allreduce` does, and return a request. A collective call."""
        communicator = self._communicator
        if communicator is None:
            return super().Iallreduce(sendbuf, recvbuf, op)
        with communicator.refusing("Iallreduce"):
            operands = self._operands(sendbuf, recvbuf, op)
        if operands is None:
            communicator.note("Iallreduce by MPI")  # compared with the next collective: to compare it now would wait
            return super().Iallreduce(sendbuf, recvbuf, op)
        reduce_op, source, target = operands
        memory = target if is_aligned(target) else np.empty_like(target)
        deliver = _nothing if memory is target else partial(np.copyto, target, memory)
        return WorkRequest.of(partial(communicator.start_all_reduce, reduce_op, source, out=memory), deliver)

    def Reduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> None:  # noqa: N802
        """Combine arrays of all ranks; each gets its part, of equal lengths, in `recvbuf`. A collective call."""
        communicator = self.open()
        if self._combine("Reduce_scatter_block", communicator.reduce_scatter, sendbuf, recvbuf, op, self.size) is None:
            super().Reduce_scatter_block(sendbuf, recvbuf, op)

    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:  # noqa: N802
        """Gather the elements of all ranks, in rank order, in `recvbuf` of each. A collective call."""
        communicator = self.open()
        with communicator.refusing("Allgather"):
            target = Buffer(recvbuf, self.size)
            memory = target.receive_memory()
            share = len(memory) // self.size
            if is_in_place(sendbuf):
                first = self.rank * share
                contents = target.contents(self)[first : first + share]
            else:
                contents = Buffer(sendbuf).contents(self)
            if len(contents) != share:
                raise ValueError(f"each rank sends {len(contents)} bytes, and receives {share} from each")
        communicator.all_gather(contents, out=memory)
        target.put(memory, self)
        _finish(communicator, memory)

    def Bcast(self, buf: Any, root: int = 0) -> None:  # noqa: N802
        """Send the elements of rank `root` to `buf` of all. A collective call."""
        communicator = self.open()
        with communicator.refusing("Bcast"):
            buffer = Buffer(buf)
            memory = buffer.contents(self) if self.rank == root else buffer.receive_memory()
        communicator.broadcast(memory, root, out=None if self.rank == root else memory)
        if self.rank != root:
            buffer.put(memory, self)
            _finish(communicator, memory)

    def Barrier(self) -> None:  # noqa: N802
        """Wait until all ranks have come here. A collective call."""
        self.open().barrier()

    barrier = Barrier  # ranks may mix them

    def Free(self) -> None:  # noqa: N802
        """Free the communicator, and what makes its collectives. A collective call."""
        self._close()
        super().Free()

    def Disconnect(self) -> None:  # noqa: N802
        """Do what `Free` does, after all that is under way. A collective call."""
        self._close()
        super().Disconnect()

    def _close(self) -> None:
        if self._communicator is not None:
            self._communicator.close()
        vars(self).pop("Allreduce", None)  # it holds what it calls, which holds this

    def _combine(
        self, name: str, verb: Callable[..., Any], sendbuf: Any, recvbuf: Any, op: MPI.Op, blocks: int = 1
    ) -> Array | None:
        """Combine arrays by a verb of the communicator, and return the result; None if ranks have agreed that MPI does."""
        communicator = self.open()
        with communicator.refusing(name):
            operands = self._operands(sendbuf, recvbuf, op, blocks)
        if operands is None:
            communicator.agree(f"{name} by MPI")
            return None
        reduce_op, source, target = operands
        if is_aligned(target):
            verb(reduce_op, source, out=target)
        else:
            target[...] = verb(reduce_op, source)
        _finish(communicator, target)
        return target

    def _operands(self, sendbuf: Any, recvbuf: Any, op: MPI.Op, blocks: int = 1) -> tuple[ReduceOp, Array, Array] | None:
        """Return the operation, what is combined, of `blocks` blocks, and where one of them goes; None if MPI combines it."""
        reduce_op = _OPS.get(op.handle)
        if reduce_op is None:
            return None
        if is_in_place(sendbuf):
            source = numbers_of(recvbuf, reduce_op, blocks)
            if source is None:
                return None
            check_writable(source)
            return reduce_op, source, source[: len(source) // blocks]
        source, target = numbers_of(sendbuf, reduce_op, blocks), numbers_of(recvbuf, reduce_op)
        if source is None and target is None:
            return None
        if source is None or target is None or source.dtype != target.dtype:
            raise ValueError("mismatch in send and receive datatypes")
        if len(source) != len(target) * blocks:
            raise ValueError(f"mismatch in send count {len(source) // blocks} and receive count {len(target)}")
        check_writable(target)
        return reduce_op, source, target


class WorkRequest(MPI.Grequest):
    """A generalized request of MPI that is complete when a `Work` has ended.

    ``MPI.Request.Waitall`` and its like take it with other requests; they report a failure as an error of MPI, while `Wait` and
    `Test` raise what made it fail.
    """

    _work: Work[Any]

    @classmethod
    def of(cls, start: Callable[[], Work[Any]], deliver: Callable[[], object]) -> WorkRequest:
        """Return the request of what `start` starts; it is complete when that has ended and `deliver` has been called."""

        def query(_: MPI.Status) -> None:
            for _waits in until(request._work.done):  # on a GPU; raises what made it fail, which mpi4py turns into one of MPI
                os.sched_yield()

        def complete() -> None:
            deliver()
            started.Complete()

        # first: the engine's thread would keep this one from the interpreter
        started = MPI.Grequest.Start(query, _nothing, _nothing)
        request = cls(started)
        try:
            request._work = start()
        except BaseException:
            started.Complete()
            request.Free()
            raise
        request._work.add_done_callback(complete)
        return request

    def Wait(self, status: MPI.Status | None = None) -> Literal[True]:  # noqa: N802 - MPI's name
        """Wait for the end; raises as ``Work.wait``."""
        self._work.wait(host=True)
        return super().Wait(status)

    def Test(self, status: MPI.Status | None = None) -> bool:  # noqa: N802
        """Return whether it has ended; raises as `Wait`."""
        return self._work.done() and super().Test(status)

    def wait(self, status: MPI.Status | None = None) -> Any:
        """Wait for the end, and return None, as mpi4py does where nothing was pickled."""
        self.Wait(status)

    def test(self, status: MPI.Status | None = None) -> tuple[bool, Any]:
        """Return whether it has ended, and None."""
        return self.Test(status), None


def _nothing(*_: object) -> None:
    """Free or cancel nothing: what was started goes on."""


def wrapped(comm: MPI.Intracomm, options: CommunicationOptions | None) -> WrappedIntracomm:
    """Return an intracommunicator as one that is wrapped, and has not made a collective yet."""
    check_comm(comm)
    found = _wrapping(_kind(comm))(comm)
    found._options = options
    return found


def _kind(comm: MPI.Intracomm) -> Any:
    """Return the class of mpi4py's that a communicator is of, wrapped or not."""
    return next(kind for kind in type(comm).__mro__ if not issubclass(kind, WrappedIntracomm))


@cache
def _wrapping(kind: Any) -> type[WrappedIntracomm]:
    """Return the class of wrapped communicators of a class of mpi4py's."""
    derived = {name: _deriving(getattr(kind, name)) for name in _DERIVING if hasattr(kind, name)}
    return type(f"Wrapped{kind.__name__}", (WrappedIntracomm, kind), {"__doc__": WrappedIntracomm.__doc__, **derived})


def _deriving(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that wraps the communicator that a method returns."""

    @wraps(method)
    def derive(self: WrappedIntracomm, *arguments: Any, **named: Any) -> Any:
        made = method(self, *arguments, **named)
        if isinstance(made, tuple):  # with the request after which there is a handle: this object gets it
            made[0]._options = self._options
            return made
        return wrapped(made, self._options) if made else made

    return derive


def _finish(communicator: Communicator, result: Array) -> None:
    """Wait until a result on the GPU may be read on any stream, as mpi4py does."""
    if communicator._gpu is not None and is_on_device(result):
        communicator._gpu.finish()


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
        known = _DTYPES.get(datatype.handle) if isinstance(datatype, MPI.Datatype) else None
        if is_whole and known is not None and known == array.dtype:  # None would be equal to float64
            return array
    return given


def is_in_place(given: object) -> bool:
    """Return whether an argument means MPI's in-place option, also with a datatype beside it."""
    return given is None or (given[0] if isinstance(given, (list, tuple)) and given else given) is MPI.IN_PLACE


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
        array = (as_target if is_a(obj, "torch", "Tensor") else as_array)(obj, "the buffer")  # no copy of a lazy conj()
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
    return np.dtype((np.void, datatype.size) if datatype.handle in _NO_NUMBERS else datatype.typestr)


def _check_packed(position: int, packed: Array) -> None:
    """Check that MPI packs or unpacks the bytes of a datatype, and nothing else."""
    if position != packed.nbytes:
        raise ValueError(f"this MPI packs {packed.nbytes} bytes of the datatype as {position}, which other ranks do not expect")
