"""Reductions: all-reduce and reduce-scatter by a plan, synchronously or on the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np

from mpistrat.algorithms.chunks import part_bounds
from mpistrat.arrays import Array, is_on_device
from mpistrat.communicator.bound_batch import BoundBatch
from mpistrat.communicator.call import CollectiveCall
from mpistrat.communicator.call_sequence import CallSequence
from mpistrat.communicator.device_plans import MixedPlanCache
from mpistrat.communicator.fast_paths import FastPaths
from mpistrat.communicator.gpu_arrays import GpuArrays, has_arrays
from mpistrat.communicator.guard import CollectiveGuard
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.communicator.plan_cache import PlanCache
from mpistrat.communicator.validate import check_gather, check_target, copy_overlapping, describe_all_reduce
from mpistrat.errors import CollectiveError
from mpistrat.execution.engine import wait_for_gpu
from mpistrat.execution.executor import Executor
from mpistrat.execution.work import Work
from mpistrat.groups.agreement import Signature
from mpistrat.reduction import ReduceOp, quiet
from mpistrat.transports.steps import Steps

__all__ = ["Reductions"]


class Reductions:
    """The reductions of one communicator.

    Parameters
    ----------
    executor : Executor
        For host memory.
    guard : CollectiveGuard
        Admits calls and runs their steps.
    calls : CallSequence
        Begins each call.
    plans : PlanCache
        For host memory.
    gpu : GpuArrays or None
        For arrays on the GPU of this rank, if it has one.

    Attributes
    ----------
    fast : FastPaths
        Fast paths of arrays that have been reduced before.
    plans : PlanCache or MixedPlanCache
        For arrays in any memory.
    active : callable
        Returns a context manager that makes this rank's GPU current, if it has one.
    """

    def __init__(
        self, executor: Executor, guard: CollectiveGuard, calls: CallSequence, plans: PlanCache, gpu: GpuArrays | None
    ) -> None:
        self._executor, self._guard, self._calls, self._gpu = executor, guard, calls, gpu
        self.fast = FastPaths(executor, guard, calls.options, self.all_reduce_known)
        self.plans: PlanCache | MixedPlanCache = plans if gpu is None else gpu.plans
        self._current, self._rank, self._size = executor.hierarchy.call, executor.hierarchy.rank, executor.hierarchy.world.size
        self._window = executor.intra.window if executor.hierarchy.intra.size > 1 else None
        self.active: Callable[[], AbstractContextManager[None]] = nullcontext if gpu is None else gpu.device.activate

    def all_reduce(
        self, op: ReduceOp, arrays: Sequence[Array], options: CommunicationOptions | None, out: Sequence[Array] | None
    ) -> list[Array]:
        """Combine each array across ranks: see `mpistrat.Communicator.all_reduce`. A collective call."""

        def check(wanted: CommunicationOptions) -> None:
            self._check(op, arrays, wanted, out)

        def arguments(wanted: CommunicationOptions) -> str:
            return describe_all_reduce(op, arrays, wanted)

        with self.active(), self._guard:
            call, refused = self._calls.prepare("all_reduce", arguments, options, check)
            self._begin(call, refused)
            # a rank on the fast path does not compare texts
            is_known = self.fast.find(op, arrays, call.options, None) is not None
            batch = self._batch(call, op, arrays, is_known=is_known)
            self.fast.add(op, arrays, options, call.options, batch, self._calls.is_strict)
            self._guard.begin(call, batch.signature("all_reduce"))
            results, sources = self._results_and_sources(arrays, out)
            self._guard.run(call, self._steps(batch, sources, results))
            self._settle()
            return results

    def all_reduce_known(self, batch: BoundBatch, arrays: Sequence[Array], out: Sequence[Array] | None = None) -> list[Array]:
        """All-reduce arrays by a cached plan, in a call that was admitted by its fast path. A collective call."""
        if self._gpu is not None:
            wait_for_gpu(self._guard)
        with self.active():
            results, sources = self._results_and_sources(arrays, out)
            self._guard.drive_current(self._steps(batch, sources, results))
            return results

    def start_all_reduce(
        self,
        op: ReduceOp,
        arrays: Sequence[Array],
        options: CommunicationOptions | None,
        out: Sequence[Array] | None,
        structure: object,
    ) -> Work[list[Array]]:
        """Start what `all_reduce` does: see `mpistrat.Communicator.start_all_reduce`. A collective call."""
        given = list(arrays)  # the program may change its list before the engine runs

        def check(wanted: CommunicationOptions) -> None:
            self._check(op, given, wanted, out)

        def arguments(wanted: CommunicationOptions) -> str:
            return describe_all_reduce(op, given, wanted)

        with self.active():
            with self._guard.starting():
                if structure is not None:
                    self._guard.note(f"start_all_reduce of {structure}")
                call, refused = self._calls.prepare("start_all_reduce", arguments, options, check)
                if refused is None:
                    call.is_started = True
                    results, sources = self._results_and_sources(given, out)
                    carry_out: Callable[[], list[Array]] = partial(self._carry_out, call, op, list(sources), results)
                    if self._gpu is not None and has_arrays(given):
                        carry_out = self._gpu.on_own_stream(carry_out, partial(self._guard.run, call))
                    return self._guard.start(call, carry_out)
            with self._guard:  # the other ranks find out when the engine begins their call
                call.begin()
                return self._calls.refuse(call, refused)

    def reduce_scatter(
        self, op: ReduceOp, array: Array, axis: int, options: CommunicationOptions | None, out: Array | None
    ) -> Array:
        """Combine arrays, and take this rank's part: see `mpistrat.Communicator.reduce_scatter`. A collective call."""

        def check(wanted: CommunicationOptions) -> None:
            check_gather(array, axis, "reduce_scatter")
            self.plans.check(op, [array], wanted)
            if out is not None:
                check_target(out, array, self._own_part(array, axis).shape)

        def arguments(wanted: CommunicationOptions) -> str:
            return describe_all_reduce(op, [array], wanted, axis)

        with self.active(), self._guard:
            call, refused = self._calls.prepare("reduce_scatter", arguments, options, check)
            self._begin(call, refused)
            batch = self._batch(call, op, [array], axis % array.ndim)
            self._guard.begin(call, Signature(call.arguments))
            result = self._new(array, self._own_part(array, axis).shape) if out is None else out
            if batch.scattered_dtype is not None:
                self._scatter(call, batch, batch.scattered_dtype, np.moveaxis(array, axis, 0), np.moveaxis(result, axis, 0))
            else:
                total = self._new(array, array.shape)
                self._guard.run(call, self._steps(batch, [array], [total]))
                result[...] = self._own_part(total, axis)
            self._settle()
            return result

    def _scatter(self, call: CollectiveCall, batch: BoundBatch, dtype: np.dtype[Any], array: Array, part: Array) -> None:
        """Reduce-scatter along the first axis, in a dtype; write this rank's part to `part`."""
        source: Array = self._guard.allocate(lambda: quiet()(array.astype, dtype, "C", "unsafe", True, False))
        # peers may still read the source while the result is written
        is_direct = part.dtype == dtype and part.flags.c_contiguous and not np.may_share_memory(source, part)
        target = part if is_direct else self._new(source, part.shape)
        self._guard.run(call, self._steps(batch, [source], [target]))
        if not is_direct:
            quiet()(np.copyto, part, target, "unsafe")

    def _own_part(self, array: Array, axis: int) -> Array:
        """Return this rank's part of an array along an axis."""
        axis %= array.ndim
        first, last = part_bounds(array.shape[axis], self._size)[self._rank : self._rank + 2]
        part: Array = array[(slice(None),) * axis + (slice(first, last),)]
        return part

    def _check(
        self,
        op: ReduceOp,
        arrays: Sequence[Array],
        options: CommunicationOptions,
        out: Sequence[Array] | None,
    ) -> None:
        """Check the arguments of an all-reduce; arrays that have a plan were checked when it was made."""
        if not self.plans.has(op, arrays, options):
            self.plans.check(op, arrays, options)
        if out is not None:
            for target, array in zip(out, arrays, strict=True):
                check_target(target, array)

    def _begin(self, call: CollectiveCall, refused: Exception | None) -> None:
        """Begin a call, or raise the error if this rank cannot make it."""
        call.begin()
        if refused is not None:
            self._calls.refuse(call, refused)

    def _batch(
        self, call: CollectiveCall, op: ReduceOp, arrays: Sequence[Array], axis: int | None = None, is_known: bool = False
    ) -> BoundBatch:
        """Return the bound plan of a call, which ranks compare first if it binds memory, or has a deadline and is not known."""
        is_new = not self.plans.has(op, arrays, call.options, axis)
        if (is_new and self._guard.checks) or ((call.ends or self._calls.is_strict) and not is_known):
            self._guard.agree(call)
        if is_new and self._gpu is not None:  # binding may free memory that enqueued operations use
            self._guard.run(call, self._gpu.executor.settle())
        before = self.plans.num_invalidated
        try:
            return self.plans.find(op, arrays, call.options, axis)
        finally:
            if before != self.plans.num_invalidated:
                # the next call of the evicted kind binds its plan again, in which ranks on a fast path would not take part
                self.fast.clear()

    def _results_and_sources(self, arrays: Sequence[Array], out: Sequence[Array] | None) -> tuple[list[Array], Sequence[Array]]:
        """Return the results, and the sources: copies where they overlap with results."""
        if out is not None:
            results = list(out)
            return results, copy_overlapping(arrays, results)
        try:
            return [self._empty(array, array.shape) for array in arrays], arrays
        except MemoryError as error:
            raise self._guard.no_memory(error) from None

    def _new(self, array: Array, shape: tuple[int, ...]) -> Array:
        """Return a new array, on the GPU if `array` is: see `allocate`."""
        return self._guard.allocate(lambda: self._empty(array, shape))

    def _empty(self, array: Array, shape: tuple[int, ...]) -> Array:
        if self._gpu is not None and is_on_device(array):
            target: Array = self._gpu.device.array_module.empty(shape, array.dtype)
            return target
        return np.empty(shape, array.dtype)

    def _steps(self, batch: BoundBatch, sources: Sequence[Array], results: Sequence[Array]) -> Steps:
        steps = self._combine(batch, sources, results)
        return self._gpu.abort_on_error(steps) if self._gpu is not None and has_arrays(results) else steps

    def _combine(self, batch: BoundBatch, sources: Sequence[Array], results: Sequence[Array]) -> Steps:
        """Return the steps that combine `sources` into `results`; they begin with a barrier of the node."""
        if self._window is not None and not batch.begins_with_barrier:
            yield from self._window.barrier()
        if self._gpu is not None and self._gpu.executor.compares_by_messages and has_arrays(results):
            yield from self._gpu.barrier()
        yield from _run_batch(batch, sources, results)
        if not batch.detects_mismatch:
            self._current.add_unconfirmed(sum(array.nbytes for array in sources))

    def _carry_out(self, call: CollectiveCall, op: ReduceOp, arrays: list[Array], results: list[Array]) -> list[Array]:
        """Run a started all-reduce, on the engine's thread."""
        call.begin()
        try:
            batch = self._batch(call, op, arrays)
        except CollectiveError as error:
            self._guard.give_up_started(call, error, self._calls.is_strict)
            raise
        self._guard.begin(call, batch.signature("start_all_reduce"))
        self._guard.run(call, self._steps(batch, arrays, results))
        self._settle()
        return results

    def _settle(self) -> None:
        """With MPISTRAT_STRICT, compare at once what could be compared later."""
        if self._calls.is_strict:
            self._current.settle()


def _run_batch(batch: BoundBatch, sources: Sequence[Array], targets: Sequence[Array]) -> Steps:
    """Return the steps that reduce `sources` into `targets`, bucket after bucket. A collective call."""
    started = time.perf_counter()
    for bucket in batch:
        yield from bucket.bound.run([sources[i] for i in bucket.indices], [targets[i] for i in bucket.indices])
    batch.seconds = time.perf_counter() - started
