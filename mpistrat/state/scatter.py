"""Scatter updates: check the rows, gather those of all replicas, and apply them to an array.

================  ============================================================
`scatter_add`     adds each row
`scatter_sub`     subtracts it
`scatter_mul`     multiplies by it
`scatter_div`     divides by it
`scatter_min`     keeps the elementwise minimum of the row and the array
`scatter_max`     keeps the elementwise maximum
`scatter_update`  replaces the row of the array; the last one stays
================  ============================================================

Rows with the same index are applied one after another; none is lost.
"""

from __future__ import annotations

import numpy as np

from mpistrat.arrays import Array, is_on_device, like, to_host
from mpistrat.communicator.sparse import IndexedSlices
from mpistrat.context.assignment import converted
from mpistrat.context.strategy_like import StrategyLike
from mpistrat.errors import InvalidArgumentError, UnsupportedDtypeError
from mpistrat.reduction import ReduceOp, accumulation_dtype, check_dtype
from mpistrat.state.aggregation import VariableAggregation

__all__ = ["COMPARING", "Rows", "apply", "by_rows", "checked_rows", "gathered_rows"]

# the rows, and their indices
Rows = tuple[Array, Array]

# the updates for which SUM and MEAN of the replicas' rows are not defined
COMPARING = ("scatter_max", "scatter_min", "scatter_update")

_UFUNCS = {
    "scatter_add": np.add,
    "scatter_sub": np.subtract,
    "scatter_mul": np.multiply,
    "scatter_div": np.divide,
    "scatter_min": np.minimum,
    "scatter_max": np.maximum,
}
_ORDERED = {"scatter_min": ReduceOp.MIN, "scatter_max": ReduceOp.MAX}


def by_rows(method: str) -> str:
    """Return the method for rows that corresponds to ``scatter_nd_…`` for single entries."""
    return method.replace("_nd_", "_")


def checked_rows(method: str, delta: object, target: Array, owner: object) -> Rows:
    """Return the rows of `delta`, after checking that `method` can apply them to `target`, the array of `owner`.

    Raises
    ------
    TypeError
        If `delta` is not an IndexedSlices.
    InvalidArgumentError
        If the rows have another shape, or an index or a value is out of range.
    UnsupportedDtypeError
        If the array cannot hold the rows' kind of number, or `method` is not defined for its dtype.
    """
    if not isinstance(delta, IndexedSlices):
        raise TypeError(
            f"{owner!r}.{method} takes IndexedSlices; got {type(delta).__name__}.\n"
            f"    incorrect:  variable.{method}(values)\n"
            f"    correct:    variable.{method}(mpistrat.IndexedSlices(values, indices))"
        )
    _check_method(method, target, owner)
    values, indices = delta.values, delta.indices
    if target.ndim == 0 or values.shape[1:] != target.shape[1:]:
        raise InvalidArgumentError(
            f"{owner!r} has shape {target.shape}; rows of shape {values.shape[1:]} cannot be scattered into it"
        )
    if indices.size and indices.max() >= len(target):
        accepted = f"0 to {len(target) - 1} are accepted" if len(target) else "it has no rows"
        raise InvalidArgumentError(f"index {indices.max()} is out of range for {owner!r}: {accepted}")
    return converted(values, target.dtype, owner), indices


def gathered_rows(rows: Rows, aggregation: VariableAggregation, strategy: StrategyLike) -> Rows:
    """Return the rows of all replicas, in replica order. A collective call.

    Parameters
    ----------
    rows : Rows
        The rows of this replica; replicas may have different numbers of them.
    aggregation : VariableAggregation
        SUM: all rows; MEAN: all, each divided by the number of replicas; ONLY_FIRST_REPLICA: the rows of replica 0.
    strategy : Strategy
        The strategy of the replicas.
    """
    communicator = strategy.extended.communicator
    rows = to_host(rows[0]), to_host(rows[1])  # rows are applied in host memory
    if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        return communicator.broadcast(rows[0]), communicator.broadcast(rows[1])
    values, indices = (communicator.all_gather(part) for part in rows)
    if aggregation is VariableAggregation.MEAN:
        wide = values.astype(_wide(values), copy=False)
        values = wide / wide.dtype.type(communicator.size)
    return values, indices


def apply(method: str, target: Array, rows: Rows) -> None:
    """Apply rows to `target`, accumulating 16-bit floats in float32; the affected rows go through host memory."""
    values, indices = map(to_host, rows)
    if method == "scatter_update" and not is_on_device(target):
        target[indices] = values
        return
    # each affected row once, in the accumulation dtype; CuPy would apply rows with the same index in any order
    touched, position = np.unique(indices, return_inverse=True)
    are_different = len(touched) == len(indices)
    if are_different:
        touched = indices
    wide = to_host(target[touched]).astype(_wide(target), copy=False)
    if method == "scatter_update":
        wide[slice(None) if are_different else position] = values
    elif are_different:  # faster than `at`
        _UFUNCS[method](wide, values.astype(wide.dtype, copy=False), out=wide)
    else:
        _UFUNCS[method].at(wide, position, values.astype(wide.dtype, copy=False))
    target[touched] = like(wide.astype(target.dtype, copy=False), target)


def _wide(array: Array) -> np.dtype[np.generic]:
    return accumulation_dtype(ReduceOp.SUM, array.dtype)


def _check_method(method: str, target: Array, owner: object) -> None:
    if method in _ORDERED:
        check_dtype(_ORDERED[method], target.dtype, repr(owner))
    if method == "scatter_sub" and target.dtype.kind == "b":
        raise UnsupportedDtypeError(
            f"{owner!r}.{method} is not defined for bool; accepted are integers, floats and complex numbers"
        )
    if method == "scatter_div" and target.dtype.kind in "biu":
        raise UnsupportedDtypeError(
            f"{owner!r}.{method} is not defined for {target.dtype}, which cannot hold a quotient; accepted are floats and "
            "complex numbers, or scatter_update with the quotients that you have rounded"
        )
