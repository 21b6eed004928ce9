"""Programs: the one cache of a communicator: the program of a call by what the call is like.

What must be the same on all ranks is the key of a program: operation, the options that shape it, memory, shapes and dtypes. All
ranks keep the same programs. Beside it, each rank remembers its calls by what it sees of them without looking closely: the
shape, dtype and class of each array, and all options. A call that is remembered skips its checks, its texts and the comparison
of texts. Where the results go is not part of either key, so that ranks that reduce in place, into `out` and to new arrays make
the same call.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from operator import attrgetter
from typing import Any

import numpy as np

from mpistrat.arrays import Array, are_disjoint, is_on_device, retained_bytes
from mpistrat.communicator.explain import Explanation, MemoryReport
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.communicator.planning import DevicePlanner, Planner, Reduction
from mpistrat.device.cuda import addresses, are_contiguous
from mpistrat.errors import InvalidArgumentError
from mpistrat.execution.guard import Guard
from mpistrat.execution.program import Blocking, Program
from mpistrat.groups.agreement import Signature
from mpistrat.watch.recorder import recorder

PROGRAMS_KEPT = 128

_SIGNATURE = attrgetter("shape", "dtype", "__class__")
_DEFAULT = 0


@dataclass(frozen=True)
class Known:
    """A call that this rank has made before: its signature, the digest of that, and how it runs."""

    signature: Signature
    digest: int
    run: Blocking
    is_one_message: bool = False  # of the one array as it is, by MPI or shared memory, and nothing else
    shape: tuple[int, ...] | None = None  # of the result, where that is made by NCCL and of another shape than the array
    apart: list[int] = field(default_factory=list)  # the addresses of results on a GPU that were found to share no memory

    def fit(self, out: Sequence[Array], arrays: Sequence[Array]) -> bool:
        """Return whether results can be written to `out`; False also if that needs a closer look."""
        is_same = out is arrays and bool(out) and is_on_device(out[0])
        if not (are_contiguous(out) if is_same else len(out) == len(arrays) and all(map(fits, out, arrays))):
            return False
        found = addresses(out) if out and is_on_device(out[0]) else None
        if found is not None and found == self.apart:  # they have the same extents in each call
            return True
        are_apart = are_disjoint(out)
        if are_apart and found is not None:
            self.apart[:] = found
        return are_apart

    def gives(self, out: Array | None, array: Array) -> bool:
        """Return whether NCCL makes the result of another shape than the array, and can write it to `out`."""
        if out is None or self.shape is None:
            return self.shape is not None
        is_alike = out.__class__ is array.__class__ and out.dtype == array.dtype and out.shape == self.shape
        return is_alike and out.flags.c_contiguous


class Programs:
    """The programs of a communicator, at most 128."""

    def __init__(self, guard: Guard, host: Planner, device: DevicePlanner | None) -> None:
        self._guard, self._options, self._host, self._device = guard, guard.options, host, device
        self._present = host.executor.hierarchy.call
        self._programs: OrderedDict[tuple[Any, ...], Program] = OrderedDict()
        self._known: dict[tuple[Any, ...], Known] = {}
        # never given twice: the engine's thread may forget all while this one looks for a call
        self._next_number = count(_DEFAULT + 1).__next__
        self._numbers = {self._options.key: _DEFAULT}  # of options, merged over the communicator's and as calls pass them
        self.passed: dict[tuple[int, int, np.dtype[Any]], tuple[Any, ...]] = {}  # see `Passing.add`

    def find(self, asked: Reduction) -> Program | None:
        """Return the program for it, or None if there is none, or its memory is gone: the same on all ranks."""
        program = self._programs.get(asked.key)
        return program if program is not None and program.is_current else None

    def compile(self, asked: Reduction, settle: Callable[[], None]) -> Program:
        """Make the program for it, which was checked; `settle` waits for what GPUs were given. A collective call."""
        planner = self._planner(asked.arrays)
        generation = planner.executor.generation
        try:
            program = self._programs[asked.key] = planner.compile(asked, settle)
        finally:
            is_full = len(self._programs) > PROGRAMS_KEPT
            if is_full:
                # the oldest, not the least recently used: all ranks must forget the same one, and calls that are
                # remembered are not looked up here
                _, oldest = self._programs.popitem(last=False)
                if not all(bucket.plan.is_direct for bucket in oldest.buckets):
                    settle()
            if is_full or generation != planner.executor.generation:
                # the next call of a program that is gone, or lost its memory, compiles it again: all ranks take part
                self.forget_calls()
        return program

    def check(self, asked: Reduction) -> None:
        """Check that its arrays can be combined with its options: see `Planner.check`."""
        planner = self._planner(asked.arrays)
        if self._device is not None:
            if len({is_on_device(array) for array in asked.arrays}) > 1:
                where = ", ".join("GPU" if is_on_device(array) else "host" for array in asked.arrays)
                raise InvalidArgumentError(f"arrays of a call lie in one memory; got {where}: call twice, or use cupy.asarray")
            if planner is self._host:  # to which the implementation does not apply
                asked = replace(asked, options=replace(asked.options, implementation="AUTO"))
        planner.check(asked)

    def explain(self, asked: Reduction) -> Explanation:
        """Return how a sum is computed."""
        return self._planner(asked.arrays).explain(asked)

    def memory(self) -> MemoryReport:
        """Return the memory of executors and programs."""
        host, largest = self._host.executor, self._host.executor.largest_pack_bytes
        report = MemoryReport(
            host.hierarchy.rank,
            host.window_bytes,
            host.rail_bytes,
            sum(program.held_bytes for program in self._programs.values()),
            len(self._programs),
            largest,
            retained_bytes=retained_bytes(),
        )
        if self._device is None:
            return report
        device = self._device.executor
        return replace(
            report,
            largest_pack_bytes=max(largest, device.largest_pack_bytes),
            device_bytes=device.window_bytes + device.rail_bytes,
            pinned_bytes=device.pinned_bytes,
        )

    def known(
        self, kind: object, arrays: Sequence[Array], options: CommunicationOptions | None, out: Sequence[Array] | None
    ) -> Known | None:
        """Return what is known of a call, with the `kind` of a `Reduction`; None if nothing is, or `out` must be looked at."""
        try:
            number = _DEFAULT if options is None else self._numbers[options.key]
            if len(arrays) != 1:
                found = self._known.get((number, kind, *map(_SIGNATURE, arrays)))
                return found if found is None or out is None or found.fit(out, arrays) else None
            [array] = arrays
            shape, dtype, library = array.shape, array.dtype, array.__class__
            found = self._known.get((number, kind, shape, dtype, library))
            if found is None or out is None:
                return found
            [target] = out
            if library is not np.ndarray:
                return found if fits(target, array) else None
            # as `fits`, without a call of Python
            is_alike = target is array or (target.__class__ is library and target.dtype is dtype and target.shape == shape)
            return found if is_alike and target.flags.carray else None
        except Exception:  # new options, or no arrays: the slow path raises the error, which a library may have made
            return None

    def remember(
        self, asked: Reduction, options: CommunicationOptions | None, program: Program, signature: Signature, run: Blocking
    ) -> None:
        """Remember a call of that signature, which passes these options and which `run` makes: see `known`.

        A program that is not one call is known only where its calls need not be compared each time.
        """
        arrays, seconds, is_strict = asked.arrays, asked.options.timeout_seconds, self._present.is_strict
        if program.blocking is None and (is_strict or seconds):
            return
        if seconds or self._options.timeout_seconds:
            run = self._limited(run, seconds or 0.0)
        is_one_message = program.is_one_message and not is_strict
        known = Known(signature, signature.digest, run, is_one_message, program.scattered_shape)
        self.add(asked.kind, arrays, options, known)

    def add(self, kind: object, arrays: Sequence[Array], options: CommunicationOptions | None, known: Known) -> None:
        """Remember what is known of a call: see `known`."""
        if max(len(self._known), len(self._numbers)) >= PROGRAMS_KEPT:
            self.forget_calls()
        number = self._numbers.setdefault(self._options.merge(options).key, self._next_number())
        if options is not None:
            self._numbers[options.key] = number
        key = _SIGNATURE(arrays[0]) if len(arrays) == 1 else map(_SIGNATURE, arrays)
        self._known[tuple([number, kind, *key])] = known

    def forget_calls(self) -> None:
        """Forget what is known of calls: each is looked at again."""
        self._known.clear()
        self.passed.clear()
        recorder().outdated = object()  # callers remember what they have found
        self._numbers = {self._options.key: _DEFAULT}

    def clear(self) -> None:
        """Forget all programs."""
        self.forget_calls()
        self._programs.clear()

    def _planner(self, arrays: Sequence[Array]) -> Planner:
        return self._device if self._device is not None and all(map(is_on_device, arrays)) else self._host

    def _limited(self, run: Blocking, seconds: float) -> Blocking:
        """Return `run` with a deadline of its own, or without one."""

        def limited(arrays: Sequence[Array], out: Sequence[Array] | None) -> list[Array]:
            try:
                self._guard.deadlines.begin_limit(seconds)
                return run(arrays, out)
            finally:
                self._guard.deadlines.end()

        return limited


def fits(target: Array, array: Array) -> bool:
    """Return whether a result can be written to `target`: C-contiguous, aligned and writable; CuPy has no other arrays."""
    kind = array.__class__
    if target is not array and (target.__class__ is not kind or target.dtype is not array.dtype or target.shape != array.shape):
        return False
    return target.flags.carray if kind is np.ndarray else target.flags.c_contiguous
