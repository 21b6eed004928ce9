"""The weighted mean: each replica sends weighted arrays and its weight, and divides the sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpistrat.arrays import Array, as_array, in_dtype
from mpistrat.communicator.sparse import IndexedSlices
from mpistrat.errors import InvalidArgumentError, UnsupportedDtypeError
from mpistrat.reduction import HALF_DTYPES, ReduceOp, accumulation_dtype, check_dtype

__all__ = ["weighted_part"]


def weighted_part(
    op: ReduceOp, arrays: Sequence[Any], weight: Any, out: Any = None
) -> tuple[list[Array], Callable[[list[Array]], list[Array]]]:
    """Return the arrays to sum across replicas for a weighted mean, and a function that computes the means from the sums.

    The weight is summed in the same batch as the weighted arrays. 16-bit floats are summed in float32.

    Parameters
    ----------
    op : ReduceOp
        Must be MEAN.
    arrays : sequence of ndarray
        Floats or complex numbers.
    weight : float
        The weight of this replica. With weight 0 its arrays are ignored, even if they are NaN.
    out : nest or None
        Where the caller wants the results: not supported.

    Raises
    ------
    InvalidArgumentError
        If `op` is not MEAN, there is an `out`, or `weight` is not a finite number, negative, or out of the range of the dtype
        of an array.
    UnsupportedDtypeError
        If an array has integers or booleans.
    NotImplementedError
        If one of them is IndexedSlices.
    """
    if op is not ReduceOp.MEAN:
        raise InvalidArgumentError(f"weight= is for MEAN, got {op.name}: use MEAN, or multiply the value by the weight")
    if out is not None:
        raise InvalidArgumentError("out= is for reductions without a weight; copy the result there")
    number = _checked_weight(weight)
    for array in arrays:
        _check_dtype(array)
        _check_range(array.dtype, number)
    sent = [_weighted(array, number) for array in arrays]
    dtypes = [array.dtype for array in arrays]

    def finish(totals: list[Array]) -> list[Array]:
        *sums, weights = totals
        with np.errstate(invalid="ignore"):  # if all weights are 0, the mean is NaN
            means = [total / total.dtype.type(weights) for total in sums]
        return [in_dtype(mean, dtype) for mean, dtype in zip(means, dtypes, strict=True)]

    return [*sent, np.asarray(number)], finish


def _weighted(array: Array, weight: float) -> Array:
    wide = accumulation_dtype(ReduceOp.MEAN, array.dtype)
    if weight == 0:
        return np.zeros_like(array, wide, order="C")
    return in_dtype(np.multiply(array, wide.type(weight), dtype=wide), wide)


def _checked_weight(weight: Any) -> float:
    array = as_array(weight, "weight")
    if array.ndim or array.dtype.kind == "c" or not 0 <= array < np.inf:
        raise InvalidArgumentError(f"weight must be one finite number that is not negative; got {weight!r}")
    return float(array)


def _check_dtype(array: Any) -> None:
    if isinstance(array, IndexedSlices):
        raise NotImplementedError(f"the weighted mean of {array!r} is not supported; pass slices.to_dense()")
    if array.dtype not in HALF_DTYPES and array.dtype.kind not in "fc":
        raise UnsupportedDtypeError(
            f"the weighted mean is not supported for dtype {array.dtype}: cast to float32 or float64 first"
        )
    check_dtype(ReduceOp.MEAN, array.dtype)  # refuses foreign byte orders, with any weight


def _check_range(dtype: np.dtype[Any], weight: float) -> None:
    """Refuse a weight that overflows, or loses digits, in the dtype of the sum."""
    wide = accumulation_dtype(ReduceOp.MEAN, dtype)
    least, greatest = float(np.finfo(wide).tiny), float(np.finfo(wide).max)
    if weight and not least <= weight <= greatest:
        raise InvalidArgumentError(
            f"weight {weight} is out of the range of {wide}, the dtype in which values of dtype {dtype} are weighted: 0 and "
            f"{least} to {greatest} are accepted; scale the weights of all replicas by the same factor"
        )
