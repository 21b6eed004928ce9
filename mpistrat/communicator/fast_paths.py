"""FastPaths: all-reduces like earlier ones, without their checks, their texts and the plan cache.

The key of a path has all that its call depends on: operation, options, and shape, dtype and class of each array. Where the
results go is not part of it, so that ranks that reduce in place, into `out` and to new arrays make the same call.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat import settings
from mpistrat.arrays import Array, is_on_device
from mpistrat.communicator.bound_batch import BoundBatch
from mpistrat.communicator.guard import CollectiveGuard
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.communicator.plan_cache import BATCHES_KEPT
from mpistrat.communicator.small_batch import SMALL_BATCH_BYTES, SmallBatch
from mpistrat.communicator.validate import are_disjoint
from mpistrat.execution.bound_plan import DirectPlan
from mpistrat.execution.executor import Executor
from mpistrat.groups.agreement import Signature
from mpistrat.groups.group import MOST_UNCONFIRMED, weight
from mpistrat.reduction import ReduceOp, accumulation_dtype, divider
from mpistrat.watch.recorder import recorder, write_entry

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["FastPath", "FastPaths"]

Run = Callable[[Sequence[Array], Sequence[Array] | None], list[Array]]
"""All-reduces arrays, into `out` or to new ones: ``run(arrays, out)``. A collective call."""

_SIGNATURE = attrgetter("shape", "dtype", "__class__")
_DEFAULT = 0
_READABLE = 0x0101  # of flags.num: C_CONTIGUOUS and ALIGNED


@dataclass(frozen=True)
class FastPath:
    """What is known of an all-reduce: its signature, the digest of that, and how to run it."""

    signature: Signature
    digest: int
    run: Run
    is_one_message: bool = False  # of the one array as it is, by MPI or shared memory, and nothing else


class FastPaths:
    """The fast paths of a communicator.

    Parameters
    ----------
    executor : Executor
        For host memory.
    guard : CollectiveGuard
        Admits the calls.
    options : CommunicationOptions
        Of the communicator.
    run : callable
        All-reduces arrays by a bound batch: ``run(batch, arrays, out)``.
    """

    def __init__(
        self, executor: Executor, guard: CollectiveGuard, options: CommunicationOptions, run: Callable[..., list[Array]]
    ) -> None:
        self._executor, self._guard, self._options, self._run = executor, guard, options, run
        self._paths: dict[tuple[Any, ...], FastPath] = {}
        # by handle of MPI's operation, size and dtype of a buffer; with as how many calls one counts, and MPI's call if small
        self._passed: dict[tuple[int, int, np.dtype[Any]], tuple[FastPath, int, Callable[..., None] | None, MPI.Op | None]] = {}
        self._numbers = {options.key: _DEFAULT}  # of options, merged over the communicator's and as calls pass them

    def find(
        self, op: ReduceOp, arrays: Sequence[Array], options: CommunicationOptions | None, out: Sequence[Array] | None
    ) -> FastPath | None:
        """Return the fast path of a call; None if it has none, or `out` must be looked at."""
        try:
            number = _DEFAULT if options is None else self._numbers[options.key]
            if len(arrays) != 1:
                path = self._paths.get((number, op._value_, *map(_SIGNATURE, arrays)))
                return path if path is None or out is None or _fit(out, arrays) else None
            [array] = arrays
            path = self._paths.get((number, op._value_, array.shape, array.dtype, array.__class__))
            if path is None or out is None:
                return path
            [target] = out
            return path if _fits(target, array) else None
        except (AttributeError, KeyError, TypeError, ValueError):  # new options, or no arrays: the slow path raises the error
            return None

    def add(
        self,
        op: ReduceOp,
        arrays: Sequence[Array],
        options: CommunicationOptions | None,
        merged: CommunicationOptions,
        batch: BoundBatch,
        is_strict: bool,
    ) -> None:
        """Add the fast path of such a call, if it has one: that of a plan only if calls need not be compared each time.

        Parameters
        ----------
        op, arrays, options : ReduceOp, sequence of ndarray, CommunicationOptions or None
            As the call passes them.
        merged : CommunicationOptions
            The options, merged over those of the communicator.
        batch : BoundBatch
            Its plan.
        is_strict : bool
            Whether calls are compared before they return.
        """
        if _is_ambiguous(op, arrays):
            return
        seconds = merged.timeout_seconds
        run, is_one_message = self._in_one_call(op, arrays, batch)
        if run is None and not (is_strict or seconds):
            run = partial(self._run, batch)
        if run is None:
            return
        if is_strict:
            run = self._settled(run)
        if seconds != self._options.timeout_seconds:
            run = self._limited(run, seconds or 0.0)
        if max(len(self._paths), len(self._numbers)) >= BATCHES_KEPT:
            self.clear()
        number = self._numbers.setdefault(merged.key, len(self._numbers))
        if options is not None:
            self._numbers[options.key] = number
        signature = batch.signature("all_reduce")
        key = _SIGNATURE(arrays[0]) if len(arrays) == 1 else map(_SIGNATURE, arrays)
        self._paths[(number, op._value_, *key)] = FastPath(signature, signature.digest, run, is_one_message and not is_strict)

    def add_passed(self, handle: int, op: ReduceOp, array: Array) -> None:
        """Let `passing` know the fast path of such an array, by the handle of MPI's operation."""
        path, world, nbytes = self.find(op, [array], None, None), self._executor.world, array.nbytes
        if path is not None and not is_on_device(array):
            is_passed = path.is_one_message and 0 < nbytes <= world.most_passed_bytes
            call = world.passing_call(op, array.dtype) if is_passed else (None, None)
            self._passed[handle, array.size, array.dtype] = path, weight(nbytes), *call

    def passing(self, run_fast: Callable[..., list[Array] | None]) -> Callable[[Any, Any, MPI.Op], bool]:
        """Return what reduces two buffers of NumPy, if they are as in an earlier call, and returns whether it has.

        For small ones it is `run_fast`, of the communicator, in one function: MPI takes no longer than a few calls of Python.
        """
        from mpi4py import MPI

        guard, present, timeline, passed = self._guard, self._executor.hierarchy.call, self._executor.timeline, self._passed
        acquire, release, communicator, indexes = guard.lock.acquire, guard.lock.release, guard.communicator, guard.indexes
        in_place, ndarray, may_share_memory, record = MPI.IN_PLACE, np.ndarray, np.may_share_memory, recorder()
        add_call = present.calls.append
        frame_at, places, find_line, next_slot = sys._getframe, record.places, record.find_line, record.slots.__next__
        memory, words = record.memory, record.words

        def pass_on(source: Any, target: Any, op: MPI.Op) -> bool:
            if type(target) is not ndarray:
                return False
            dtype, size = target.dtype, target.size
            known = passed.get((op.handle, size, dtype))
            if known is None or not target.flags.carray:
                return False
            if source is target or source is None:
                source = in_place
            elif source is not in_place:
                if type(source) is not ndarray or source.dtype is not dtype or source.size != size:
                    return False
                if source.flags.num & _READABLE != _READABLE:
                    return False
                if (source.base is not None or target.base is not None) and may_share_memory(source, target):
                    return False
            path, calls, all_reduce, native = known
            if all_reduce is None:
                result = target if target.ndim == 1 else target.reshape(-1)
                given = result if source is in_place else source if source.ndim == 1 else source.reshape(-1)
                return run_fast(path, [given], [result], 0, 3) is not None
            digest = path.digest
            if guard.noted or guard.refusal or timeline.enabled:
                return False
            index = indexes.get(digest)
            if index is None or guard.thread != get_ident() or not acquire(False):
                return False
            slot = 0
            try:
                guard.number = number = guard.number + 1
                guard.signature, present.digest = path.signature, digest
                try:
                    frame = frame_at(2)
                except ValueError:  # the call itself is an exit handler, with no frame of Python beneath
                    frame = frame_at()
                line = places.get((id(frame.f_code), frame.f_lasti)) or find_line(frame)
                start, slot = next_slot()
                write_entry(memory, start, number, communicator, index, line, monotonic_ns())
                may_count = 0 < present.unconfirmed < MOST_UNCONFIRMED - calls  # without a comparison
                if not may_count:
                    present.count()
                all_reduce(source, target, native)
                if may_count:
                    present.unconfirmed += calls
                    add_call(digest)
                else:
                    present.add_unconfirmed(target.nbytes)
                words[slot] = monotonic_ns()
            except BaseException as error:
                if slot:
                    record.fail(slot)
                raise guard.explain(error) from None
            finally:
                release()
            return True

        return pass_on

    def clear(self) -> None:
        """Forget all fast paths."""
        self._paths.clear()
        self._passed.clear()
        self._numbers = {self._options.key: _DEFAULT}

    def _in_one_call(self, op: ReduceOp, arrays: Sequence[Array], batch: BoundBatch) -> tuple[Run | None, bool]:
        """Return one all-reduce of MPI or shared memory, if the batch is just that, and whether it is of an array as it is."""
        if len(batch) != 1 or is_on_device(arrays[0]):
            return None, False
        bound, dtype = batch[0].bound, accumulation_dtype(op, arrays[0].dtype)
        blocking = bound.blocking if isinstance(bound, DirectPlan) else None
        nbytes = bound.flat_count * dtype.itemsize
        if blocking is None and not 0 < nbytes <= self._executor.hierarchy.settings[settings.MAX_MESSAGE_BYTES]:
            return None, False
        divisor = self._executor.hierarchy.world.size if op is ReduceOp.MEAN else 1
        if blocking is not None:
            return _of_one(_timed(blocking, batch)), False  # blocking divides for MEAN
        world = self._executor.world
        if len(arrays) == 1 and dtype == arrays[0].dtype:
            return _of_one(world.blocking_all_reduce(op, dtype, arrays[0].shape), divider(dtype, divisor)), divisor == 1
        if sum(array.nbytes for array in arrays) <= SMALL_BATCH_BYTES and len({array.dtype for array in arrays}) == 1:
            combine = world.blocking_all_reduce(op, dtype, (bound.flat_count,))
            return SmallBatch(op, arrays, batch[0], divisor, combine).run, False
        return None, False

    def _settled(self, run: Run) -> Run:
        """Return `run`, after which calls are compared that could be compared later."""
        settle = self._executor.hierarchy.call.settle

        def settled(arrays: Sequence[Array], out: Sequence[Array] | None) -> list[Array]:
            results = run(arrays, out)
            settle()
            return results

        return settled

    def _limited(self, run: Run, seconds: float) -> Run:
        """Return `run` with a deadline of its own, or without one."""

        def limited(arrays: Sequence[Array], out: Sequence[Array] | None) -> list[Array]:
            self._guard.limit(seconds)
            try:
                return run(arrays, out)
            finally:
                self._guard.limit(self._options.timeout_seconds or 0.0)

        return limited


def _fits(target: Array, array: Array) -> bool:
    """Return whether a result can be written to `target`: C-contiguous, aligned and writable; CuPy has no other arrays."""
    kind = array.__class__
    if target is not array and (target.__class__ is not kind or target.dtype is not array.dtype or target.shape != array.shape):
        return False
    return target.flags.carray if kind is np.ndarray else target.flags.c_contiguous


def _fit(out: Sequence[Array], arrays: Sequence[Array]) -> bool:
    """Return whether results can be written to `out`; False also if that needs a closer look."""
    if not len(set(map(id, out))) == len(out) == len(arrays) or not all(map(_fits, out, arrays)):
        return False
    return all(target.base is None for target in out) or are_disjoint(out)


def _of_one(combine: Callable[[Array, Array | None], Array], divide: Callable[[Array], object] | None = None) -> Run:
    """Return the all-reduce of one array, by ``combine(source, target)``, whose sum is divided."""

    def run(arrays: Sequence[Array], out: Sequence[Array] | None) -> list[Array]:
        [source] = arrays
        if out is None:
            target = combine(source, None)
        else:
            [target] = out
            if target is not source and (source.base is not None or target.base is not None):
                source = source.copy() if np.may_share_memory(source, target) else source
            combine(source, target)
        if divide is not None:
            divide(target)
        return [target]

    return run


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
