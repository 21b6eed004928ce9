"""WrappedIntracomm: an intracommunicator of mpi4py whose collectives are made by a `mpistrat.Communicator`, and its requests.

Invariant: whether a call is made here or by MPI follows only from what MPI requires to be the same on all ranks: the
operation, the datatype, and which calls were made before. Where MPI makes a reduction, ranks compare that first, so that no two
ranks are on different sides unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial, wraps
from typing import Any, Literal, cast

import numpy as np
from mpi4py import MPI

from mpistrat.arrays import Array, is_aligned, is_on_device
from mpistrat.communicator.communicator import Communicator
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.communicator.passing import Passing
from mpistrat.errors import CollectiveError, MpistratError
from mpistrat.execution.work import Work
from mpistrat.mpi4py.buffers import Buffer, check_writable, is_in_place, numbers_of, unwrapped
from mpistrat.reduction import ReduceOp
from mpistrat.steps import until, yield_core

_OPS = {
    MPI.SUM.handle: ReduceOp.SUM,
    MPI.PROD.handle: ReduceOp.PROD,
    MPI.MIN.handle: ReduceOp.MIN,
    MPI.MAX.handle: ReduceOp.MAX,
}
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
        with _RefuseOnError(communicator, "Iallreduce"):
            operands = self._operands(sendbuf, recvbuf, op)
        if operands is None:
            communicator.note("Iallreduce by MPI")  # compared with the next collective: to compare it now would wait
            return super().Iallreduce(sendbuf, recvbuf, op)
        reduce_op, source, target = operands
        if not is_aligned(target):
            return WorkRequest.of(communicator.start_all_reduce(reduce_op, source).then(partial(np.copyto, target)))
        return WorkRequest.of(communicator.start_all_reduce(reduce_op, source, out=target))

    def Reduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> None:  # noqa: N802
        """Combine arrays of all ranks; each gets its part, of equal lengths, in `recvbuf`. A collective call."""
        communicator = self.open()
        if self._combine("Reduce_scatter_block", communicator.reduce_scatter, sendbuf, recvbuf, op, self.size) is None:
            super().Reduce_scatter_block(sendbuf, recvbuf, op)

    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:  # noqa: N802
        """Gather the elements of all ranks, in rank order, in `recvbuf` of each. A collective call."""
        communicator = self.open()
        with _RefuseOnError(communicator, "Allgather"):
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
        with _RefuseOnError(communicator, "Bcast"):
            buffer = Buffer(buf)
            memory = buffer.contents(self) if self.rank == root else buffer.receive_memory()
        communicator.broadcast(memory, root, out=None if self.rank == root else memory)
        if self.rank != root:
            buffer.put(memory, self)
            _finish(communicator, memory)

    def Barrier(self) -> None:  # noqa: N802
        """Wait until all ranks have come here. A collective call."""
        self.open().barrier()

    def barrier(self) -> None:
        """Wait until all ranks have come here: as `Barrier`, which ranks may mix it with. A collective call."""
        self.open().barrier()

    def Free(self) -> None:  # noqa: N802
        """Free the communicator, and what makes its collectives. A collective call."""
        if self._communicator is not None:
            self._communicator.close()
        vars(self).pop("Allreduce", None)  # it holds what it calls, which holds this
        super().Free()

    def _combine(
        self, name: str, verb: Callable[..., Any], sendbuf: Any, recvbuf: Any, op: MPI.Op, blocks: int = 1
    ) -> Array | None:
        """Combine arrays by a verb of the communicator, and return the result; None if ranks have agreed that MPI does."""
        communicator = self.open()
        with _RefuseOnError(communicator, name):
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
    def of(cls, work: Work[Any]) -> WorkRequest:
        """Return the request of what has been started."""

        def query(_: MPI.Status) -> None:
            for _waits in until(work.done):  # on a GPU; raises what made it fail, which mpi4py turns into an error of MPI
                yield_core()

        started = MPI.Grequest.Start(query, _nothing, _nothing)
        request = cls(started)
        request._work = work
        work.add_done_callback(started.Complete)
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


class _RefuseOnError:
    """A context that refuses a call on all ranks if this one raises before it; a generator would be slower."""

    def __init__(self, communicator: Communicator, verb: str) -> None:
        self._communicator, self._verb = communicator, verb

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        is_own = isinstance(error, (MpistratError, ValueError, TypeError, KeyError, BufferError))
        if is_own and not isinstance(error, CollectiveError):
            self._communicator.refuse(self._verb, cast("Exception", error))


def wrapped(comm: MPI.Intracomm, options: CommunicationOptions | None) -> WrappedIntracomm:
    """Return an intracommunicator as one that is wrapped, and has not made a collective yet."""
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


def _deriving(method: Callable[..., MPI.Intracomm]) -> Callable[..., MPI.Intracomm]:
    """Return a method that wraps the communicator that a method returns."""

    @wraps(method)
    def derive(self: WrappedIntracomm, *arguments: Any, **named: Any) -> MPI.Intracomm:
        made = method(self, *arguments, **named)
        return wrapped(made, self._options) if made else made

    return derive


def _finish(communicator: Communicator, result: Array) -> None:
    """Wait until a result on the GPU may be read on any stream, as mpi4py does."""
    if communicator._gpu is not None and is_on_device(result):
        communicator._gpu.finish()
