"""FastPaths: how arrays like earlier ones are combined at once, past the checks and the plan cache."""

from __future__ import annotations

import time
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
from mpistrat.communicator.validate import check_out, is_fit
from mpistrat.errors import MpistratError
from mpistrat.execution.bound_plan import DirectPlan
from mpistrat.execution.executor import Executor
from mpistrat.groups.agreement import Signature
from mpistrat.reduction import ReduceOp, accumulation_dtype

__all__ = ["SIGNATURE", "FastPaths", "KnownBatch"]

SIGNATURE = attrgetter("shape", "dtype", "__class__")
"""What arrays that take one path have in common."""


@dataclass(frozen=True)
class KnownBatch:
    """Arrays that go by their plan, past all that was looked at in an earlier call with arrays like these.

    Attributes
    ----------
    signature : Signature
        Of the call.
    word : int
        That of the signature.
    run : callable
        Returns the arrays it is given combined. A collective call.
    """

    signature: Signature
    word: int
    run: Callable[..., list[Array]]


class FastPaths:
    """Made of the plans that arrays have taken once.

    Parameters
    ----------
    executor : Executor
        Has the transport of all ranks.
    run : callable
        Combines arrays by the plan of a batch: ``run(batch, arrays, out)``.

    Attributes
    ----------
    known : dict
        The ways, by the name of the operation and `SIGNATURE` of each array.
    """

    def __init__(self, executor: Executor, run: Callable[..., list[Array]]) -> None:
        self._executor, self._run = executor, run
        self.known: dict[tuple[Any, ...], OneArray | SmallBatch | KnownBatch] = {}
        # of the last call with `out`: what was checked once holds as long as the arrays are the same objects
        self._last: tuple[Array, Array, ReduceOp, OneArray] | None = None

    def learn(self, op: ReduceOp, arrays: Sequence[Array], batch: BoundBatch, *, may_skip_checks: bool) -> None:
        """Note how arrays like these are combined; by their plan if checks may be skipped that were made for these."""
        if _is_ambiguous(op, arrays):
            return
        path: OneArray | SmallBatch | KnownBatch | None = self._in_one_call(op, arrays, batch)
        if path is None and may_skip_checks:
            signature = batch.signature("all_reduce")
            path = KnownBatch(signature, signature.word, partial(self._run, batch))
        if path is not None:
            if len(self.known) >= BATCHES_KEPT:
                self.known.clear()
            likeness = (op._value_, *map(SIGNATURE, arrays))
            self.known[likeness] = path

    def _in_one_call(self, op: ReduceOp, arrays: Sequence[Array], batch: BoundBatch) -> OneArray | SmallBatch | None:
        """Return how arrays go straight through MPI or shared memory, where one all-reduce is all there is to do."""
        if len(batch) != 1 or is_on_device(arrays[0]):
            return None
        bound, dtype = batch[0].bound, accumulation_dtype(op, arrays[0].dtype)
        at_once = bound.at_once if isinstance(bound, DirectPlan) else None
        nbytes = bound.flat_count * dtype.itemsize  # as they are sent
        if at_once is None and not 0 < nbytes <= settings.MAX_MESSAGE_BYTES.read():
            return None
        size, signature = self._executor.hierarchy.world.size, batch.signature("all_reduce")
        if at_once is not None:
            return OneArray(op, 1, _into_new(at_once, batch), signature)  # divided already
        world = self._executor.world
        if len(arrays) == 1 and dtype == arrays[0].dtype:
            return OneArray(op, size, world.at_once(op, dtype, arrays[0].shape), signature)
        if sum(array.nbytes for array in arrays) <= SMALL_BATCH_BYTES and len({array.dtype for array in arrays}) == 1:
            combine = world.at_once(op, dtype, (bound.flat_count,))
            return SmallBatch(op, arrays, batch[0], size, combine, signature)
        return None

    def into(self, op: ReduceOp, arrays: Sequence[Array], out: Sequence[Array]) -> OneArray | KnownBatch | None:
        """Return the path of arrays into memory of the caller, if there is one and they fit.

        One array goes straight there, unless the operation divides; others by their plan.
        """
        if len(arrays) != 1 or len(out) != 1 or op is ReduceOp.MEAN:
            return self._known_batch(op, arrays, out)
        source, target, last = arrays[0], out[0], self._last
        if last is not None and source is last[0] and target is last[1] and op is last[2]:
            return last[3]
        path = self.known.get((op._value_, SIGNATURE(source)))
        if isinstance(path, KnownBatch):
            return self._known_batch(op, arrays, out)
        if not isinstance(path, OneArray) or not source.flags.c_contiguous or not is_fit(target, source):
            return None
        # larger ones must not be kept alive, and to look at them again takes little of their time
        if source.nbytes <= SMALL_BATCH_BYTES:
            self._last = source, target, op, path
        return path

    def _known_batch(self, op: ReduceOp, arrays: Sequence[Array], out: Sequence[Array]) -> KnownBatch | None:
        """Return the path by their plan; None also where `out` does not fit, which the other ranks must learn of."""
        path = self.known.get((op._value_, *map(SIGNATURE, arrays)))
        if not isinstance(path, KnownBatch):
            return None
        try:
            check_out(out, arrays)
        except MpistratError:
            return None
        return replace(path, run=partial(path.run, out=out))

    def forget(self) -> None:
        """Forget all ways."""
        self.known.clear()
        self._last = None


def _is_ambiguous(op: ReduceOp, arrays: Sequence[Array]) -> bool:
    """Return whether booleans are summed: that is asked of a communicator, but refused to the replicas of a strategy."""
    return op is ReduceOp.SUM and any(array.dtype.kind == "b" for array in arrays)


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
