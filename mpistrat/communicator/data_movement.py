"""DataMovement: the collectives that move arrays between ranks without reducing them.

Arrays of any dtype are sent as bytes: between GPUs by NCCL if it joins all ranks and all of them pass arrays on GPUs, else
through host memory. Ranks exchange shapes and dtypes first, so that a mismatch is an error on all of them before anything is
sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TypeVar

import numpy as np

from mpistrat.arrays import Array, is_on_device, like
from mpistrat.communicator.call import CollectiveCall
from mpistrat.communicator.call_sequence import CallSequence, Facts
from mpistrat.communicator.device_mover import DeviceMover
from mpistrat.communicator.gpu_arrays import GpuArrays
from mpistrat.communicator.guard import CollectiveGuard
from mpistrat.communicator.host_mover import HostMover
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.communicator.shapes import decode_shape, encode_shape, name_of, require_equal_shapes, shape_digest
from mpistrat.communicator.validate import check_gather, check_parts, check_root, check_target
from mpistrat.errors import InvalidArgumentError
from mpistrat.execution.executor import Executor
from mpistrat.groups.agreement import Signature
from mpistrat.reduction import ReduceOp, check_dtype
from mpistrat.transports.mpi import until_complete

T = TypeVar("T")

Mover = HostMover | DeviceMover


class DataMovement:
    """Moves arrays between the ranks of a communicator, one call at a time."""

    def __init__(self, executor: Executor, guard: CollectiveGuard, calls: CallSequence, gpu: GpuArrays | None) -> None:
        self._group = group = executor.hierarchy.world_group
        self._rank, self._size, self._guard, self._calls = group.rank, group.size, guard, calls
        nccl = None if gpu is None else gpu.executor.transports.everywhere
        self._by_host = HostMover(group)
        self._by_nccl: DeviceMover | None = None
        if gpu is not None and nccl is not None:
            self._by_nccl = DeviceMover(None if gpu.executor.compares_by_messages else executor.intra.window, gpu, nccl)

    def all_gather(self, array: Array, axis: int, options: CommunicationOptions | None, out: Array | None) -> Array:
        """Concatenate along `axis`, in rank order: see `mpistrat.Communicator.all_gather`. A collective call."""

        def check(_: CommunicationOptions) -> None:
            check_gather(array, axis)
            check_dtype(ReduceOp.SUM, array.dtype)
            if out is not None:
                check_target(out, array, (*array.shape[: axis % array.ndim], -1, *array.shape[axis % array.ndim + 1 :]))

        def facts() -> tuple[int, int]:
            # ranks that pass `out` compare its extent
            digest = shape_digest(array, axis % array.ndim, None if out is None else out.shape[axis])
            return digest, _with_place(array.shape[axis], [array])

        with self._guard:
            text = lambda _: f"({name_of(array.dtype)}, {array.ndim} axes, axis={axis})"  # noqa: E731 - a name would say no more
            call, found = self._calls.enter("all_gather", text, options, check, facts)
            axis %= array.ndim
            needed = f"all_gather along axis {axis} needs one axis, one dtype and equal extents on all other axes"
            if out is not None:
                needed += ", and out of one shape on all ranks or on none"
            require_equal_shapes(found[:, 0], needed, self._group, array if out is None else out)
            extents = [int(extent) >> 1 for extent in found[:, 1]]
            if out is not None and out.shape[axis] != sum(extents):
                raise InvalidArgumentError(
                    f"out must have extent {sum(extents)} along axis {axis}, that of all arrays; got shape {out.shape}"
                )
            mover = self._mover(call, found)
            rows = _moved(mover.fetch(array), axis, 0)
            whole = self._gather_rows(call, mover, rows, extents, out if axis == 0 else None)
            if out is None:
                result: Array = like(_contiguous(_moved(whole, 0, axis)), array)
                return result
            if whole is not out:
                out[...] = like(_moved(whole, 0, axis), out)
            return out

    def gather(self, array: Array, root: int, options: CommunicationOptions | None) -> list[Array] | None:
        """Collect the arrays of all ranks on one: see `mpistrat.Communicator.gather`. A collective call."""

        def check(_: CommunicationOptions) -> None:
            check_root(root, self._size)
            check_dtype(ReduceOp.SUM, array.dtype)

        with self._guard:
            text = lambda _: f"({name_of(array.dtype)}, root={root})"  # noqa: E731
            call, found = self._calls.enter(
                "gather", text, options, check, lambda: (shape_digest(array), _with_place(0, [array]))
            )
            require_equal_shapes(found[:, 0], "gather needs equal shapes, one dtype and one root", self._group, array)
            mover, is_root = self._mover(call, found), self._rank == root
            mine = self._allocate(call, lambda: mover.fetch(array).copy())
            nothing, num_others = mover.empty((0,), np.dtype(np.uint8)), self._size - 1 if is_root else 0
            others = self._allocate(call, lambda: [mover.empty(mine.shape, mine.dtype) for _ in range(num_others)])
            received = [*others[:root], mine, *others[root:]] if is_root else [nothing] * self._size
            sends = [mine if rank == root else nothing for rank in range(self._size)]
            self._guard.run(call, mover.exchange(sends, received))
            return [like(one, array) for one in received] if is_root else None

    def all_to_all(self, arrays: Sequence[Array], options: CommunicationOptions | None) -> list[Array]:
        """Send an array to each rank: see `mpistrat.Communicator.all_to_all`. A collective call."""

        def check(_: CommunicationOptions) -> None:
            check_parts(arrays, self._size)
            check_dtype(ReduceOp.SUM, arrays[0].dtype)

        def facts() -> tuple[int, int]:
            return shape_digest(arrays[0], 0 if arrays[0].ndim else None), _with_place(0, arrays)

        with self._guard:
            text = lambda _: f"({', '.join(sorted({name_of(array.dtype) for array in arrays}))})"  # noqa: E731
            call, found = self._calls.enter("all_to_all", text, options, check, facts)
            needed = "all_to_all needs one dtype, and equal extents on all axes but the first"
            require_equal_shapes(found[:, 0], needed, self._group, arrays[self._rank])
            extents = self._exchange_extents(call, arrays)
            mover = self._mover(call, found)
            sends = self._allocate(call, lambda: [_contiguous(mover.fetch(array)) for array in arrays])
            mine = sends[self._rank]
            shapes = [(extent, *mine.shape[1:])[: mine.ndim] for extent in extents]
            received = self._allocate(call, lambda: [mover.empty(shape, mine.dtype) for shape in shapes])
            np.copyto(received[self._rank], mine)
            self._guard.run(call, mover.exchange(sends, received))
            return [like(one, array) for one, array in zip(received, arrays, strict=True)]

    def all_to_all_parts(self, array: Array, options: CommunicationOptions | None) -> Array:
        """Split an array along the first axis, exchange the parts, and concatenate those received. A collective call."""
        try:
            check_gather(array, 0, "all_to_all")
        except (TypeError, ValueError) as error:
            with self._guard:
                self._calls.refuse(self._calls.prepare_text("all_to_all", options), error)
        joined: Array = np.concatenate(self.all_to_all(np.array_split(array, self._size), options))
        return joined

    def broadcast(self, array: Array, root: int, options: CommunicationOptions | None, out: Array | None) -> Array:
        """Return the array of rank `root`: see `mpistrat.Communicator.broadcast`. A collective call."""

        def check(_: CommunicationOptions) -> None:
            check_root(root, self._size)
            if out is not None:
                check_target(out, array if self._rank == root else out)

        known = array if out is None else out

        def facts() -> tuple[int, int]:
            target = array if out is None or self._rank == root else out
            return shape_digest(known), _with_place(out is not None, [target])

        with self._guard:
            call, found = self._calls.enter("broadcast", lambda _: f"(root={root})", options, check, facts)
            # every `out` must have the shape of the root's array
            is_given = found[:, 1] > 1
            if is_given.any():
                is_given[root] = True
                needed = "broadcast needs out of the shape and dtype of the root's array"
                require_equal_shapes(found[is_given, 0], needed, self._group, known)
            if (found[:, 0] == found[0, 0]).all():
                shape, dtype = known.shape, known.dtype
            else:
                header = encode_shape(array)
                self._guard.run(call, self._by_host.broadcast(header, root))
                shape, dtype = decode_shape(header)
            check_dtype(ReduceOp.SUM, dtype, f"the array of replica {root}")
            mover = self._mover(call, found)
            result = self._allocate(call, lambda: mover.empty(shape, dtype, out))
            if self._rank == root:
                np.copyto(result, mover.fetch(array))
            if result.nbytes:
                self._guard.run(call, mover.broadcast(result, root))
            if out is None:
                received: Array = like(result, array)
                return received
            if result is not out:
                out[...] = like(result, out)
            return out

    def barrier(self, options: CommunicationOptions | None) -> None:
        """Wait until all ranks have entered the barrier. A collective call."""
        with self._guard:
            self._calls.enter("barrier", lambda _: "()", options)

    def _gather_rows(self, call: CollectiveCall, mover: Mover, mine: Array, extents: Sequence[int], out: Array | None) -> Array:
        """Return the arrays of all ranks concatenated along axis 0: in `out` if they can be moved there."""
        whole = self._allocate(call, lambda: mover.empty((sum(extents), *mine.shape[1:]), mine.dtype, out))
        starts = list(accumulate(extents, initial=0))
        whole[starts[self._rank] : starts[self._rank + 1]] = mine
        if whole.nbytes:
            row_bytes = whole.nbytes // whole.shape[0]
            bounds = [start * row_bytes for start in starts]
            self._guard.run(call, mover.all_gather(whole, bounds))
        return whole

    def _mover(self, call: CollectiveCall, found: Facts) -> Mover:
        """Return what moves the arrays of a call: NCCL if all ranks have theirs on a GPU."""
        if self._by_nccl is None or not (found[:, 1] & 1).all():
            return self._by_host
        self._guard.begin(call, Signature(call.arguments))  # the barrier before NCCL compares it once more
        return self._by_nccl

    def _allocate(self, call: CollectiveCall, make: Callable[[], T]) -> T:
        return self._guard.allocate(make, call.verb)

    def _exchange_extents(self, call: CollectiveCall, arrays: Sequence[Array]) -> list[int]:
        """Return the first extent of the array that each rank sends to this one; 1 for scalars."""
        mine = np.array([array.shape[0] if array.ndim else 1 for array in arrays], np.int64)
        received = np.empty_like(mine)
        request = self._group.comm.Ialltoall(mine, received)
        self._guard.run(call, until_complete([request], (mine, received)))
        return [int(extent) for extent in received]


def _with_place(number: int, arrays: Sequence[Array]) -> int:
    """Return a number of a rank that says besides, in its last bit, whether all arrays are on a GPU."""
    return number << 1 | all(map(is_on_device, arrays))


def _moved(array: Array, source: int, target: int) -> Array:
    """Return an array with one axis elsewhere, without NumPy's function where that does nothing."""
    return array if source == target else np.moveaxis(array, source, target)


def _contiguous(array: Array) -> Array:
    return array if array.flags.c_contiguous else array.copy()
