"""StrategyExtended: what all strategies share, for authors of strategies and libraries."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from mpistrat.arrays import Array, as_array
from mpistrat.context.values import DistributedValues, PerReplica, select_replica
from mpistrat.cross_device.collectives import Collectives, check_gather
from mpistrat.errors import InvalidArgumentError
from mpistrat.reduction import ReduceOp, accumulation_dtype, check_dtype
from mpistrat.structures import Structure

__all__ = ["StrategyExtended"]

# an operation, the arrays to all-reduce with it, and what makes results of theirs
_LocalPart = tuple[ReduceOp, list[Array], Callable[[list[Array]], list[Array]]]

# combining equal components with these gives the component again
_IDEMPOTENT = (ReduceOp.MEAN, ReduceOp.MIN, ReduceOp.MAX)


class StrategyExtended:
    """How a strategy communicates.

    Parameters
    ----------
    collectives : Collectives
        The collectives over the strategy's replicas.
    """

    def __init__(self, collectives: Collectives) -> None:
        self.collectives = collectives

    @property
    def should_checkpoint(self) -> bool:
        """Whether this rank is the one that writes checkpoints: replica 0."""
        return self.collectives.rank == 0

    @property
    def should_save_summary(self) -> bool:
        """Whether this rank is the one that writes logs: replica 0."""
        return self.collectives.rank == 0

    def reduce(
        self, reduce_op: ReduceOp | str, values: Sequence[Any], axis: int | Iterable[int] | None, structure: Structure
    ) -> list[Array]:
        """Combine each of several values across replicas, after reducing it over `axis` on each. A collective call.

        Only per-replica values take part in the communication; any other value is equal on all replicas.
        """
        try:
            op = ReduceOp.parse(reduce_op)
            sent_op, sent, finish = self._local_part(op, values, axis)
        except (TypeError, ValueError) as error:
            self.collectives.refuse("reduce", error)
        if self.collectives.is_strict:
            self.collectives.agree(f"reduce({op.name}, axis={axis!r}) of {structure}")
        return finish(self.collectives.all_reduce(sent_op, sent))

    def gather(self, values: Sequence[Any], axis: int, structure: Structure) -> list[Array]:
        """Concatenate the components of each value; one that is not distributed is its own result. A collective call."""
        try:
            arrays = [as_array(select_replica(value)) for value in values]
            for array in arrays:
                check_gather(array, axis)
        except (TypeError, ValueError) as error:
            self.collectives.refuse("gather", error)
        if self.collectives.is_strict:
            self.collectives.agree(f"gather(axis={axis}) of {structure}")
        return [
            self.collectives.all_gather(array, axis) if isinstance(value, DistributedValues) else array
            for value, array in zip(values, arrays, strict=True)
        ]

    def _local_part(self, op: ReduceOp, values: Sequence[Any], axis: int | Iterable[int] | None) -> _LocalPart:
        """Return what is to be all-reduced, how, and what makes the results of it."""
        shared = [self.collectives.size == 1 or isinstance(value, PerReplica) for value in values]
        arrays = [as_array(select_replica(value)) for value in values]
        if axis is None:
            return self._across(op, arrays, shared)
        axes = [_normalized(axis, array.ndim) for array in arrays]
        if op is ReduceOp.SUM:
            return self._sum_over(axes, arrays, shared)
        if op is ReduceOp.MEAN:
            return self._mean_over(axes, arrays, shared)
        raise InvalidArgumentError(f"reduce over axis={axis!r} takes SUM or MEAN, got {op.name}; use axis=None for {op.name}")

    def _sum_over(self, axes: list[tuple[int, ...]], arrays: list[Array], shared: list[bool]) -> _LocalPart:
        wide = [
            np.asarray(np.add.reduce(array, over, dtype=accumulation_dtype(ReduceOp.SUM, array.dtype)))
            for array, over in zip(arrays, axes, strict=True)
        ]
        op, sent, finish = self._across(ReduceOp.SUM, wide, shared)
        dtypes = [array.dtype for array in arrays]
        return op, sent, lambda totals: [t.astype(d, copy=False) for t, d in zip(finish(totals), dtypes, strict=True)]

    def _mean_over(self, axes: list[tuple[int, ...]], arrays: list[Array], shared: list[bool]) -> _LocalPart:
        """Divide sums by counts only after both were added up, so that replicas with few or no rows weigh as they should."""
        sums, counts = [], []
        for array, over in zip(arrays, axes, strict=True):
            check_dtype(ReduceOp.MEAN, array.dtype)
            sums.append(np.asarray(np.add.reduce(array, over, dtype=_mean_dtype(array.dtype))))
            counts.append(np.asarray(np.prod([array.shape[axis] for axis in over], dtype=np.int64)))
        picked = [index for index, is_shared in enumerate(shared) if is_shared]

        def finish(totals: list[Array]) -> list[Array]:
            for position, index in enumerate(picked):
                sums[index], counts[index] = totals[position], totals[position + len(picked)]
            return [_quotient(*parts) for parts in zip(sums, counts, arrays, strict=True)]

        return ReduceOp.SUM, [group[index] for group in (sums, counts) for index in picked], finish

    def _across(self, op: ReduceOp, arrays: list[Array], shared: list[bool]) -> _LocalPart:
        for array, is_shared in zip(arrays, shared, strict=True):
            check_dtype(op, array.dtype)
            if not is_shared:
                self._check_unambiguous(op, array)

        def finish(totals: list[Array]) -> list[Array]:
            reduced = iter(totals)
            return [next(reduced) if is_shared else array for array, is_shared in zip(arrays, shared, strict=True)]

        return op, [array for array, is_shared in zip(arrays, shared, strict=True) if is_shared], finish

    def _check_unambiguous(self, op: ReduceOp, array: Array) -> None:
        if op not in _IDEMPOTENT and array.any():
            raise InvalidArgumentError(
                f"{op.name} of a value that is no per-replica value is ambiguous with {self.collectives.size} replicas: does "
                f"it count once, or {self.collectives.size} times?\n"
                '    incorrect:  strategy.reduce("sum", 5.0, axis=None)\n'
                '    correct:    strategy.reduce("sum", strategy.run(fn), axis=None), with the value that fn returns on each '
                "replica; or the value itself"
            )


def _normalized(axis: int | Iterable[int], ndim: int) -> tuple[int, ...]:
    """Return the axes as non-negative integers, each once."""
    wanted = axis if isinstance(axis, (list, tuple)) else (axis,)
    try:
        axes = [operator.index(item) for item in wanted]
    except TypeError:
        raise TypeError(f"axis must be None, an int, or a list or tuple of int; got {axis!r}") from None
    outside = [item for item in axes if not -ndim <= item < ndim]
    if outside:
        raise InvalidArgumentError(f"axis {outside[0]} is out of range for a component of {ndim} axes; got axis={axis!r}")
    return tuple(sorted({item % ndim for item in axes}))


def _mean_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which a mean is summed: integers in 64 bits, 16-bit floats in float32."""
    wide = {"i": np.dtype(np.int64), "u": np.dtype(np.uint64)}
    return wide.get(dtype.kind) or accumulation_dtype(ReduceOp.SUM, dtype)


def _quotient(total: Array, count: Array, like: Array) -> Array:
    """Return total / count: in the dtype of the values where that is a float, in float64 where it is an integer."""
    if like.dtype.kind in "iu":
        total = total.astype(np.float64)
    with np.errstate(invalid="ignore"):  # no rows on any replica: the mean of nothing is NaN
        mean = np.true_divide(total, count.astype(total.dtype))
    return np.asarray(mean if like.dtype.kind in "iu" else mean.astype(like.dtype, copy=False))
