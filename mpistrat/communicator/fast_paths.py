"""FastPaths: all-reduces of arrays whose shapes and dtypes are known, without the checks and the plan cache."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np

from mpistrat import settings
from mpistrat.arrays import Array, is_on_device
from mpistrat.communicator.bound_batch import BoundBatch
from mpistrat.communicator.plan_cache import BATCHES_KEPT
from mpistrat.communicator.small_batch import SMALL_BATCH_BYTES, OneArray, SmallBatch
from mpistrat.communicator.validate import can_write_directly, check_out
from mpistrat.errors import MpistratError
from mpistrat.execution.bound_plan import DirectPlan
from mpistrat.execution.executor import Executor
from mpistrat.groups.agreement import Signature
from mpistrat.reduction import ReduceOp, accumulation_dtype

__all__ = ["SIGNATURE", "FastPaths", "KnownBatch"]

SIGNATURE = attrgetter("shape", "dtype", "__class__")
"""What identifies the fast path of an array."""


@dataclass(frozen=True)
class KnownBatch:
    """A batch that runs its plan without the checks that an earlier call has passed.

    Attributes
    ----------
    signature : Signature
        Of the call.
    digest : int
        That of the signature.
    run : callable
        All-reduces the arrays it is given. A collective call.
    """

    signature: Signature
    digest: int
    run: Callable[..., list[Array]]


class FastPaths:
    """The fast paths of a communicator.

    Parameters
    ----------
    executor : Executor
        For host memory.
    run : callable
        All-reduces arrays by a bound batch: ``run(batch, arrays, out)``.

    Attributes
    ----------
    paths : dict
        By the name of the operation and the `SIGNATURE` of each array.
    """

    def __init__(self, executor: Executor, run: Callable[..., list[Array]]) -> None:
        self._executor, self._run = executor, run
        self.paths: dict[tuple[Any, ...], OneArray | SmallBatch | KnownBatch] = {}
        # source, target, op and path of the last call with `out`; the same objects need not be checked again
        self._last: tuple[weakref.ref[Array], weakref.ref[Array], ReduceOp, OneArray] | None = None

    def add(self, op: ReduceOp, arrays: Sequence[Array], batch: BoundBatch, *, may_skip_checks: bool) -> None:
        """Add the fast path of such arrays, if they have one; that of a plan only if checks may be skipped."""
        if _is_ambiguous(op, arrays):
            return
        path: OneArray | SmallBatch | KnownBatch | None = self._in_one_call(op, arrays, batch)
        if path is None and may_skip_checks:
            signature = batch.signature("all_reduce")
            path = KnownBatch(signature, signature.digest, partial(self._run, batch))
        if path is not None:
            if len(self.paths) >= BATCHES_KEPT:
                self.paths.clear()
            key = (op._value_, *map(SIGNATURE, arrays))
            self.paths[key] = path

    def _in_one_call(self, op: ReduceOp, arrays: Sequence[Array], batch: BoundBatch) -> OneArray | SmallBatch | None:
        """Return the path through one all-reduce of MPI or shared memory, if the batch is just that."""
        if len(batch) != 1 or is_on_device(arrays[0]):
            return None
        bound, dtype = batch[0].bound, accumulation_dtype(op, arrays[0].dtype)
        blocking = bound.blocking if isinstance(bound, DirectPlan) else None
        nbytes = bound.flat_count * dtype.itemsize
        if blocking is None and not 0 < nbytes <= settings.MAX_MESSAGE_BYTES.read():
            return None
        size, signature = self._executor.hierarchy.world.size, batch.signature("all_reduce")
        if blocking is not None:
            return OneArray(op, 1, _timed(blocking, batch), signature)  # blocking divides for MEAN
        world = self._executor.world
        if len(arrays) == 1 and dtype == arrays[0].dtype:
            return OneArray(op, size, world.blocking_all_reduce(op, dtype, arrays[0].shape), signature)
        if sum(array.nbytes for array in arrays) <= SMALL_BATCH_BYTES and len({array.dtype for array in arrays}) == 1:
            combine = world.blocking_all_reduce(op, dtype, (bound.flat_count,))
            return SmallBatch(op, arrays, batch[0], size, combine, signature)
        return None

    def find_with_out(self, op: ReduceOp, arrays: Sequence[Array], out: Sequence[Array]) -> OneArray | KnownBatch | None:
        """Return the fast path that writes to `out`, if there is one.

        One array is reduced straight into it, unless the operation is MEAN; other batches run their plan.
        """
        if len(arrays) != 1 or len(out) != 1 or op is ReduceOp.MEAN:
            return self._known_batch(op, arrays, out)
        source, target, last = arrays[0], out[0], self._last
        if last is not None and source is last[0]() and target is last[1]() and op is last[2]:
            return last[3]
        path = self.paths.get((op._value_, SIGNATURE(source)))
        if isinstance(path, KnownBatch):
            return self._known_batch(op, arrays, out)
        if not isinstance(path, OneArray) or not source.flags.c_contiguous or not can_write_directly(target, source):
            return None
        self._last = weakref.ref(source), weakref.ref(target), op, path
        return path

    def _known_batch(self, op: ReduceOp, arrays: Sequence[Array], out: Sequence[Array]) -> KnownBatch | None:
        """Return the path that runs their plan; None if `out` is refused, so that the slow path raises on all ranks."""
        path = self.paths.get((op._value_, *map(SIGNATURE, arrays)))
        if not isinstance(path, KnownBatch):
            return None
        try:
            check_out(out, arrays)
        except MpistratError:
            return None
        return replace(path, run=partial(path.run, out=out))

    def clear(self) -> None:
        """Forget all fast paths."""
        self.paths.clear()
        self._last = None


def _is_ambiguous(op: ReduceOp, arrays: Sequence[Array]) -> bool:
    """Return whether booleans are summed, which a communicator does and a strategy refuses: its check must not be skipped."""
    return op is ReduceOp.SUM and any(array.dtype.kind == "b" for array in arrays)


def _timed(blocking: Callable[[Array, Array], None], batch: BoundBatch) -> Callable[[Array, Array | None], Array]:
    """Return `blocking` with an optional target; it records its duration in `batch`."""

    def run(source: Array, target: Array | None = None) -> Array:
        if target is None:
            target = np.empty(source.shape, source.dtype)
        started = time.perf_counter()
        blocking(np.ascontiguousarray(source), target)
        batch.seconds = time.perf_counter() - started
        return target

    return run
