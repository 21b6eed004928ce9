"""Bind a plan to transports and memory: directly to the caller's arrays if a transport can do that, else to buckets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat.algorithms.plan import Plan, Scope
from mpistrat.execution.bound_plan import BoundPlan, DirectPlan
from mpistrat.execution.executor import Executor
from mpistrat.packing.layout import Layout
from mpistrat.packing.wire import Wire
from mpistrat.reduction import ReduceOp
from mpistrat.transports.exchange import BLOCK_SLOT_BYTES

__all__ = ["bind"]

SLOT_ALIGNMENT_BYTES = 4096
LONE_SLOT_BYTES = 1 << 22  # a single chunk of at least this size has one slot: that saves memory and costs a short wait


def bind(
    executor: Executor,
    plan: Plan,
    layout: Layout,
    dtype: np.dtype[Any],
    op: ReduceOp,
    given: Sequence[np.dtype[Any]],
    wire: Wire | None = None,
) -> BoundPlan | DirectPlan:
    """Prepare `plan` for buckets of `layout`. A collective call.

    Parameters
    ----------
    executor : Executor
        Has the transports and the memory.
    plan : Plan
        The same on all ranks.
    layout : Layout
        The arrays of the bucket.
    dtype : dtype
        The dtype in which the bucket is summed and sent.
    op : ReduceOp
        How to combine.
    given : sequence of dtype
        The dtype of each array of the bucket.
    wire : Wire, optional
        Between nodes, send in its dtype and add in the order of the ranks; by default in whatever order is fastest.
    """
    executor.largest_pack_bytes = max(executor.largest_pack_bytes, layout.count * dtype.itemsize)
    all_reduce = None if plan.in_order or wire is not None else executor.bind_direct(plan, layout, dtype, op, given)
    if all_reduce is not None:
        direct = DirectPlan(executor, plan, all_reduce, layout, given[0], op)
        if _is_one_array_in_the_window(executor, plan, layout, dtype, given):
            is_small = executor.intra.group.size == 2 and plan.num_bytes <= BLOCK_SLOT_BYTES
            direct.blocking = executor.blocking_pair(dtype, plan.count, direct.fold) if is_small else direct.run_blocking
        return direct
    padded = plan.padded(min(plan.chunk_count, plan.count)) * dtype.itemsize
    slots = 1 if plan.num_chunks == 1 and padded >= LONE_SLOT_BYTES else plan.depth + 1
    slot_bytes = -(-padded // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES
    executor.reserve(slots * slot_bytes)
    bound = BoundPlan(executor, plan, layout, dtype, op, slots, slot_bytes, wire, given)
    executor.bound_plans.add(bound)
    return bound


def _is_one_array_in_the_window(
    executor: Executor, plan: Plan, layout: Layout, dtype: np.dtype[Any], given: Sequence[np.dtype[Any]]
) -> bool:
    if {phase.scope for phase in plan.phases} != {Scope.INTRA} or executor.intra.window is None:
        return False
    return layout.is_one_array and plan.count > 0 and set(given) == {dtype}
