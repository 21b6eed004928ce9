"""What a replica computes before and after a reduction across replicas: over axes, and for weighted means."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mpistrat.arrays import Array, as_array, as_operand, in_dtype, is_on_device
from mpistrat.communicator.interface import BaseCommunicator
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.communicator.sparse import IndexedSlices
from mpistrat.context.values import DistributedValues, PerReplica
from mpistrat.cross_device import as_passed, check_defined, check_unambiguous, rows_of
from mpistrat.errors import InvalidArgumentError, UnsupportedDtypeError
from mpistrat.reduction import HALF_DTYPES, ReduceOp, accumulation_dtype, check_dtype, quiet


class LocalReduction(NamedTuple):
    """What a replica sends to a reduction across replicas, and how it finishes the results."""

    op: ReduceOp
    sent: list[Any]
    finish: Callable[[list[Any]], list[Any]]
    ambiguous: list[Any]


def reduce_locally(
    op: ReduceOp, values: Sequence[Any], given: Sequence[Any], axis: int | Iterable[int] | None, num_replicas: int
) -> LocalReduction:
    """Reduce what is given of values on this replica over `axis`, and return what has to be reduced across replicas."""
    if axis is not None and op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise InvalidArgumentError(f"reduce over axis={axis!r} takes SUM or MEAN, got {op.name}; use axis=None for {op.name}")
    parts = [_part(op, each if isinstance(each, IndexedSlices) else as_operand(each), axis) for each in given]
    passed = [as_passed(op, value) for value in values]
    is_sent = [num_replicas == 1 or isinstance(value, PerReplica) for value in passed]
    ambiguous = []
    for (own, _), value, sent in zip(parts, passed, is_sent, strict=True):
        is_equal = not sent and isinstance(value, DistributedValues)
        check_defined(op, own[0], num_replicas if is_equal else 1)
        if not (sent or is_equal):
            ambiguous.append(own[0])

    def finish(totals: list[Any]) -> list[Any]:
        coming = iter(totals)
        return [
            result(*([next(coming) for _ in own] if sent else map(_copied, own)))
            for (own, result), sent in zip(parts, is_sent, strict=True)
        ]

    across = [array for (own, _), sent in zip(parts, is_sent, strict=True) if sent for array in own]
    return LocalReduction(op if axis is None else ReduceOp.SUM, across, finish, ambiguous)


def _part(op: ReduceOp, component: Any, axis: int | Iterable[int] | None) -> tuple[list[Any], Callable[..., Any]]:
    """Return what is reduced across replicas for a component, and what makes its result of the totals.

    For the mean over axes these are sums and numbers of elements, so that every row has the same weight on all replicas.
    """
    if axis is None:
        return [component], lambda total: total
    axes, dtype = _normalized(axis, component), component.dtype
    if dtype.kind == "b":  # they are counted, as in NumPy
        dtype = np.dtype(np.int64)
    if op is ReduceOp.MEAN:
        check_dtype(op, dtype)
    added = _added(component, axes, accumulation_dtype(op, dtype))
    if op is ReduceOp.SUM:
        return [added], lambda total: in_dtype(total, dtype)
    count = np.asarray(np.prod([component.shape[each] for each in axes], dtype=np.int64))
    return [added, count], lambda total, count: _quotient(total, count, dtype)


def check_ambiguous(part: LocalReduction, communicator: BaseCommunicator, options: CommunicationOptions | None = None) -> None:
    """Check that all `ambiguous` arrays are zero on all replicas. A collective call, if there are any."""
    if not part.ambiguous:
        return
    mine = np.asarray(any(rows_of(component).any() for component in part.ambiguous), np.int64)
    if communicator.all_reduce(ReduceOp.MAX, [mine], options)[0]:
        try:
            check_unambiguous(part.op, communicator.size)
        except InvalidArgumentError as error:
            error.raised_everywhere = True
            raise


def _added(array: Array, axes: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return the sum over some axes as an array, even if they are all axes."""
    if is_on_device(array):
        return array.sum(axes, dtype) if axes else array.astype(dtype)
    return np.asarray(quiet()(np.add.reduce, array, axes, dtype))


def _copied(component: Array | IndexedSlices) -> Array | IndexedSlices:
    """Return a copy, because the component may be the user's array or that of a variable."""
    if isinstance(component, IndexedSlices):
        return IndexedSlices(component.values.copy(), component.indices.copy(), component.dense_shape)
    return component.copy()


def _normalized(axis: int | Iterable[int], component: Any) -> tuple[int, ...]:
    """Return the axes as non-negative integers."""
    if isinstance(component, IndexedSlices):
        advice = "pass axis=None, or reduce slices.to_dense()"
        raise NotImplementedError(f"reduce over axis={axis!r} is not supported for {component!r}; {advice}")
    wanted = axis if isinstance(axis, (list, tuple)) else (axis,)
    try:
        axes = [operator.index(item) for item in wanted]
    except TypeError:
        raise TypeError(f"axis must be None, an int, or a list or tuple of int; got {axis!r}") from None
    ndim = component.ndim
    outside = [item for item in axes if not -ndim <= item < ndim]
    if outside:
        raise InvalidArgumentError(f"axis {outside[0]} is out of range for a component of {ndim} axes; got axis={axis!r}")
    normalized = {item % ndim for item in axes}
    if len(normalized) < len(axes):
        raise InvalidArgumentError(f"each axis can be reduced once; got axis={axis!r} for a component of {ndim} axes")
    return tuple(sorted(normalized))


def _quotient(total: Array, count: Array, dtype: np.dtype[Any]) -> Array:
    """Return total / count: in `dtype`, or in float64 if that is an integer dtype."""
    if dtype.kind in "iu":
        total = total.astype(np.float64)
    # CuPy computes with its own 0-d arrays and with NumPy's scalars
    divisor = count.astype(total.dtype) if is_on_device(count) else total.dtype.type(count)
    mean = quiet()(operator.truediv, total, divisor)  # NaN without rows, or weights, on any replica
    return in_dtype(mean, mean.dtype if dtype.kind in "iu" else dtype)


def weighted_part(
    op: ReduceOp, arrays: Sequence[Any], weight: Any, out: Any = None
) -> tuple[list[Array], Callable[[list[Array]], list[Array]]]:
    """Return the arrays to sum across replicas for a weighted mean, and a function that computes the means from the sums."""
    if op is not ReduceOp.MEAN:
        raise InvalidArgumentError(f"weight= is for MEAN, got {op.name}: use MEAN, or multiply the value by the weight")
    if out is not None:
        raise InvalidArgumentError("out= is for reductions without a weight; copy the result there")
    number = _checked_weight(weight)
    for array in arrays:
        _check_weighted(array, number)

    def finish(totals: list[Array]) -> list[Array]:
        *sums, weights = totals
        return [_quotient(total, weights, array.dtype) for total, array in zip(sums, arrays, strict=True)]

    return [*(_weighted(array, number) for array in arrays), np.asarray(number)], finish


def _weighted(array: Array, weight: float) -> Array:
    wide = accumulation_dtype(ReduceOp.MEAN, array.dtype)
    if weight == 0:
        return np.zeros_like(array, wide, order="C")
    return in_dtype(quiet()(partial(np.multiply, dtype=wide), array, wide.type(weight)), wide)


def _checked_weight(weight: Any) -> float:
    array = as_array(weight, "weight")
    if array.ndim or array.dtype.kind == "c" or not 0 <= array < np.inf:
        raise InvalidArgumentError(f"weight must be one finite number that is not negative; got {weight!r}")
    return float(array)


def _check_weighted(array: Any, weight: float) -> None:
    """Refuse what has no weighted mean, and a weight that overflows, or loses digits, in the dtype of the sum."""
    if isinstance(array, IndexedSlices):
        raise NotImplementedError(f"the weighted mean of {array!r} is not supported; pass slices.to_dense()")
    if array.dtype not in HALF_DTYPES and array.dtype.kind not in "fc":
        raise UnsupportedDtypeError(f"the weighted mean is not supported for dtype {array.dtype}: cast to a float dtype first")
    check_dtype(ReduceOp.MEAN, array.dtype)  # refuses foreign byte orders, with any weight
    wide = accumulation_dtype(ReduceOp.MEAN, array.dtype)
    least, greatest = float(np.finfo(wide).tiny), float(np.finfo(wide).max)
    if weight and not least <= weight <= greatest:
        raise InvalidArgumentError(
            f"weight {weight} is out of the range of {wide}, the dtype in which values of dtype {array.dtype} are weighted: 0 "
            f"and {least} to {greatest} are accepted; scale the weights of all replicas by the same factor"
        )
