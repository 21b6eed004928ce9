"""IndexedSlices: some rows of a large array, such as the gradient of an embedding, and their sum over replicas."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from mpistrat.arrays import Array, as_array, like, to_host
from mpistrat.communicator.interface import BaseCommunicator
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.errors import InvalidArgumentError, UnsupportedDtypeError
from mpistrat.reduction import ReduceOp, accumulation_dtype, check_dtype, divide, quiet


class IndexedSlices:
    """Some rows of an array whose other rows are zero. Rows with the same index are summed.

    It is a leaf of nested values, like an array: ``ctx.all_reduce`` and ``strategy.reduce`` accept it, with SUM or MEAN. Its
    arrays may be on a GPU; results are on the GPU too, but are computed in host memory.

    Parameters
    ----------
    values : array_like
        The rows, stacked along axis 0; there may be none.
    indices : array_like of int
        Row index of each row in the dense array; one-dimensional, as long as `values`.
    dense_shape : sequence of int, optional
        The shape of the dense array.

    Raises
    ------
    InvalidArgumentError
        If the shapes do not match, or an index is negative or outside the dense array.
    UnsupportedDtypeError
        If the values are not numbers, or the indices not integers.
    """

    def __init__(self, values: Any, indices: Any, dense_shape: Sequence[int] | None = None) -> None:
        self._values = as_array(values, "values")
        self._indices = _checked_indices(indices, self._values)
        self._dense_shape = None if dense_shape is None else _checked_shape(dense_shape, self._values, self._indices)

    @property
    def values(self) -> Array:
        """The rows."""
        return self._values

    @property
    def indices(self) -> Array:
        """Index of each row in the dense array, as int64."""
        return self._indices

    @property
    def dense_shape(self) -> tuple[int, ...] | None:
        """The shape of the dense array, or None if it was not given."""
        return self._dense_shape

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The same as `dense_shape`."""
        return self._dense_shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of one element of the rows."""
        return self._values.dtype

    def to_dense(self) -> Array:
        """Return the dense array.

        Raises
        ------
        InvalidArgumentError
            If `dense_shape` was not given.
        """
        if self._dense_shape is None:
            raise InvalidArgumentError(
                f"{self!r} has no dense_shape, so how many rows the dense array has is not known: pass "
                "IndexedSlices(values, indices, dense_shape)"
            )
        totals, rows = _totals(ReduceOp.SUM, self._values, self._indices)
        dense = np.zeros(self._dense_shape, self.dtype)
        dense[rows] = totals
        return cast("Array", like(dense, self._values))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise InvalidArgumentError(f"{self!r} cannot be read as an array without a copy: call to_dense()")
        return np.asarray(to_host(self.to_dense()), dtype)

    def __repr__(self) -> str:
        rows = "1 row" if len(self._indices) == 1 else f"{len(self._indices)} rows"
        return f"IndexedSlices({rows} of {self.dtype} {self._values.shape[1:]}, dense_shape={self._dense_shape})"


def all_reduce_slices(
    communicator: BaseCommunicator, op: ReduceOp, slices: IndexedSlices, options: CommunicationOptions | None = None
) -> IndexedSlices:
    """Sum the rows of all replicas; every replica receives the result. A collective call.

    Rows and indices are gathered; replicas may have different numbers of rows. Rows of equal index are summed in replica order,
    16-bit floats in float32. The mean divides by the number of replicas, even if only some have a row. Of the result each index
    is there once, in ascending order; dtype, row shape and dense shape must be the same on all replicas.
    """
    error: Exception | None = None
    try:
        check_slices(op, slices)
    except (TypeError, NotImplementedError) as refused:
        error = refused
    kind = f"{slices.dtype} rows of shape {slices.values.shape[1:]}, dense_shape={slices.dense_shape}"
    communicator.agree(f"all_reduce({op.name}) of IndexedSlices with {kind}", error, options)
    indices = communicator.all_gather(to_host(slices.indices), 0, options)
    totals, rows = _totals(op, communicator.all_gather(to_host(slices.values), 0, options), indices)
    results = np.empty(totals.shape, slices.dtype)
    quiet()(divide, totals, communicator.size if op is ReduceOp.MEAN else 1, results)
    return IndexedSlices(like(results, slices.values), like(rows, slices.indices), slices.dense_shape)


def broadcast_slices(communicator: BaseCommunicator, slices: IndexedSlices, root: int = 0) -> IndexedSlices:
    """Return the slices of replica `root`, whose dense shapes must be equal. A collective call."""
    communicator.agree(f"broadcast of IndexedSlices with dense_shape={slices.dense_shape}")
    values, indices = (like(communicator.broadcast(to_host(part), root), part) for part in (slices.values, slices.indices))
    return IndexedSlices(values, indices, slices.dense_shape)


def check_slices(op: ReduceOp, slices: IndexedSlices) -> None:
    """Check that `op` is defined for slices."""
    if op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise NotImplementedError(
            f"{op.name} of {slices!r} is not supported: the rows that it does not name are zero, and would have to be compared "
            f"or multiplied too. Reduce slices.to_dense() with {op.name}, or the slices with SUM or MEAN."
        )
    check_dtype(op, slices.dtype, "the rows of IndexedSlices")


def gather_refused(slices: IndexedSlices) -> NotImplementedError:
    """Return the error of gathering slices."""
    return NotImplementedError(
        f"{slices!r} cannot be gathered: rows of different replicas with one index would be one row or several.\n"
        "    incorrect:  ctx.all_gather(slices, axis=0)\n"
        "    correct:    ctx.all_gather([slices.values, slices.indices], axis=0), or ctx.all_gather(slices.to_dense(), axis=0)"
    )


def _totals(op: ReduceOp, values: Array, indices: Array) -> tuple[Array, Array]:
    """Return the sums of rows of equal index, in the accumulation dtype, and the indices in ascending order; in host memory."""
    values, indices = to_host(values), to_host(indices)
    # stable: rows of equal index are summed in their given order
    order = np.argsort(indices, kind="stable")
    ordered = indices[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=-1))
    # without a dtype NumPy would sum small integers and booleans in 64 bits
    total = quiet()(np.add.reduceat, values[order], starts, 0, accumulation_dtype(op, values.dtype))
    return total, ordered[starts]


def _checked_indices(indices: Any, values: Array) -> Array:
    array = as_array(indices, "indices")
    if values.ndim == 0:
        raise InvalidArgumentError("values of IndexedSlices must have at least one axis, that of the rows; got a scalar")
    if array.size and array.dtype.kind not in "iu":
        raise UnsupportedDtypeError(f"indices of IndexedSlices must be integers; got dtype {array.dtype}")
    if array.shape != values.shape[:1]:
        raise InvalidArgumentError(
            f"indices of IndexedSlices must have shape {values.shape[:1]}, one for each row of values {values.shape}; "
            f"got shape {array.shape}"
        )
    signed = array.astype(np.int64, copy=False)
    if (wrong := array[signed < 0]).size:  # also 2**63 and more, as of hashes, which would count rows from the end
        raise InvalidArgumentError(f"indices of IndexedSlices must be at least 0, and less than 2**63; got {wrong[0]}")
    return signed


def _checked_shape(dense_shape: Sequence[int], values: Array, indices: Array) -> tuple[int, ...]:
    try:
        shape = tuple(operator.index(extent) for extent in dense_shape)
    except TypeError:
        raise InvalidArgumentError(f"dense_shape must be a sequence of int, or None; got {dense_shape!r}") from None
    if len(shape) != values.ndim or shape[1:] != values.shape[1:] or shape[0] < 0:
        rest = "".join(f", {extent}" for extent in values.shape[1:])
        raise InvalidArgumentError(f"dense_shape must be (rows{rest}) for values of shape {values.shape}; got {shape}")
    if indices.size and indices.max() >= shape[0]:
        raise InvalidArgumentError(f"index {indices.max()} is outside dense_shape {shape}: 0 to {shape[0] - 1} are accepted")
    return shape
