"""FastPaths: how arrays like earlier ones are combined at once: those of one bucket, past the plan cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from mpistrat import settings
from mpistrat.arrays import Array
from mpistrat.communicator.bound_batch import BoundBatch
from mpistrat.communicator.plan_cache import BATCHES_KEPT
from mpistrat.communicator.small_batch import SMALL_BATCH_BYTES, OneArray, SmallBatch
from mpistrat.communicator.validate import is_fit
from mpistrat.execution.bound_plan import DirectPlan
from mpistrat.execution.executor import Executor
from mpistrat.reduction import ReduceOp, accumulation_dtype

__all__ = ["SIGNATURE", "FastPaths"]

SIGNATURE = attrgetter("shape", "dtype", "__class__")
"""What arrays that take one path have in common."""


class FastPaths:
    """Made of the plans that arrays have taken once.

    Parameters
    ----------
    executor : Executor
        Has the transport of all ranks.

    Attributes
    ----------
    known : dict
        The ways, by the name of the operation and `SIGNATURE` of each array.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.known: dict[tuple[Any, ...], OneArray | SmallBatch] = {}
        # of the last call with `out`: what was checked once holds as long as the arrays are the same objects
        self._last: tuple[Array, Array, ReduceOp, OneArray] | None = None

    def learn(self, op: ReduceOp, arrays: Sequence[Array], batch: BoundBatch) -> None:
        """Note how arrays like these go straight through MPI or shared memory, where one all-reduce is all there is to do."""
        if len(batch) != 1:
            return
        bound, dtype = batch[0].bound, accumulation_dtype(op, arrays[0].dtype)
        at_once = bound.at_once if isinstance(bound, DirectPlan) else None
        nbytes = bound.flat_count * dtype.itemsize  # as they are sent
        if at_once is None and not 0 < nbytes <= settings.MAX_MESSAGE_BYTES.read():
            return
        if len(self.known) >= BATCHES_KEPT:
            self.known.clear()
        likeness = (op._value_, *map(SIGNATURE, arrays))
        size, signature = self._executor.hierarchy.world.size, batch.signature("all_reduce")
        if at_once is not None:
            self.known[likeness] = OneArray(op, 1, _into_new(at_once, batch), signature)  # divided already
            return
        world = self._executor.world
        if len(arrays) == 1 and dtype == arrays[0].dtype:
            self.known[likeness] = OneArray(op, size, world.at_once(op, dtype, arrays[0].shape), signature)
        elif sum(array.nbytes for array in arrays) <= SMALL_BATCH_BYTES and len({array.dtype for array in arrays}) == 1:
            combine = world.at_once(op, dtype, (bound.flat_count,))
            self.known[likeness] = SmallBatch(op, arrays, batch[0], size, combine, signature)

    def into(self, op: ReduceOp, arrays: Sequence[Array], out: Sequence[Array]) -> OneArray | None:
        """Return the path of one array into memory of the caller, if there is one; for operations that do not divide."""
        if len(arrays) != 1 or len(out) != 1 or op is ReduceOp.MEAN:
            return None
        source, target, last = arrays[0], out[0], self._last
        if last is not None and source is last[0] and target is last[1] and op is last[2]:
            return last[3]
        path = self.known.get((op._value_, SIGNATURE(source)))
        if not isinstance(path, OneArray) or not source.flags.c_contiguous or not is_fit(target, source):
            return None
        # larger ones must not be kept alive, and to look at them again takes little of their time
        if source.nbytes <= SMALL_BATCH_BYTES:
            self._last = source, target, op, path
        return path

    def forget(self) -> None:
        """Forget all ways."""
        self.known.clear()
        self._last = None


def _into_new(at_once: Callable[[Array, Array], None], batch: BoundBatch) -> Callable[[Array, Array | None], Array]:
    """Return what does the same, with a new array where no target is given, and notes what it takes."""

    def run(source: Array, target: Array | None = None) -> Array:
        if target is None:
            target = np.empty(source.shape, source.dtype)
        started = time.perf_counter()
        at_once(np.ascontiguousarray(source), target)
        batch.seconds = time.perf_counter() - started
        return target

    return run
