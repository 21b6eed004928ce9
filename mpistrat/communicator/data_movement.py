"""DataMovement: the collectives that move arrays between ranks without reducing them.

Arrays of any dtype are sent as bytes: between GPUs by NCCL if it joins all ranks and all of them pass arrays on GPUs, else
through host memory. Ranks exchange shapes and dtypes first, so that a mismatch is an error on all of them before anything is
sent; they share small arrays in the same step.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, chain, pairwise
from math import prod
from typing import Any

import numpy as np

from mpistrat.arrays import Array, as_bytes, is_on_device, like, new_array, to_host
from mpistrat.communicator.gpu_arrays import GpuArrays
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.communicator.programs import Known, Programs
from mpistrat.communicator.validate import check_gather, check_parts, check_target, checked_index, name_of
from mpistrat.errors import AgreementError, InvalidArgumentError, TransportError
from mpistrat.execution.comparison import Call
from mpistrat.execution.executor import Executor
from mpistrat.execution.guard import Guard
from mpistrat.groups.agreement import digest_of, gather_or_raise
from mpistrat.lazy import MPI
from mpistrat.reduction import ReduceOp, check_elements
from mpistrat.steps import Steps, one_by_one
from mpistrat.text import format_bytes
from mpistrat.transports.mpi import MpiTransport, until_complete
from mpistrat.transports.nccl import Enqueue, NcclTransport

_HEADER_BYTES, _DIGESTS_KEPT = 2048, 1024  # NumPy has at most 64 axes
_MOST_SHARED_BYTES = 1 << 15
_Told = tuple[int, int, "Array | None"]
_SHARED = 2  # the bit of a number of a rank that shares its bytes
_PROPOSED = 1 << 62  # in the place of a number of a rank: it proposes to make a call like the last one


@dataclass(frozen=True)
class _Route:
    """How bytes go from rank to rank: by a transport, which takes what `fetch` returns; `run` makes steps safe."""

    sender: MpiTransport | NcclTransport
    fetch: Callable[[Array], Array]
    empty: Callable[[tuple[int, ...], np.dtype[Any]], Array]
    is_on_gpu: bool
    run: Callable[[Steps], Steps]


@dataclass
class _Move:
    """A call that all ranks make, with a digest and a number of each, and the way of its bytes.

    `shared` has the bytes of the ranks that have shared theirs already.
    """

    guard: Guard
    call: Call
    digests: list[int]
    numbers: list[int]
    route: _Route
    shared: dict[int, Array]

    def run(self, steps: Steps) -> None:
        self.guard.run(self.call, self.route.run(steps))

    def is_shared(self, root: int | None = None) -> bool:
        """Return whether all ranks, or `root`, have shared their bytes."""
        return len(self.shared) == len(self.digests) if root is None else root in self.shared

    def take(self, target: Array, bounds: Sequence[int], root: int | None = None) -> None:
        """Copy what all ranks have shared, or `root`, one after the other; `bounds` are those in `target`."""
        found = self.shared.values() if root is None else [self.shared[root]]
        for memory, (first, last) in zip(found, pairwise(bounds), strict=True):
            target[first:last] = memory[: last - first]

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], out: Array | None = None) -> Array:
        """Return memory for a result: `out`, where bytes can be received there."""
        if out is not None and is_on_device(out) == self.route.is_on_gpu:
            return out
        return self.route.empty(shape, dtype)


class DataMovement:
    """Moves arrays between the ranks of a communicator, one call at a time."""

    def __init__(self, executor: Executor, guard: Guard, gpu: GpuArrays | None, programs: Programs) -> None:
        self._group = group = executor.hierarchy.world_group
        # where the ranks of a single node share small arrays
        self._window = window = executor.intra.window if executor.hierarchy.intra.size == group.size > 1 else None
        rows = executor.world.rows
        self._rank, self._size, self._guard = group.rank, group.size, guard
        self._present, self._met, self._has_met = executor.hierarchy.call, np.zeros((2, 1), np.int64), False
        self._meeting = executor.world.bind(ReduceOp.SUM, self._met.dtype, (1,))
        meet: Callable[[], Steps] = partial(_meet, group.comm)
        self._most_shared = 0
        # returns what a rank has shared, valid until the next call
        self._shared: Callable[[int], Array] | None = None
        if window is not None:
            self._most_shared, self._shared, meet = min(_MOST_SHARED_BYTES, window.small_bytes), window.shared, window.barrier
        elif rows is not None:
            self._most_shared, self._shared, meet = rows.most_bytes, rows.shared, partial(self._meeting.steps, *self._met)
        self._by_mpi = _Route(MpiTransport(group), to_host, new_array, False, lambda steps: one_by_one([lambda: steps, meet]))
        nccl = None if gpu is None else gpu.executor.transports.everywhere
        self._by_nccl = None if gpu is None or nccl is None else _through_nccl(gpu, nccl)
        self._gpu, self._nccl, self._programs = gpu, nccl, programs

    def all_gather(self, array: Array, axis: int, options: CommunicationOptions | None, out: Array | None) -> Array:
        """Concatenate along `axis`, in rank order: see `mpistrat.Communicator.all_gather`. A collective call."""

        def facts() -> _Told:
            check_gather(array, axis)
            check_elements(array.dtype)
            first = axis % array.ndim
            if out is not None:
                check_target(out, array, (*array.shape[:first], -1, *array.shape[first + 1 :]))
            # ranks that pass `out` compare its extent
            digest = _digest(array.dtype, array.shape, first, None if out is None else out.shape[axis])
            return digest, array.shape[axis], self._shareable(_moved(array, first, 0))

        with self._guard:
            text = f"({name_of(array.dtype)}, {array.ndim} axes, axis={axis})"
            move = self._begin("all_gather", text, options, facts, [array])
            given_axis, axis = axis, axis % array.ndim
            needed = f"all_gather along axis {axis} needs one axis, one dtype and equal extents on all other axes"
            if out is not None:
                needed += ", and out of one shape on all ranks or on none"
            self._require_equal(move.digests, needed, array if out is None else out)
            starts = list(accumulate(move.numbers, initial=0))
            if out is not None and out.shape[axis] != starts[-1]:
                raise InvalidArgumentError(f"out needs extent {starts[-1]} on axis {axis}, that of all arrays; got {out.shape}")
            mine = _moved(move.route.fetch(array), axis, 0)
            whole = move.empty((starts[-1], *mine.shape[1:]), mine.dtype, out if axis == 0 else None)
            row_bytes = whole.nbytes // max(starts[-1], 1)
            bounds = [start * row_bytes for start in starts]
            if move.is_shared():
                move.take(as_bytes(whole), bounds)
            elif row_bytes:
                own = whole[starts[self._rank] : starts[self._rank + 1]]
                if self._window is None or move.route.is_on_gpu:
                    own[...] = mine
                    move.run(move.route.sender.all_gather(as_bytes(whole), bounds).run())
                else:  # what was just written is slow to read for another core: where it can be, the array itself is sent
                    is_sent = mine.flags.c_contiguous and not np.may_share_memory(mine, whole)
                    if not is_sent:
                        own[...] = mine
                    parts = np.split(as_bytes(whole), bounds[1:-1])
                    move.run(move.route.sender.exchange([mine if is_sent else own] * self._size, parts))
                    if is_sent:
                        own[...] = mine
                if self._nccl is not None and move.route.is_on_gpu:
                    enqueue = self._nccl.bind(self._nccl.gather_calls(bounds))
                    self._remember(move, ("all_gather", given_axis, out is None), array, options, whole, enqueue, axis)
            return _delivered(_moved(whole, 0, axis), array, out, move)

    def gather(self, array: Array, root: int, options: CommunicationOptions | None) -> list[Array] | None:
        """Collect the arrays of all ranks on one: see `mpistrat.Communicator.gather`. A collective call."""

        def facts() -> _Told:
            checked_index(root, "root", self._size)
            check_elements(array.dtype)
            return _digest(array.dtype, array.shape), 0, self._shareable(array)

        with self._guard:
            move = self._begin("gather", f"({name_of(array.dtype)}, root={root})", options, facts, [array])
            self._require_equal(move.digests, "gather needs equal shapes, one dtype and one root", array)
            is_root = self._rank == root
            if move.is_shared():
                received = [move.empty(array.shape, array.dtype) for _ in range(self._size)] if is_root else []
                for rank, one in enumerate(received):
                    move.take(as_bytes(one), [0, one.nbytes], rank)
                return [like(one, array) for one in received] if is_root else None
            mine = move.route.fetch(array).copy() if is_root else _contiguous(move.route.fetch(array))
            nothing = move.empty((0,), np.dtype(np.uint8))
            received = [
                mine if rank == self._rank else move.empty(mine.shape, mine.dtype) if is_root else nothing
                for rank in range(self._size)
            ]
            move.run(move.route.sender.exchange([mine if rank == root else nothing for rank in range(self._size)], received))
            return [like(one, array) for one in received] if is_root else None

    def all_to_all(self, arrays: Sequence[Array], options: CommunicationOptions | None, joins: bool = False) -> list[Array]:
        """Send an array to each rank: see `mpistrat.Communicator.all_to_all`. A collective call.

        If it `joins` the arrays received, it may return them as one.
        """

        def facts() -> _Told:
            check_parts(arrays, self._size)
            check_elements(arrays[0].dtype)
            first = arrays[0]
            return _digest(first.dtype, first.shape, 0 if first.ndim else None), 0, self._shareable_parts(arrays)

        with self._guard:
            text = f"({', '.join(sorted({name_of(array.dtype) for array in arrays}))})"
            move = self._begin("all_to_all", text, options, facts, arrays)
            needed = "all_to_all needs one dtype, and equal extents on all axes but the first"
            self._require_equal(move.digests, needed, arrays[self._rank])
            if move.is_shared():
                return self._parts_for_this_rank(move, arrays)
            extents = self._exchange_extents(move.call, arrays)
            sends = [_contiguous(move.route.fetch(array)) for array in arrays]
            mine = sends[self._rank]
            if joins:
                starts = list(accumulate(extents, initial=0))
                whole = move.empty((starts[-1], *mine.shape[1:]), mine.dtype)
                received = [whole[first:last] for first, last in pairwise(starts)]
            else:
                received = [move.empty((extent, *mine.shape[1:])[: mine.ndim], mine.dtype) for extent in extents]
            np.copyto(received[self._rank], mine)
            move.run(move.route.sender.exchange(sends, received))
            if joins:
                return [like(whole, arrays[0])]
            return [like(one, array) for one, array in zip(received, arrays, strict=True)]

    def broadcast(self, array: Array, root: int, options: CommunicationOptions | None, out: Array | None) -> Array:
        """Return the array of rank `root`: see `mpistrat.Communicator.broadcast`. A collective call."""
        known, is_root = array if out is None else out, self._rank == root

        def facts() -> _Told:
            checked_index(root, "root", self._size)
            if out is not None:
                check_target(out, array if is_root else out)
            return _digest(known.dtype, known.shape), out is not None, self._shareable(array) if is_root else None

        with self._guard:
            move = self._begin("broadcast", f"(root={root})", options, facts, [array if is_root else known])
            root = operator.index(root)  # an array of no axes is the number of a replica, but no key
            # every `out` must have the shape of the root's array
            given = [digest for digest, is_given in zip(move.digests, move.numbers, strict=True) if is_given]
            if given:
                needed = "broadcast needs out of the shape and dtype of the root's array"
                self._require_equal([move.digests[root], *given], needed, known)
            shape, dtype = known.shape, known.dtype
            if len(set(move.digests)) > 1:
                header = _dtype_and_shape(array)
                self._guard.run(move.call, self._by_mpi.sender.broadcast(header, root).run())
                name, *extents = header.tobytes().rstrip(b"\0").decode().split()
                shape, dtype = tuple(map(int, extents)), np.dtype(name)
            check_elements(dtype, f"the array of replica {root}")
            result = move.empty(shape, dtype, out)
            if is_root and (move.is_shared(root) or not result.nbytes):
                np.copyto(result, move.route.fetch(array))
            elif move.is_shared(root):
                move.take(as_bytes(result), [0, result.nbytes], root)
            elif result.nbytes:
                source = _contiguous(move.route.fetch(array)) if is_root else result
                move.run(move.route.sender.broadcast(as_bytes(source), root).run())
                if self._nccl is not None and move.route.is_on_gpu and len(set(move.digests)) == 1:
                    enqueue = self._nccl.bind(self._nccl.broadcast_calls(result.nbytes, root))
                    self._remember(move, ("broadcast", root, out is None), array, options, result, enqueue)
                if is_root:  # the others have it by now
                    np.copyto(result, source)
            return _delivered(result, array, out, move)

    def make_known(self, known: Known, arrays: Sequence[Array], out: Sequence[Array] | None) -> list[Array]:
        """Make a known call by NCCL, unless it is not admitted, or all ranks do not make it so: then return no result.

        A collective call.
        """
        if self._gpu is None or not self._gpu.admits(arrays, out):
            return []
        with self._guard:
            try:
                return known.run(arrays, out)
            except AgreementError:  # of all ranks, before they did anything
                raise
            except BaseException as error:
                raise self._guard.fail_current(error) from None

    def _remember(
        self, move: _Move, kind: object, array: Array, options: Any, result: Array, enqueue: Enqueue, axis: int = 0
    ) -> None:
        """Remember a call of NCCL, which made `result`, that axis first: like calls of all ranks exchange no more than that."""
        # what `Known.gives` asks of a later `out` is what it has in common with the array
        is_like = array.__class__ is result.__class__ and array.dtype == result.dtype
        if self._gpu is not None and is_like and move.call.seconds == self._guard.deadlines.default_seconds:
            signature, in_place = move.call.signature, array.shape == result.shape
            propose = partial(self._propose, signature.text, options, digest_of(f"{move.digests} {move.numbers}"))
            run, shape = self._gpu.by_nccl(enqueue, (result.shape, array.dtype), in_place, propose), result.shape
            if axis:
                shape = _moved(result, 0, axis).shape
                run = self._gpu.along(axis, shape, array.dtype, run)
            self._programs.add(kind, [array], options, Known(signature, signature.digest, run, shape=shape))

    def _propose(self, text: str, options: CommunicationOptions | None, digest: int) -> Steps | None:
        """Begin a call, if all ranks propose to make that which the digest is of; else return None: all are to begin anew."""
        guard, proposal = self._guard, [digest, _PROPOSED]
        call = guard.begin_text(text, options)
        if all([facts == proposal for facts in guard.agree(call, None, proposal)]):
            return iter(())
        guard.take_back(call)
        return None

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a new array in memory that NCCL works on fastest: see `BaseCommunicator.empty`. A collective call."""
        gpu, nccl, guard, made = self._gpu, self._nccl, self._guard, list[Array]()
        module, nbytes = np if gpu is None else gpu.device.array_module, prod(shape) * dtype.itemsize

        def check(_: object) -> None:
            if min(shape, default=0) < 0:
                raise InvalidArgumentError(f"an array has no negative extents; got shape {shape}")
            check_elements(dtype, "empty")
            if gpu is not None and gpu.is_capturing():
                raise InvalidArgumentError("memory is not allocated while a CUDA graph is captured: call empty before")

        def make() -> None:
            try:
                made.append(module.empty(shape, dtype))
            except MemoryError as error:
                raise TransportError(f"no memory for an array of {format_bytes(nbytes)} ({error})") from None

        with guard:
            call, _ = guard.begin("empty", None, lambda _: f"({shape}, {name_of(dtype)})", check)
            guard.agree(call)
            if gpu is None or nccl is None or not (nccl.has_windows and nbytes):
                gather_or_raise(self._group, make)
                return made[0]
            guard.run(call, gpu.executor.settle())  # memory that is freed may be in use
            array: Array = module.asarray(nccl.allocate(nbytes)).view(dtype).reshape(shape)
            return array

    def barrier(self, options: CommunicationOptions | None) -> None:
        """Wait until all ranks have entered the barrier: by a sum, if need be after a comparison. A collective call."""
        guard = self._guard
        with guard:
            call, _ = guard.begin("barrier", options, lambda _: "()")
            if not self._has_met or self._present.is_strict or call.seconds or guard.deadlines.default_seconds:
                guard.agree(call)
                self._has_met = self._meeting.is_compared
                return
            guard.make_current(call)
            guard.run(call, self._meeting.steps(*self._met))
            meet, signature = self._meeting.blocking(), call.signature
            self._programs.add("barrier", (), options, Known(signature, signature.digest, lambda *_: [meet(*self._met)]))

    def _begin(
        self,
        verb: str,
        text: str,
        options: CommunicationOptions | None,
        facts: Callable[[], _Told],
        arrays: Sequence[Array],
    ) -> _Move:
        """Begin a call, and exchange a digest and a number of each rank; by NCCL, if all have their arrays on a GPU.

        `facts` checks the arguments, and returns those of this rank, and the bytes that it shares.
        """
        told = list[_Told]()
        call, _ = self._guard.begin(verb, options, lambda _: text, lambda _: told.append(facts()))
        [(digest, number, memory)] = told
        is_shared, is_on_gpu = memory is not None, self._by_nccl is not None and all(map(is_on_device, arrays))
        own = digest, number << 2 | is_shared * _SHARED | is_on_gpu
        found = self._guard.agree(call, None, own, memory)
        if self._by_nccl is not None and any(number & _PROPOSED for _, number in found):  # not all propose: those begin anew
            found = self._guard.agree(call, None, own, memory)
        digests, numbers, route = [row[0] for row in found], [row[1] for row in found], self._by_mpi
        if self._by_nccl is not None and all(number & 1 for number in numbers):
            self._guard.make_current(call)  # the barrier before NCCL compares it once more
            route = self._by_nccl
        read = self._shared
        shared = {} if read is None else {rank: read(rank) for rank, number in enumerate(numbers) if number & _SHARED}
        return _Move(self._guard, call, digests, [number >> 2 for number in numbers], route, shared)

    def _shareable(self, array: Array) -> Array | None:
        """Return the bytes of a small array that ranks share when they compare the call."""
        if not 0 < array.nbytes <= self._most_shared or is_on_device(array):
            return None
        return as_bytes(np.ascontiguousarray(array))

    def _shareable_parts(self, arrays: Sequence[Array]) -> Array | None:
        """Return the first extents of small arrays, one for each rank, and their bytes."""
        if sum(array.nbytes for array in arrays) > self._most_shared - 8 * self._size or any(map(is_on_device, arrays)):
            return None
        parts = _extents(arrays), *map(np.ascontiguousarray, arrays)
        joined: Array = np.concatenate([*map(as_bytes, parts)])
        return joined

    def _parts_for_this_rank(self, move: _Move, arrays: Sequence[Array]) -> list[Array]:
        """Return what each rank has shared for this one."""
        received, mine = [], arrays[self._rank]
        row_bytes = mine.itemsize * prod(mine.shape[1:])
        for memory, array in zip(move.shared.values(), arrays, strict=True):
            extents = memory[: 8 * self._size].view(np.int64)
            first, extent = 8 * self._size + row_bytes * int(extents[: self._rank].sum()), int(extents[self._rank])
            part = move.empty((extent, *mine.shape[1:])[: mine.ndim], mine.dtype)
            as_bytes(part)[:] = memory[first : first + part.nbytes]
            received.append(like(part, array))
        return received

    def _require_equal(self, digests: list[int], needed: str, array: Array) -> None:
        """Check that the `_digest` of all ranks are equal. A collective call if they are not."""
        if len(set(digests)) == 1:
            return
        found = self._group.comm.allgather(f"{array.dtype} {array.shape}")
        shapes = ", ".join(f"replica {rank}: {text}" for rank, text in enumerate(found))
        raise InvalidArgumentError(f"{needed}; got {shapes}")

    def _exchange_extents(self, call: Call, arrays: Sequence[Array]) -> list[int]:
        """Return the first extent of the array that each rank sends to this one; 1 for scalars."""
        mine = _extents(arrays)
        received = np.empty_like(mine)
        request = self._group.comm.Ialltoall(mine, received)
        self._guard.run(call, until_complete([request], (mine, received)))
        return [int(extent) for extent in received]


def _meet(comm: MPI.Intracomm) -> Steps:
    """Meet all ranks: one that has left the call may have changed its array before MPI read that."""
    return until_complete([comm.Ibarrier()], None)


def _through_nccl(gpu: GpuArrays, nccl: NcclTransport) -> _Route:
    """Return the way between GPUs. NCCL is called after a barrier: its kernels wait for all ranks, which have their memory."""

    def run(steps: Steps) -> Steps:
        return gpu.abort_on_error(chain(gpu.executor.barrier(), steps))

    return _Route(nccl, lambda array: array, gpu.empty, True, run)


@lru_cache(_DIGESTS_KEPT)
def _digest(dtype: np.dtype[Any], shape: tuple[int, ...], free_axis: int | None = None, out_extent: int | None = None) -> int:
    """Return a hash of dtype and shape that ignores the extent along `free_axis`, but includes that of `out` if given."""
    extents = tuple(-1 if axis == free_axis else extent for axis, extent in enumerate(shape))
    # the name of a dtype says nothing of its byte order, and its code does not tell bfloat16 from another void
    return digest_of(f"{dtype.name} {dtype.str} {extents} {free_axis} {out_extent}")


def _extents(arrays: Sequence[Array]) -> Array:
    """Return the first extents of arrays; 1 for scalars."""
    return np.array([array.shape[0] if array.ndim else 1 for array in arrays], np.int64)


def _dtype_and_shape(array: Array) -> Array:
    """Return the text of the dtype and shape of an array, in a fixed number of bytes."""
    name = array.dtype.name if array.dtype.isbuiltin == 2 else array.dtype.str  # 2: of ml_dtypes
    text, header = " ".join(map(str, (name, *array.shape))).encode(), np.zeros(_HEADER_BYTES, np.uint8)
    header[: len(text)] = np.frombuffer(text, np.uint8)
    return header


def _moved(array: Array, source: int, target: int) -> Array:
    """Return an array with one axis elsewhere, without NumPy's function where that does nothing."""
    return array if source == target else np.moveaxis(array, source, target)


def _contiguous(array: Array) -> Array:
    return array if array.flags.c_contiguous else array.copy()


def _delivered(result: Array, array: Array, out: Array | None, move: _Move) -> Array:
    """Return the result as the array is, or in `out`."""
    if out is None:
        copied = result if result.flags.c_contiguous else move.empty(result.shape, result.dtype)
        if copied is not result:
            copied[...] = result
        delivered: Array = like(copied, array)
        return delivered
    if result is not out:
        out[...] = like(result, out)
    return out
