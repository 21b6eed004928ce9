"""``strategy.reduce``: the local part, over axes, before and after the reduction across replicas."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from mpistrat.arrays import Array, as_operand, in_dtype, is_on_device
from mpistrat.communicator.interface import BaseCommunicator
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.communicator.sparse import IndexedSlices, check_slices
from mpistrat.context.values import DistributedValues, PerReplica, select_replica
from mpistrat.cross_device.pairs import IDEMPOTENT, check_unambiguous
from mpistrat.errors import InvalidArgumentError
from mpistrat.reduction import ReduceOp, accumulation_dtype, check_across_replicas, check_dtype

__all__ = ["LocalReduction", "check_ambiguous", "reduce_locally"]


class _Origin(Enum):
    """What is known about the components of a value on the other replicas."""

    REPLICAS = 0  # each replica has its own
    MIRRORED = 1  # they are equal
    PLAIN = 2  # nothing; usually they are equal


class LocalReduction(NamedTuple):
    """What a replica sends to a reduction across replicas, and how it finishes the results.

    Attributes
    ----------
    op : ReduceOp
        The operation across replicas.
    sent : list of ndarray or IndexedSlices
        The arrays of this replica.
    finish : callable
        Takes the reduced arrays, and returns one result for each value.
    ambiguous : list of ndarray or IndexedSlices
        Components that could count once, or once for each replica: see `check_ambiguous`.
    """

    op: ReduceOp
    sent: list[Any]
    finish: Callable[[list[Any]], list[Any]]
    ambiguous: list[Any]


def reduce_locally(op: ReduceOp, values: Sequence[Any], axis: int | Iterable[int] | None, num_replicas: int) -> LocalReduction:
    """Reduce the components of this replica over `axis`, and return what has to be reduced across replicas.

    Parameters
    ----------
    op : ReduceOp
        SUM or MEAN; any operation if `axis` is None.
    values : sequence of per-replica values, mirrored values or array_like
        The result of a mirrored value is the value itself. A value that is not distributed is reduced by MEAN, MIN and MAX;
        its sum and product are refused on all replicas, unless it is zero on all.
    axis : int, list or tuple of int, or None
        Axes of each component to reduce over first.
    num_replicas : int
        Number of replicas.

    Raises
    ------
    TypeError
        If `axis` is of another type.
    InvalidArgumentError
        If an axis is out of range, `op` is not defined over axes, or the sum of a mirrored value is ambiguous.
    UnsupportedDtypeError
        If a component is not an array, or `op` is not defined for its dtype. Over axes booleans are counted; across replicas
        SUM and MEAN are not defined for them.
    NotImplementedError
        If IndexedSlices are reduced over axes, or by another operation than SUM or MEAN.
    """
    components = [_component(value) for value in values]
    origins = [_origin(value, num_replicas) for value in values]
    if axis is None:
        return _across(op, components, origins, num_replicas)
    axes = [_normalized(axis, component) for component in components]
    if op is ReduceOp.SUM:
        return _sum_over(axes, components, origins, num_replicas)
    if op is ReduceOp.MEAN:
        return _mean_over(axes, components, origins)
    raise InvalidArgumentError(f"reduce over axis={axis!r} takes SUM or MEAN, got {op.name}; use axis=None for {op.name}")


def check_ambiguous(part: LocalReduction, communicator: BaseCommunicator, options: CommunicationOptions | None = None) -> None:
    """Check that all `ambiguous` arrays are zero on all replicas. A collective call, if there are any.

    It is collective because they may be zero on some replicas only, and then all replicas must raise.

    Raises
    ------
    InvalidArgumentError
        On every replica, if one of the arrays is not zero on one of the replicas.
    """
    if not part.ambiguous:
        return
    mine = np.asarray(any(_rows(component).any() for component in part.ambiguous), np.int64)
    if communicator.all_reduce(ReduceOp.MAX, [mine], options)[0]:
        try:
            check_unambiguous(part.op, communicator.size)
        except InvalidArgumentError as error:
            error.raised_everywhere = True
            raise


def _origin(value: Any, num_replicas: int) -> _Origin:
    if num_replicas == 1 or isinstance(value, PerReplica):
        return _Origin.REPLICAS
    return _Origin.MIRRORED if isinstance(value, DistributedValues) else _Origin.PLAIN


def _component(value: Any) -> Any:
    component = select_replica(value)
    return component if isinstance(component, IndexedSlices) else as_operand(component)


def _across(op: ReduceOp, components: list[Any], origins: list[_Origin], num_replicas: int) -> LocalReduction:
    for component, origin in zip(components, origins, strict=True):
        if isinstance(component, IndexedSlices):
            check_slices(op, component)
        else:
            check_across_replicas(op, component.dtype)
        if origin is _Origin.MIRRORED and _rows(component).any():
            check_unambiguous(op, num_replicas)
    combines_plain = op in IDEMPOTENT
    is_sent = [origin is _Origin.REPLICAS or (origin is _Origin.PLAIN and combines_plain) for origin in origins]
    ambiguous = [] if combines_plain else [c for c, origin in zip(components, origins, strict=True) if origin is _Origin.PLAIN]

    def finish(totals: list[Any]) -> list[Any]:
        reduced = iter(totals)
        return [next(reduced) if sent else _copied(component) for component, sent in zip(components, is_sent, strict=True)]

    sent = [component for component, is_sent_ in zip(components, is_sent, strict=True) if is_sent_]
    return LocalReduction(op, sent, finish, ambiguous)


def _sum_over(axes: list[tuple[int, ...]], arrays: list[Array], origins: list[_Origin], num_replicas: int) -> LocalReduction:
    wide = [
        _added(array, over, accumulation_dtype(ReduceOp.SUM, _counted(array.dtype)))
        for array, over in zip(arrays, axes, strict=True)
    ]
    part = _across(ReduceOp.SUM, wide, origins, num_replicas)
    dtypes = [_counted(array.dtype) for array in arrays]

    def finish(totals: list[Array]) -> list[Array]:
        return [total.astype(dtype, copy=False) for total, dtype in zip(part.finish(totals), dtypes, strict=True)]

    return part._replace(finish=finish)


def _mean_over(axes: list[tuple[int, ...]], arrays: list[Array], origins: list[_Origin]) -> LocalReduction:
    """Sum elements and counts across replicas, then divide, so that every row has the same weight on all replicas."""
    sums, counts = [], []
    for array, over in zip(arrays, axes, strict=True):
        dtype = _counted(array.dtype)
        check_dtype(ReduceOp.MEAN, dtype)
        sums.append(_added(array, over, accumulation_dtype(ReduceOp.MEAN, dtype)))
        counts.append(np.asarray(np.prod([array.shape[axis] for axis in over], dtype=np.int64)))
    picked = [index for index, origin in enumerate(origins) if origin is not _Origin.MIRRORED]

    def finish(totals: list[Array]) -> list[Array]:
        for position, index in enumerate(picked):
            sums[index], counts[index] = totals[position], totals[position + len(picked)]
        return [
            _quotient(total, count, _counted(array.dtype)) for total, count, array in zip(sums, counts, arrays, strict=True)
        ]

    return LocalReduction(ReduceOp.SUM, [group[index] for group in (sums, counts) for index in picked], finish, [])


def _counted(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of a sum over axes: booleans are counted, as in NumPy."""
    return np.dtype(np.int64) if dtype.kind == "b" else dtype


def _added(array: Array, axes: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return the sum over some axes as an array, even if they are all axes."""
    if is_on_device(array):
        return array.sum(axes, dtype) if axes else array.astype(dtype)
    return np.asarray(np.add.reduce(array, axes, dtype=dtype))


def _rows(component: Array | IndexedSlices) -> Array:
    return component.values if isinstance(component, IndexedSlices) else component


def _copied(component: Array | IndexedSlices) -> Array | IndexedSlices:
    """Return a copy, because the component may be the user's array or that of a variable."""
    if isinstance(component, IndexedSlices):
        return IndexedSlices(component.values.copy(), component.indices.copy(), component.dense_shape)
    copied: Array = component.copy()
    return copied


def _normalized(axis: int | Iterable[int], component: Any) -> tuple[int, ...]:
    """Return the axes as non-negative integers without duplicates."""
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


def _quotient(total: Array, count: Array, dtype: np.dtype[Any]) -> Array:
    """Return total / count: in `dtype`, or in float64 if that is an integer dtype."""
    if dtype.kind in "iu":
        total = total.astype(np.float64)
    with np.errstate(invalid="ignore"):  # without rows on any replica the mean is NaN
        mean = total / total.dtype.type(count)
    return in_dtype(mean, mean.dtype if dtype.kind in "iu" else dtype)
