"""Program: what a call compiles to: buckets of arrays, or one blocking call.

A program that is one call of MPI, or one exchange in shared memory, also has a `blocking` form with as little Python as
possible. It sends the same bytes: one rank may take it while another, whose timeline is enabled for instance, runs the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np

from mpistrat import settings
from mpistrat.algorithms.plan import Scope
from mpistrat.arrays import MALLOC_REUSES_BYTES, Array, copy_overlapping, new_array
from mpistrat.execution.compile import Bucket
from mpistrat.execution.executor import Executor
from mpistrat.reduction import ReduceOp, accumulation_dtype, divider, quiet
from mpistrat.steps import Steps

SMALL_BATCH_BYTES = 1 << 16  # in larger batches the copies take longer than the Python that is saved

Combine = Callable[[Array, "Array | None"], Array]
"""All-reduces one array into another one, or a new one, which it returns."""
Blocking = Callable[[Sequence[Array], Sequence[Array] | None], list[Array]]
"""All-reduces arrays in a blocking call, into `out` or to new ones: ``blocking(arrays, out)``."""
Begin = Callable[[Array], "tuple[Callable[[], bool], Callable[[Array], Steps]]"]
"""Begins to all-reduce one array; returns what tells if all ranks have, and the steps that then make the result in an array."""


class Program:
    """The buckets of a call, in the order in which they are combined.

    `is_agreed` says that all ranks have compared a call of it with a deadline, or in strict mode: it is the same on all of
    them, while they may remember different calls. A reduce-scatter has a `scattered_dtype`, that of the array of which each
    rank gets only its part. `blocking` does what `run` does in one call of MPI or NCCL, or through shared memory, where that is
    all; that of a reduce-scatter gives an array of `scattered_shape`. Results are like `arrays`.
    """

    def __init__(self, executor: Executor, buckets: Sequence[Bucket], arrays: Sequence[Array]) -> None:
        self.buckets = list(buckets)
        makers = [
            partial(new_array if array.nbytes > MALLOC_REUSES_BYTES else np.empty, array.shape, array.dtype) for array in arrays
        ]
        self._new_results: Callable[[], list[Array]] = lambda: [make() for make in makers]
        self._call, self._barrier = executor.hierarchy.call, executor.barrier
        self.is_agreed = False
        self.scattered_dtype: np.dtype[Any] | None = None
        self.scattered_shape: tuple[int, ...] | None = None
        self.blocking: Blocking | None = None
        self.begin: Begin | None = None
        self.is_one_message = False  # of the one array as it is, by MPI or shared memory, and nothing else
        self._begins_with_barrier = bool(self.buckets) and executor.begins_with_barrier(self.buckets[0].plan)
        self._detects_mismatch = all(executor.detects_mismatch(bucket.plan) for bucket in self.buckets)

    def run(
        self, arrays: Sequence[Array], out: Sequence[Array] | None, drive: Callable[[Steps], None] | None = None
    ) -> list[Array]:
        """All-reduce arrays, into `out` or to new ones, by `steps` that are run by `drive`. A collective call."""
        if out is None:
            results, sources = self._new_results(), arrays
        else:
            results, sources = list(out), copy_overlapping(arrays, out)
        (drive or self._call.drive)(self.steps(sources, results))
        return results

    def steps(self, sources: Sequence[Array], results: Sequence[Array]) -> Steps:
        """Return the steps that combine `sources` into `results`: ranks first compare the call, at a barrier."""
        if not self._begins_with_barrier:
            yield from self._barrier()
        for bucket in self.buckets:
            yield from bucket.run([sources[i] for i in bucket.indices], [results[i] for i in bucket.indices])
        if not self._detects_mismatch:
            self._call.add_unconfirmed(sum(array.nbytes for array in sources))

    @property
    def is_current(self) -> bool:
        """Whether the memory that it is bound to is still there."""
        return all(bucket.is_current() for bucket in self.buckets)

    @property
    def held_bytes(self) -> int:
        """Bytes of its own memory, besides the executor's scratch memory."""
        return sum(bucket.held_bytes() for bucket in self.buckets)


def shorten(program: Program, executor: Executor, op: ReduceOp, arrays: Sequence[Array]) -> None:
    """Give a program of host arrays like these its blocking call, if it is a single one."""
    if len(program.buckets) != 1 or (plan := program.buckets[0].plan).in_order or plan.num_chunks != 1:
        return
    dtype, world, divisor = accumulation_dtype(op, arrays[0].dtype), executor.world, executor.divisor(op)
    count, is_one = plan.count if plan.is_direct else plan.padded(plan.count), len(arrays) == 1 and dtype == arrays[0].dtype
    if plan.scopes == {Scope.INTRA} and plan.is_direct and is_one and executor.intra.window is not None:
        program.blocking = program.run  # ranks of a node compare the call in it
    elif not plan.scopes <= {Scope.WORLD} or count * dtype.itemsize > executor.hierarchy.settings[settings.MAX_MESSAGE_BYTES]:
        return
    elif is_one:
        bound = world.bind(op, dtype, arrays[0].shape)
        divide = divider(dtype, divisor)
        program.blocking = _of_one(bound.blocking(), divide, bound.may_overlap)
        program.begin = bound.begin if bound.begin is None or divide is None else partial(_begun, bound.begin, divide)
        program.is_one_message = divisor == 1
    elif sum(array.nbytes for array in arrays) <= SMALL_BATCH_BYTES and len({array.dtype for array in arrays}) == 1:
        assert program.buckets[0].indices == (*range(len(arrays))[::-1],), "arrays are packed from the last to the first"
        combine = world.bind(op, dtype, (count,)).blocking()
        program.blocking = SmallBatch(op, arrays, count, divisor, combine).run


def _begun(
    begin: Begin, divide: Callable[[Array], object], source: Array
) -> tuple[Callable[[], bool], Callable[[Array], Steps]]:
    """Begin the all-reduce of one array, whose sum is divided."""
    has_arrived, finish = begin(source)

    def divided(target: Array) -> Steps:
        total = np.empty_like(target)  # a signal handler that asks for the result in here makes it too, and divides it once
        yield from finish(total)
        divide(total)
        np.copyto(target, total)

    return has_arrived, divided


def _of_one(combine: Combine, divide: Callable[[Array], object] | None, may_overlap: bool) -> Blocking:
    """Return the all-reduce of one array, by ``combine(source, target)``, whose sum is divided."""

    def run(arrays: Sequence[Array], out: Sequence[Array] | None) -> list[Array]:
        [source] = arrays
        if out is None:
            target = combine(source, None)
        else:
            [target] = out
            if not (may_overlap or target is source or (source.flags.owndata and target.flags.owndata)):
                source = source.copy() if np.may_share_memory(source, target) else source
            combine(source, target)
        if divide is not None:
            divide(target)
        return [target]

    return run


class SmallBatch:
    """Arrays of certain shapes and one dtype in one message.

    `combine` all-reduces an array, into its second argument, or into a new array where that is None.
    """

    def __init__(self, op: ReduceOp, arrays: Sequence[Array], count: int, divisor: int, combine: Combine) -> None:
        self._dtype = arrays[0].dtype
        self._sent_dtype = accumulation_dtype(op, self._dtype)
        self._is_cast = self._sent_dtype != self._dtype
        self._divide, self._combine = divider(self._sent_dtype, divisor), combine
        # what is sent: the arrays, then padding
        self._given = np.zeros(count, self._dtype)
        self._bytes = self._given.view(np.uint8).data[: sum(array.nbytes for array in arrays)]
        self._record = _record([array.shape for array in arrays], self._dtype)
        self._scalars = [index for index, array in enumerate(arrays) if not array.ndim]

    def run(self, arrays: Sequence[Array], out: Sequence[Array] | None = None) -> list[Array]:
        """All-reduce the arrays, into `out` or to disjoint views of one new array. A collective call."""
        self._bytes[:] = _joined(arrays[::-1])
        total = self._combine(self._given.astype(self._sent_dtype) if self._is_cast else self._given, None)
        if self._divide is not None:
            self._divide(total)
        if self._is_cast:
            total = quiet()(total.astype, self._dtype)
        # item() returns the fields of a record as views, all in one call
        results: list[Any] = list(np.ndarray((), self._record, total).item())
        for index in self._scalars:
            results[index] = results[index].reshape(())
        if out is None:
            return results
        for target, result in zip(out, results, strict=True):
            target[...] = result
        return list(out)


def _joined(arrays: Sequence[Any]) -> bytes:
    """Return the bytes of arrays in C order; several times as fast as `numpy.concatenate` for many tiny arrays."""
    try:
        return b"".join(arrays)
    except TypeError:  # one of them is not contiguous
        return b"".join(map(np.ndarray.tobytes, arrays))


def _record(shapes: Sequence[tuple[int, ...]], dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of a record with an array of each shape, the last one first in memory; scalars have one axis."""
    names, formats = [f"array {index}" for index in range(len(shapes))], [(dtype, shape or (1,)) for shape in shapes]
    starts = list(accumulate([prod(shape) * dtype.itemsize for shape in reversed(shapes)], initial=0))
    return np.dtype({"names": names, "formats": formats, "offsets": starts[-2::-1], "itemsize": starts[-1]})
