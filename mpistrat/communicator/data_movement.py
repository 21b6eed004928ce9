"""DataMovement: the collectives that move arrays between ranks without reducing them.

Arrays of any dtype are sent as bytes, those on a GPU through host memory. Ranks exchange shapes and dtypes first, so that a
mismatch is an error on all of them before anything is sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpistrat.arrays import Array, like, to_host
from mpistrat.communicator.call import CollectiveCall
from mpistrat.communicator.call_sequence import CallSequence
from mpistrat.communicator.guard import CollectiveGuard
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.communicator.shapes import decode_shape, encode_shape, require_equal_shapes, shape_word
from mpistrat.communicator.validate import check_gather, check_parts, check_root, check_target
from mpistrat.errors import InvalidArgumentError
from mpistrat.groups.group import Group
from mpistrat.reduction import ReduceOp, check_dtype
from mpistrat.transports.mpi import MpiTransport, until_complete
from mpistrat.transports.pairwise import Pairwise

__all__ = ["DataMovement"]


class DataMovement:
    """Moves arrays between the ranks of a group, one call at a time.

    Parameters
    ----------
    group : Group
        All ranks of the communicator.
    guard : CollectiveGuard
        Admits calls and runs their steps.
    calls : CallSequence
        Begins each call.
    """

    def __init__(self, group: Group, guard: CollectiveGuard, calls: CallSequence) -> None:
        self._group, self._rank, self._size = group, group.rank, group.size
        self._guard, self._calls = guard, calls
        self._bytes = MpiTransport(group)

    def all_gather(self, array: Array, axis: int, options: CommunicationOptions | None, out: Array | None) -> Array:
        """Concatenate along `axis`, in rank order: see `mpistrat.Communicator.all_gather`. A collective call."""

        def check(_: CommunicationOptions) -> None:
            check_gather(array, axis)
            check_dtype(ReduceOp.SUM, array.dtype)
            if out is not None:
                check_target(out, array, (*array.shape[: axis % array.ndim], -1, *array.shape[axis % array.ndim + 1 :]))

        def facts() -> tuple[int, int]:
            # ranks that pass `out` compare its extent
            return shape_word(array, axis % array.ndim, None if out is None else out.shape[axis]), array.shape[axis]

        with self._guard:
            text = lambda _: f"({array.dtype}, {array.ndim} axes, axis={axis})"  # noqa: E731 - a name would say no more
            call, found = self._calls.enter("all_gather", text, options, check, facts)
            axis %= array.ndim
            needed = f"all_gather along axis {axis} needs one axis, one dtype and equal extents on all other axes"
            if out is not None:
                needed += ", and out of one shape on all ranks or on none"
            require_equal_shapes(found[:, 0], needed, self._group, array if out is None else out)
            extents = [int(extent) for extent in found[:, 1]]
            if out is not None and out.shape[axis] != sum(extents):
                raise InvalidArgumentError(
                    f"out must have extent {sum(extents)} along axis {axis}, that of all arrays; got shape {out.shape}"
                )
            whole = self._gather_rows(call, np.moveaxis(to_host(array), axis, 0), extents, out if axis == 0 else None)
            if out is None:
                result: Array = like(np.ascontiguousarray(np.moveaxis(whole, 0, axis)), array)
                return result
            if whole is not out:
                out[...] = like(np.moveaxis(whole, 0, axis), out)
            return out

    def gather(self, array: Array, root: int, options: CommunicationOptions | None) -> list[Array] | None:
        """Collect the arrays of all ranks on one: see `mpistrat.Communicator.gather`. A collective call."""

        def check(_: CommunicationOptions) -> None:
            check_root(root, self._size)
            check_dtype(ReduceOp.SUM, array.dtype)

        with self._guard:
            text = lambda _: f"({array.dtype}, root={root})"  # noqa: E731
            call, found = self._calls.enter("gather", text, options, check, lambda: (shape_word(array), 0))
            require_equal_shapes(found[:, 0], "gather needs equal shapes, one dtype and one root", self._group, array)
            mine, nothing = np.array(to_host(array), order="C"), np.empty(0, np.uint8)
            is_root = self._rank == root
            received = [np.empty(mine.shape, mine.dtype) if is_root and rank != root else mine for rank in range(self._size)]
            sends = [mine if rank == root else nothing for rank in range(self._size)]
            self._guard.run(call, Pairwise(self._group, sends, received if is_root else [nothing] * self._size).run())
            return [like(one, array) for one in received] if is_root else None

    def all_to_all(self, arrays: Sequence[Array], options: CommunicationOptions | None) -> list[Array]:
        """Send an array to each rank: see `mpistrat.Communicator.all_to_all`. A collective call."""

        def check(_: CommunicationOptions) -> None:
            check_parts(arrays, self._size)
            check_dtype(ReduceOp.SUM, arrays[0].dtype)

        def facts() -> tuple[int, int]:
            return shape_word(arrays[0], 0 if arrays[0].ndim else None), 0

        with self._guard:
            text = lambda _: f"({', '.join(sorted({str(array.dtype) for array in arrays}))})"  # noqa: E731
            call, found = self._calls.enter("all_to_all", text, options, check, facts)
            needed = "all_to_all needs one dtype, and equal extents on all axes but the first"
            require_equal_shapes(found[:, 0], needed, self._group, arrays[self._rank])
            extents = self._exchange_extents(call, arrays)
            sends = [np.ascontiguousarray(to_host(array)).reshape(array.shape) for array in arrays]
            mine = sends[self._rank]
            received = [np.empty((extent, *mine.shape[1:])[: mine.ndim], mine.dtype) for extent in extents]
            np.copyto(received[self._rank], mine)
            self._guard.run(call, Pairwise(self._group, sends, received).run())
            return [like(one, array) for one, array in zip(received, arrays, strict=True)]

    def all_to_all_parts(self, array: Array, options: CommunicationOptions | None) -> Array:
        """Split an array along the first axis, exchange the parts, and concatenate those received. A collective call."""
        try:
            check_gather(array, 0, "all_to_all")
        except (TypeError, ValueError) as error:
            with self._guard:
                self._calls.refuse(self._calls.prepare_text("all_to_all", options), error)
        host = to_host(array)
        joined: Array = like(np.concatenate(self.all_to_all(np.array_split(host, self._size), options)), array)
        return joined

    def broadcast(self, array: Array, root: int, options: CommunicationOptions | None, out: Array | None) -> Array:
        """Return the array of rank `root`: see `mpistrat.Communicator.broadcast`. A collective call."""

        def check(_: CommunicationOptions) -> None:
            check_root(root, self._size)
            if out is not None:
                check_target(out, array if self._rank == root else out)

        def facts() -> tuple[int, int]:
            return shape_word(array if out is None else out), out is not None

        with self._guard:
            call, found = self._calls.enter("broadcast", lambda _: f"(root={root})", options, check, facts)
            # every `out` must have the shape of the root's array
            is_given = found[:, 1].astype(bool)
            if is_given.any():
                is_given[root] = True
                needed = "broadcast needs out of the shape and dtype of the root's array"
                require_equal_shapes(found[is_given, 0], needed, self._group, array if out is None else out)
            header = encode_shape(array)
            self._guard.run(call, self._bytes.broadcast(header, root).run())
            shape, dtype = decode_shape(header)
            check_dtype(ReduceOp.SUM, dtype, f"the array of replica {root}")
            result = _host_target(shape, dtype, out)
            if self._rank == root:
                np.copyto(result, to_host(array))
            if result.nbytes:
                self._guard.run(call, self._bytes.broadcast(_bytes(result), root).run())
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

    def _gather_rows(self, call: CollectiveCall, mine: Array, extents: Sequence[int], out: Array | None) -> Array:
        """Return the arrays of all ranks concatenated along axis 0: in `out` if that is in host memory."""
        whole = _host_target((sum(extents), *mine.shape[1:]), mine.dtype, out)
        starts = np.cumsum([0, *extents])
        whole[starts[self._rank] : starts[self._rank + 1]] = mine
        if whole.nbytes:
            row_bytes = whole.nbytes // whole.shape[0]
            bounds = [int(start) * row_bytes for start in starts]
            self._guard.run(call, self._bytes.all_gather(_bytes(whole), bounds).run())
        return whole

    def _exchange_extents(self, call: CollectiveCall, arrays: Sequence[Array]) -> list[int]:
        """Return the first extent of the array that each rank sends to this one; 1 for scalars."""
        mine = np.array([array.shape[0] if array.ndim else 1 for array in arrays], np.int64)
        received = np.empty_like(mine)
        request = self._group.comm.Ialltoall(mine, received)
        self._guard.run(call, until_complete(request, (mine, received)))
        return [int(extent) for extent in received]


def _host_target(shape: tuple[int, ...], dtype: np.dtype[np.generic], out: Array | None) -> Array:
    """Return host memory for a result: `out` if it is in host memory."""
    return out if type(out) is np.ndarray else np.empty(shape, dtype)


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)
