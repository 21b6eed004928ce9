"""BoundBatch: the buckets of a batch of arrays of given shapes and dtypes, each bound to its plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mpistrat.algorithms.plan import Plan
from mpistrat.arrays import Array
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.execution.bound_plan import BoundPlan, DirectPlan, bind
from mpistrat.execution.bound_scatter import BoundScatter
from mpistrat.execution.device_executor import DeviceScatter
from mpistrat.execution.executor import Executor
from mpistrat.groups.agreement import Signature
from mpistrat.packing.layout import Layout, pack_by_bytes, split_evenly
from mpistrat.packing.wire import Wire
from mpistrat.reduction import ReduceOp

LaidOut = tuple[np.dtype[Any], tuple[int, ...], Layout]
"""Arrays that share a bucket: the dtype that they are combined in, their indices, and their layout."""


@dataclass(frozen=True)
class Bucket:
    """The arrays (by index) that share a buffer, and what reduces it."""

    indices: tuple[int, ...]
    bound: BoundPlan | DirectPlan | BoundScatter | DeviceScatter


class BoundBatch(list[Bucket]):
    """The buckets of a batch, in the order in which they are reduced.

    `seconds` is the duration of the last reduction on this rank. A reduce-scatter has a `scattered_dtype`, that of the array of
    which each rank gets only its part.
    """

    seconds: float | None = None
    scattered_dtype: np.dtype[Any] | None = None

    def __init__(self, buckets: Iterable[Bucket] = (), text: str = "", details: tuple[str, str, int] = ("", "", 0)) -> None:
        super().__init__(buckets)
        self._text, self._details = text, details
        self._signatures: dict[str, Signature] = {}

    @cached_property
    def begins_with_barrier(self) -> bool:
        """Whether its first step is a barrier of the node in shared memory."""
        return bool(self) and self[0].bound.begins_with_barrier

    @cached_property
    def detects_mismatch(self) -> bool:
        """Whether a rank in another call is found before results are used; if not, calls are compared afterwards."""
        return all(bucket.bound.detects_mismatch for bucket in self)

    def signature(self, verb: str) -> Signature:
        """Return the signature of a call of `verb` with this batch."""
        if verb not in self._signatures:
            plans = ", ".join(dict.fromkeys(bucket.bound.plan.algorithm for bucket in self))
            self._signatures[verb] = Signature(verb + self._text, (*self._details, plans))
        return self._signatures[verb]


def bind_batch(
    executor: Executor,
    op: ReduceOp,
    arrays: Sequence[Array],
    packs: Sequence[LaidOut],
    choose: Callable[[int, np.dtype[Any]], tuple[Plan, np.dtype[Any], Wire | None]],
    text: str = "",
) -> BoundBatch:
    """Choose a plan for each pack of arrays of these shapes and dtypes, and bind it. A collective call.

    `choose` returns the plan for a number of elements of a dtype, the dtype of its buckets, and the wire dtype between nodes.
    """
    dtypes = ", ".join(sorted({array.dtype.name for array in arrays}))
    batch = BoundBatch(text=text, details=(op.name, dtypes, sum(array.nbytes for array in arrays)))
    for combined, members, layout in packs:
        given = [arrays[index].dtype for index in members]
        plan, dtype, wire = choose(layout.count, combined)
        batch.append(Bucket(members, bind(executor, plan, layout, dtype, op, given, wire)))
    if is_current(batch, executor):
        return batch
    # enlarging the scratch memory for a later bucket unbound the earlier ones; now it is large enough for all
    return bind_batch(executor, op, arrays, packs, choose, text)


def lay_out(counts: Sequence[int], dtypes: Sequence[np.dtype[Any]], options: CommunicationOptions) -> list[LaidOut]:
    """Return the packs of arrays, given the elements of each array, and the dtype that it is combined in."""
    by_dtype: dict[np.dtype[Any], list[int]] = {}
    for index, dtype in enumerate(dtypes):
        by_dtype.setdefault(dtype, []).append(index)
    return [
        (dtype, members, layout)
        for dtype, indices in by_dtype.items()
        # backpropagation computes the last gradients first, so they are packed first
        for members, layout in _pack(indices[::-1], counts, dtype.itemsize, options)
    ]


def is_current(batch: BoundBatch, executor: Executor) -> bool:
    """Return whether all buckets are bound to the current scratch memory."""
    return all(bucket.bound.generation == executor.generation for bucket in batch)


def _pack(
    indices: list[int], counts: Sequence[int], itemsize: int, options: CommunicationOptions
) -> Iterator[tuple[tuple[int, ...], Layout]]:
    """Yield the indices of the arrays of each bucket, and their layout."""
    if options.num_packs:
        sizes = [counts[index] for index in indices]
        first = 0
        for count in split_evenly(sum(sizes), options.num_packs):
            yield tuple(indices), Layout(sizes, first, count)
            first += count
        return
    alone = options.num_packs == 0
    packs = (
        [[p] for p in range(len(indices))]
        if alone
        else pack_by_bytes([counts[index] * itemsize for index in indices], options.bytes_per_pack)
    )
    for pack in packs:
        members = tuple(indices[position] for position in pack)
        yield members, Layout([counts[index] for index in members])
