"""Recipe: the buckets that arrays of certain shapes and dtypes go through, each bound to its plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpistrat.algorithms.plan import Plan
from mpistrat.arrays import Array
from mpistrat.execution.bound_plan import BoundPlan, DirectPlan
from mpistrat.execution.executor import Executor
from mpistrat.packing.buckets import pack_by_bytes
from mpistrat.packing.layout import Layout
from mpistrat.reduction import ReduceOp, accumulation_dtype
from mpistrat.transports.base import Steps

__all__ = ["Bucket", "Recipe", "is_current", "make_recipe", "run_recipe"]


@dataclass(frozen=True)
class Bucket:
    """The arrays (by index) that share a buffer, and what reduces it."""

    indices: tuple[int, ...]
    bound: BoundPlan | DirectPlan


Recipe = list[Bucket]


def make_recipe(
    executor: Executor,
    op: ReduceOp,
    arrays: Sequence[Array],
    bytes_per_pack: int,
    choose: Callable[[int, np.dtype[Any]], Plan],
) -> Recipe:
    """Pack arrays like these, choose a plan for each bucket, and bind it. A collective call.

    Parameters
    ----------
    executor : Executor
        Binds the plans.
    op : ReduceOp
        How to combine.
    arrays : sequence of ndarray
        Only their shapes and dtypes count.
    bytes_per_pack : int
        Where to cut: see `packing.buckets.pack_by_bytes`.
    choose : callable
        Returns the plan for so many elements of a dtype.
    """
    recipe = []
    for dtype, indices in _by_accumulation_dtype(op, arrays).items():
        # the last gradients are ready first, so they are packed first
        backwards = indices[::-1]
        for pack in pack_by_bytes([arrays[index].size * dtype.itemsize for index in backwards], bytes_per_pack):
            members = tuple(backwards[position] for position in pack)
            layout = Layout([arrays[index].size for index in members])
            casts = any(arrays[index].dtype != dtype for index in members)
            recipe.append(Bucket(members, executor.bind(choose(layout.count, dtype), layout, dtype, op, casts)))
    if is_current(recipe, executor):
        return recipe
    # enlarging the scratch memory for a later bucket unbound the earlier ones; now it is large enough for all
    return make_recipe(executor, op, arrays, bytes_per_pack, choose)


def is_current(recipe: Recipe, executor: Executor) -> bool:
    """Return whether all buckets are bound to the scratch memory that there is now."""
    return all(bucket.bound.generation == executor.generation for bucket in recipe)


def run_recipe(recipe: Recipe, sources: Sequence[Array], targets: Sequence[Array]) -> Steps:
    """Return the steps that reduce `sources` into `targets`, bucket after bucket. A collective call."""
    for bucket in recipe:
        yield from bucket.bound.run([sources[i] for i in bucket.indices], [targets[i] for i in bucket.indices])


def _by_accumulation_dtype(op: ReduceOp, arrays: Sequence[Array]) -> dict[np.dtype[Any], list[int]]:
    """Group the indices of arrays by the dtype in which they are combined."""
    groups: dict[np.dtype[Any], list[int]] = {}
    for index, array in enumerate(arrays):
        groups.setdefault(accumulation_dtype(op, array.dtype), []).append(index)
    return groups
