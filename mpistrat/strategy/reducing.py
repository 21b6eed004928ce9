"""Reduction over axes: what each replica does with its components before and after they are combined across replicas."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpistrat.arrays import Array, as_operand, in_dtype, is_on_device
from mpistrat.context.values import PerReplica, select_replica
from mpistrat.cross_device.pairs import check_unambiguous
from mpistrat.cross_device.sparse import IndexedSlices, check_slices
from mpistrat.errors import InvalidArgumentError
from mpistrat.reduction import ReduceOp, accumulation_dtype, check_dtype

__all__ = ["LocalPart", "local_part"]


class LocalPart(NamedTuple):
    """What is to be combined across replicas.

    Attributes
    ----------
    op : ReduceOp
        How.
    sent : list of ndarray or IndexedSlices
        The arrays of this replica.
    finish : callable
        Makes the results, one for each value, of the combined arrays.
    """

    op: ReduceOp
    sent: list[Any]
    finish: Callable[[list[Any]], list[Any]]


def local_part(op: ReduceOp, values: Sequence[Any], axis: int | Iterable[int] | None, num_replicas: int) -> LocalPart:
    """Return what is to be combined so that each value is reduced over `axis` and across replicas.

    Parameters
    ----------
    op : ReduceOp
        SUM or MEAN; without axes any.
    values : sequence of per-replica values or array_like
        One that is no per-replica value is equal on all replicas, and its own result.
    axis : int, list or tuple of int, or None
        Which axes of each component to reduce over first.
    num_replicas : int
        Replicas in sync.

    Raises
    ------
    TypeError
        If `axis` is of another type.
    InvalidArgumentError
        If an axis is out of range, `op` is not defined over axes, or a sum is ambiguous.
    UnsupportedDtypeError
        If a component is no array, or `op` is not defined for its dtype.
    NotImplementedError
        If slices are to be reduced over axes, or otherwise than by SUM or MEAN.
    """
    is_shared = [num_replicas == 1 or isinstance(value, PerReplica) for value in values]
    components = [_component(value) for value in values]
    if axis is None:
        return _across(op, components, is_shared, num_replicas)
    axes = [_normalized(axis, component) for component in components]
    if op is ReduceOp.SUM:
        return _sum_over(axes, components, is_shared, num_replicas)
    if op is ReduceOp.MEAN:
        return _mean_over(axes, components, is_shared)
    raise InvalidArgumentError(f"reduce over axis={axis!r} takes SUM or MEAN, got {op.name}; use axis=None for {op.name}")


def _component(value: Any) -> Any:
    component = select_replica(value)
    return component if isinstance(component, IndexedSlices) else as_operand(component)


def _across(op: ReduceOp, components: list[Any], is_shared: list[bool], num_replicas: int) -> LocalPart:
    for component, shared in zip(components, is_shared, strict=True):
        if isinstance(component, IndexedSlices):
            check_slices(op, component)
        else:
            check_dtype(op, component.dtype)
        if not shared and _rows(component).any():
            check_unambiguous(op, num_replicas)

    def finish(totals: list[Any]) -> list[Any]:
        reduced = iter(totals)
        return [
            next(reduced) if shared else _copied(component) for component, shared in zip(components, is_shared, strict=True)
        ]

    return LocalPart(op, [component for component, shared in zip(components, is_shared, strict=True) if shared], finish)


def _sum_over(axes: list[tuple[int, ...]], arrays: list[Array], is_shared: list[bool], num_replicas: int) -> LocalPart:
    wide = [
        _added(array, over, accumulation_dtype(ReduceOp.SUM, array.dtype)) for array, over in zip(arrays, axes, strict=True)
    ]
    op, sent, finish = _across(ReduceOp.SUM, wide, is_shared, num_replicas)
    dtypes = [array.dtype for array in arrays]
    return LocalPart(op, sent, lambda totals: [t.astype(d, copy=False) for t, d in zip(finish(totals), dtypes, strict=True)])


def _mean_over(axes: list[tuple[int, ...]], arrays: list[Array], is_shared: list[bool]) -> LocalPart:
    """Divide sums by counts only after both were added up, so that replicas with few or no rows weigh as they should."""
    sums, counts = [], []
    for array, over in zip(arrays, axes, strict=True):
        check_dtype(ReduceOp.MEAN, array.dtype)
        sums.append(_added(array, over, accumulation_dtype(ReduceOp.MEAN, array.dtype)))
        counts.append(np.asarray(np.prod([array.shape[axis] for axis in over], dtype=np.int64)))
    picked = [index for index, shared in enumerate(is_shared) if shared]

    def finish(totals: list[Array]) -> list[Array]:
        for position, index in enumerate(picked):
            sums[index], counts[index] = totals[position], totals[position + len(picked)]
        return [_quotient(*parts) for parts in zip(sums, counts, arrays, strict=True)]

    return LocalPart(ReduceOp.SUM, [group[index] for group in (sums, counts) for index in picked], finish)


def _added(array: Array, axes: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return the sum over some axes, as an array even where that is all of them."""
    if is_on_device(array):
        return array.sum(axes, dtype) if axes else array.astype(dtype)
    return np.asarray(np.add.reduce(array, axes, dtype=dtype))


def _rows(component: Array | IndexedSlices) -> Array:
    return component.values if isinstance(component, IndexedSlices) else component


def _copied(component: Array | IndexedSlices) -> Array | IndexedSlices:
    """Return a result of its own: the component may be the user's array, or that of a variable."""
    if isinstance(component, IndexedSlices):
        return IndexedSlices(component.values.copy(), component.indices.copy(), component.dense_shape)
    copied: Array = component.copy()
    return copied


def _normalized(axis: int | Iterable[int], component: Any) -> tuple[int, ...]:
    """Return the axes as non-negative integers, each once."""
    if isinstance(component, IndexedSlices):
        raise NotImplementedError(
            f"reduce over axis={axis!r} is not supported for {component!r}; pass axis=None, or reduce slices.to_dense()"
        )
    wanted = axis if isinstance(axis, (list, tuple)) else (axis,)
    try:
        axes = [operator.index(item) for item in wanted]
    except TypeError:
        raise TypeError(f"axis must be None, an int, or a list or tuple of int; got {axis!r}") from None
    ndim = component.ndim
    outside = [item for item in axes if not -ndim <= item < ndim]
    if outside:
        raise InvalidArgumentError(f"axis {outside[0]} is out of range for a component of {ndim} axes; got axis={axis!r}")
    return tuple(sorted({item % ndim for item in axes}))


def _quotient(total: Array, count: Array, like: Array) -> Array:
    """Return total / count: in the dtype of the values where that is a float, in float64 where it is an integer."""
    if like.dtype.kind in "iu":
        total = total.astype(np.float64)
    with np.errstate(invalid="ignore"):  # no rows on any replica: the mean of nothing is NaN
        mean = total / total.dtype.type(count)
    return in_dtype(mean, mean.dtype if like.dtype.kind in "iu" else like.dtype)
