"""BoundBatch: the buckets of a batch of arrays of given shapes and dtypes, each bound to its plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mpistrat.algorithms.plan import Plan
from mpistrat.arrays import Array
from mpistrat.execution.binder import bind
from mpistrat.execution.bound_plan import BoundPlan, DirectPlan
from mpistrat.execution.bound_scatter import BoundScatter
from mpistrat.execution.device_scatter import DeviceScatter
from mpistrat.execution.executor import Executor
from mpistrat.groups.agreement import Signature
from mpistrat.packing.buckets import pack_by_bytes, split_evenly
from mpistrat.packing.layout import Layout
from mpistrat.packing.wire import Wire
from mpistrat.reduction import ReduceOp, accumulation_dtype

__all__ = ["BoundBatch", "Bucket", "Packing", "bind_batch", "is_current", "lay_out"]


@dataclass(frozen=True)
class Bucket:
    """The arrays (by index) that share a buffer, and what reduces it."""

    indices: tuple[int, ...]
    bound: BoundPlan | DirectPlan | BoundScatter | DeviceScatter


class BoundBatch(list[Bucket]):
    """The buckets of a batch, in the order in which they are reduced.

    Parameters
    ----------
    buckets : iterable of Bucket
        In this order.
    text : str
        Arguments of the calls that use this batch.
    details : tuple of (str, str, int)
        Recorded for such calls: the operation, the dtypes, and the bytes that this rank passes.

    Attributes
    ----------
    seconds : float or None
        Duration of the last reduction on this rank; None if there was none.
    scatters : bool
        Whether each rank gets only its part.
    """

    seconds: float | None = None
    scatters = False

    def __init__(self, buckets: Iterable[Bucket] = (), text: str = "", details: tuple[str, str, int] = ("", "", 0)) -> None:
        super().__init__(buckets)
        self._text, self._details = text, details
        self._signatures: dict[str, Signature] = {}

    @cached_property
    def begins_with_barrier(self) -> bool:
        """Whether its first step is a barrier of the node in shared memory."""
        return bool(self) and self[0].bound.begins_with_barrier

    @cached_property
    def is_compared(self) -> bool:
        """Whether ranks in another call cannot take part in this one; if they can, calls are compared afterwards."""
        return all(bucket.bound.is_compared for bucket in self)

    def signature(self, verb: str) -> Signature:
        """Return the signature of a call of `verb` with this batch."""
        if verb not in self._signatures:
            plans = ", ".join(dict.fromkeys(bucket.bound.plan.algorithm for bucket in self))
            self._signatures[verb] = Signature(verb + self._text, (*self._details, plans))
        return self._signatures[verb]


@dataclass(frozen=True)
class Packing:
    """How arrays of one dtype share buckets.

    Attributes
    ----------
    bytes_per_pack : int
        Whole arrays in packs of about this many bytes; 0: one pack. See `packing.buckets.pack_by_bytes`.
    num_packs : int or None
        All elements in this many equal packs, whatever `bytes_per_pack` says; 0: each array by itself; None: pack by bytes.
        See `packing.buckets.split_evenly`.
    """

    bytes_per_pack: int = 0
    num_packs: int | None = None


def bind_batch(
    executor: Executor,
    op: ReduceOp,
    arrays: Sequence[Array],
    packing: Packing,
    choose: Callable[[int, np.dtype[Any]], tuple[Plan, Wire | None]],
    text: str = "",
) -> BoundBatch:
    """Pack arrays of these shapes and dtypes, choose a plan for each bucket, and bind it. A collective call.

    Parameters
    ----------
    executor : Executor
        Binds the plans.
    op : ReduceOp
        How to combine.
    arrays : sequence of ndarray
        Only their shapes and dtypes are used.
    packing : Packing
        How arrays share buckets.
    choose : callable
        Returns the plan for a number of elements of a dtype, and the wire dtype between nodes.
    text : str
        Arguments of the calls that use the batch.
    """
    dtypes = ", ".join(sorted({array.dtype.name for array in arrays}))
    batch = BoundBatch(text=text, details=(op.name, dtypes, sum(array.nbytes for array in arrays)))
    for dtype, members, layout in lay_out(op, arrays, packing):
        given = [arrays[index].dtype for index in members]
        plan, wire = choose(layout.count, dtype)
        batch.append(Bucket(members, bind(executor, plan, layout, dtype, op, given, wire)))
    if is_current(batch, executor):
        return batch
    # enlarging the scratch memory for a later bucket unbound the earlier ones; now it is large enough for all
    return bind_batch(executor, op, arrays, packing, choose, text)


def lay_out(op: ReduceOp, arrays: Sequence[Array], packing: Packing) -> Iterator[tuple[np.dtype[Any], tuple[int, ...], Layout]]:
    """Yield for each bucket its accumulation dtype, the indices of its arrays, and their layout."""
    for dtype, indices in _by_accumulation_dtype(op, arrays).items():
        # backpropagation computes the last gradients first, so they are packed first
        for members, layout in _pack(indices[::-1], [array.size for array in arrays], dtype.itemsize, packing):
            yield dtype, members, layout


def is_current(batch: BoundBatch, executor: Executor) -> bool:
    """Return whether all buckets are bound to the current scratch memory."""
    return all(bucket.bound.generation == executor.generation for bucket in batch)


def _pack(indices: list[int], counts: list[int], itemsize: int, packing: Packing) -> Iterator[tuple[tuple[int, ...], Layout]]:
    """Yield the indices of the arrays of each bucket, and their layout."""
    if packing.num_packs:
        sizes = [counts[index] for index in indices]
        first = 0
        for count in split_evenly(sum(sizes), packing.num_packs):
            yield tuple(indices), Layout(sizes, first, count)
            first += count
        return
    alone = packing.num_packs == 0
    packs = (
        [[p] for p in range(len(indices))]
        if alone
        else pack_by_bytes([counts[index] * itemsize for index in indices], packing.bytes_per_pack)
    )
    for pack in packs:
        members = tuple(indices[position] for position in pack)
        yield members, Layout([counts[index] for index in members])


def _by_accumulation_dtype(op: ReduceOp, arrays: Sequence[Array]) -> dict[np.dtype[Any], list[int]]:
    """Group the indices of arrays by the dtype in which they are combined."""
    groups: dict[np.dtype[Any], list[int]] = {}
    for index, array in enumerate(arrays):
        groups.setdefault(accumulation_dtype(op, array.dtype), []).append(index)
    return groups
