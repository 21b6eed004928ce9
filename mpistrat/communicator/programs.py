"""Programs: the one cache of a communicator: the program of a call by what the call is like; and the reductions that run them.

What must be the same on all ranks is the key of a program: operation, the options that shape it, memory, shapes and dtypes. All
ranks keep the same programs. Beside it, each rank remembers its calls by what it sees of them without looking closely: the
shape, dtype and class of each array, and all options. A call that is remembered skips its checks, its texts and the comparison
of texts. Where the results go is not part of either key, so that ranks that reduce in place, into `out` and to new arrays make
the same call.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat.algorithms.choose import Choice
from mpistrat.algorithms.chunks import part_bounds
from mpistrat.algorithms.cost import CostModel
from mpistrat.arrays import Array, is_on_device
from mpistrat.communicator.calls import Calls
from mpistrat.communicator.explain import Explanation
from mpistrat.communicator.gpu_arrays import GpuArrays, has_arrays
from mpistrat.communicator.options import CommunicationImplementation, CommunicationOptions
from mpistrat.communicator.planning import WIRE_OPS, DevicePlanner, Planner
from mpistrat.communicator.validate import are_disjoint, check_gather, check_target, copy_overlapping, describe_all_reduce
from mpistrat.errors import CollectiveError, InvalidArgumentError
from mpistrat.execution.engine import wait_for_gpu
from mpistrat.execution.executor import Executor
from mpistrat.execution.guard import Call, Guard
from mpistrat.execution.memory import MemoryReport
from mpistrat.execution.program import Blocking, Program
from mpistrat.execution.work import Work
from mpistrat.groups.agreement import Signature
from mpistrat.reduction import ReduceOp, quiet
from mpistrat.transports.steps import Steps

if TYPE_CHECKING:
    from mpi4py import MPI

PROGRAMS_KEPT = 64

_SIGNATURE = operator.attrgetter("shape", "dtype", "__class__")
_DEFAULT = 0


@dataclass(frozen=True)
class Known:
    """A call that this rank has made before: its signature, the digest of that, and how it runs."""

    signature: Signature
    digest: int
    run: Blocking
    is_one_message: bool = False  # of the one array as it is, by MPI or shared memory, and nothing else


class Programs:
    """The programs of a communicator, at most 64."""

    def __init__(self, guard: Guard, options: CommunicationOptions, host: Planner, device: DevicePlanner | None) -> None:
        self._guard, self._options, self._host, self._device = guard, options, host, device
        self._settle = host.executor.hierarchy.call.settle
        self._programs: OrderedDict[tuple[Any, ...], Program] = OrderedDict()
        self._known: dict[tuple[Any, ...], Known] = {}
        self._numbers = {options.key: _DEFAULT}  # of options, merged over the communicator's and as calls pass them
        # of a wrapped communicator: see `passing`
        self.passed: dict[tuple[int, int, np.dtype[Any]], tuple[Known, int, Callable[..., None] | None, MPI.Op | None]] = {}

    @property
    def model(self) -> CostModel:
        """The cost model of algorithm ``auto``."""
        return (self._device or self._host).model

    def has(self, op: ReduceOp, arrays: Sequence[Array], options: CommunicationOptions, axis: int | None = None) -> bool:
        """Return whether there is a program for such arrays, so that `find` is not a collective call."""
        program = self._programs.get(_key(op, arrays, options, axis))
        return program is not None and program.is_current

    def find(self, op: ReduceOp, arrays: Sequence[Array], options: CommunicationOptions, axis: int | None = None) -> Program:
        """Return the program for such arrays. A collective call if there is none yet.

        With an `axis`, for a reduce-scatter of one array along it, or an all-reduce where that is not possible or not faster:
        `Program.scattered_dtype` tells which.
        """
        key = _key(op, arrays, options, axis)
        program = self._programs.get(key)
        if options.implementation is CommunicationImplementation.NCCL:  # not part of the key
            self.check(op, arrays, options)
        if program is None or not program.is_current:
            self.check(op, arrays, options)
            planner = self._planner(arrays)
            generation = planner.executor.generation
            try:
                program = self._programs[key] = planner.compile(op, arrays, options, axis)
            finally:
                is_full = len(self._programs) > PROGRAMS_KEPT
                if is_full:
                    # the oldest, not the least recently used: all ranks must forget the same one, and calls that are
                    # remembered are not looked up here
                    self._programs.popitem(last=False)
                if is_full or generation != planner.executor.generation:
                    # the next call of a program that is gone, or lost its memory, compiles it again: all ranks take part
                    self.forget_calls()
        return program

    def check(self, op: ReduceOp, arrays: Sequence[Array], options: CommunicationOptions) -> None:
        """Check that arrays can be combined with these options: see `Planner.check`."""
        planner = self._planner(arrays)
        if self._device is not None:
            if len({is_on_device(array) for array in arrays}) > 1:
                where = ", ".join("GPU" if is_on_device(array) else "host" for array in arrays)
                raise InvalidArgumentError(
                    f"arrays of one call lie in one memory; got {where}: make two calls, or copy some with cupy.asarray"
                )
            if planner is self._host and options.implementation is CommunicationImplementation.NCCL:
                options = replace(options, implementation="AUTO")  # it does not apply to host memory
        planner.check(op, arrays, options)

    def explain(self, arrays: Sequence[Array], options: CommunicationOptions) -> Explanation:
        """Return how a sum of such arrays is computed, and how long the last sum or mean took, unless it is only enqueued."""
        planner = self._planner(arrays)
        found = [self._programs.get(_key(op, arrays, options)) for op in WIRE_OPS]
        is_timed = planner is self._host or not (self._device and self._device.executor.enqueues)
        seconds = [program.seconds for program in found if program and is_timed and not program.is_one_call]
        return replace(planner.explain(arrays, options), last_seconds=next(filter(None, seconds), None))

    def choose(self, count: int, dtype: np.dtype[Any], options: CommunicationOptions) -> Choice:
        """Return the plan for a sum of `count` elements, on the GPU if there is one, and why it was chosen."""
        return (self._device or self._host).choose(count, dtype, options)

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
        self,
        kind: object,
        arrays: Sequence[Array],
        options: CommunicationOptions | None,
        out: Sequence[Array] | None,
    ) -> Known | None:
        """Return what is known of a call; None if nothing is, or `out` must be looked at.

        The `kind` of an all-reduce is the value of its operation, that of a reduce-scatter this and the axis.
        """
        try:
            number = _DEFAULT if options is None else self._numbers[options.key]
            if len(arrays) != 1:
                found = self._known.get((number, kind, *map(_SIGNATURE, arrays)))
                return found if found is None or out is None or _fit(out, arrays) else None
            [array] = arrays
            found = self._known.get((number, kind, array.shape, array.dtype, array.__class__))
            if found is None or out is None:
                return found
            [target] = out
            return found if _fits(target, array) else None
        except (AttributeError, KeyError, TypeError, ValueError):  # new options, or no arrays: the slow path raises the error
            return None

    def remember(
        self,
        kind: object,
        arrays: Sequence[Array],
        options: CommunicationOptions | None,
        merged: CommunicationOptions,
        program: Program,
        signature: Signature,
        run: Blocking,
        is_strict: bool,
    ) -> None:
        """Remember a call of that signature, which `run` makes: see `known`.

        It has the options that it passes, and as they are `merged` over those of the communicator. A program that is not one
        call is known only where its calls need not be compared each time.
        """
        seconds = merged.timeout_seconds
        if program.blocking is None and (is_strict or seconds):
            return
        if is_strict:
            run = self._settled(run)
        if seconds != self._options.timeout_seconds:
            run = self._limited(run, seconds or 0.0)
        if max(len(self._known), len(self._numbers)) >= PROGRAMS_KEPT:
            self.forget_calls()
        number = self._numbers.setdefault(merged.key, len(self._numbers))
        if options is not None:
            self._numbers[options.key] = number
        key = _SIGNATURE(arrays[0]) if len(arrays) == 1 else map(_SIGNATURE, arrays)
        is_one_message = program.is_one_message and not is_strict
        self._known[(number, kind, *key)] = Known(signature, signature.digest, run, is_one_message)

    def forget_calls(self) -> None:
        """Forget what is known of calls: each is looked at again."""
        self._known.clear()
        self.passed.clear()
        self._numbers = {self._options.key: _DEFAULT}

    def clear(self) -> None:
        """Forget all programs."""
        self.forget_calls()
        self._programs.clear()

    def _planner(self, arrays: Sequence[Array]) -> Planner:
        return self._device if self._device is not None and all(map(is_on_device, arrays)) else self._host

    def _settled(self, run: Blocking) -> Blocking:
        """Return `run`, after which calls are compared that could be compared later."""

        def settled(arrays: Sequence[Array], out: Sequence[Array] | None) -> list[Array]:
            results = run(arrays, out)
            self._settle()
            return results

        return settled

    def _limited(self, run: Blocking, seconds: float) -> Blocking:
        """Return `run` with a deadline of its own, or without one."""

        def limited(arrays: Sequence[Array], out: Sequence[Array] | None) -> list[Array]:
            self._guard.limit(seconds)
            try:
                return run(arrays, out)
            finally:
                self._guard.limit(self._options.timeout_seconds or 0.0)

        return limited


def _key(op: ReduceOp, arrays: Sequence[Array], options: CommunicationOptions, axis: int | None = None) -> tuple[Any, ...]:
    # only the options that shape a program: ranks may differ in the others
    shaping = options.algorithm, options.bytes_per_pack, options.wire_dtype, options.error_feedback, options.deterministic
    on_gpu = sum(map(is_on_device, arrays))
    return (op, *shaping, options.intra_dtype, options.num_packs, axis, on_gpu, *[(each.shape, each.dtype) for each in arrays])


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


class Reductions:
    """The reductions of one communicator, and the `programs` that they run."""

    def __init__(
        self,
        executor: Executor,
        guard: Guard,
        calls: Calls,
        planner: Planner,
        gpu: GpuArrays | None,
        say: Callable[[str], None],
    ) -> None:
        self._executor, self._guard, self._calls, self._gpu = executor, guard, calls, gpu
        device = None if gpu is None else DevicePlanner(gpu.executor, say)
        self.programs = Programs(guard, calls.options, planner, device)
        self._current, self._rank, self._size = executor.hierarchy.call, executor.hierarchy.rank, executor.hierarchy.world.size
        self._window = executor.intra.window if executor.hierarchy.intra.size > 1 else None
        # returns a context manager that makes this rank's GPU current, if it has one
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
            call, wanted = self._calls.begin("all_reduce", arguments, options, check)
            # a rank that remembers it does not compare texts
            is_known = self.programs.known(op._value_, arrays, wanted, None) is not None
            program = self._program(call, op, arrays, wanted, is_known=is_known)
            signature, run = program.signature("all_reduce"), program.blocking or partial(self._all_reduce_known, program)
            # a communicator sums booleans, and a strategy refuses to: its check must not be skipped
            if not (op is ReduceOp.SUM and any(array.dtype.kind == "b" for array in arrays)):
                self.programs.remember(op._value_, arrays, options, wanted, program, signature, run, self._calls.is_strict)
            self._guard.begin(call, signature)
            results, sources = self._results_and_sources(arrays, out)
            self._guard.run(call, self._steps(program, sources, results))
            self._settle()
            return results

    def _all_reduce_known(self, program: Program, arrays: Sequence[Array], out: Sequence[Array] | None = None) -> list[Array]:
        """All-reduce arrays by their program, in a call that this rank remembers. A collective call."""
        if self._gpu is not None:
            wait_for_gpu(self._guard)
        with self.active():
            results, sources = self._results_and_sources(arrays, out)
            self._guard.drive_current(self._steps(program, sources, results))
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
                call, wanted, refused = self._calls.prepare("start_all_reduce", arguments, options, check)
                if refused is None:
                    call.is_started = True
                    results, sources = self._results_and_sources(given, out)
                    carry_out: Callable[[], list[Array]] = partial(self._carry_out, call, op, wanted, list(sources), results)
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
        with suppress(TypeError):  # which `check` raises
            axis = operator.index(axis)  # True and 1 are one axis, which calls are known by

        def check(wanted: CommunicationOptions) -> None:
            check_gather(array, axis, "reduce_scatter")
            self.programs.check(op, [array], wanted)
            if out is not None:
                check_target(out, array, self._own_part(array, axis).shape)

        def arguments(wanted: CommunicationOptions) -> str:
            return describe_all_reduce(op, [array], wanted, axis)

        with self.active(), self._guard:
            call, wanted = self._calls.begin("reduce_scatter", arguments, options, check)
            kind, signature = (op._value_, axis), Signature(call.arguments)
            is_known = self.programs.known(kind, [array], wanted, None) is not None
            program = self._program(call, op, [array], wanted, axis % array.ndim, is_known)
            known = partial(self._scatter_known, program, axis)
            self.programs.remember(kind, [array], options, wanted, program, signature, known, self._calls.is_strict)
            self._guard.begin(call, signature)
            result = self._scatter(program, array, axis, out, partial(self._guard.run, call))
            self._settle()
            return result

    def _scatter_known(
        self, program: Program, axis: int, arrays: Sequence[Array], out: Sequence[Array] | None = None
    ) -> list[Array]:
        """Reduce-scatter an array by its program, in a call that this rank remembers. A collective call."""
        [array], target = arrays, None if out is None else out[0]
        if program.blocking is not None:
            part = self._own_part(program.blocking(arrays, None)[0], axis)
            if target is None:
                return [part.copy()]
            target[...] = part
            return [target]
        if self._gpu is not None:
            wait_for_gpu(self._guard)
        with self.active():
            return [self._scatter(program, array, axis, target, self._guard.drive_current)]

    def _scatter(self, program: Program, array: Array, axis: int, out: Array | None, drive: Callable[[Steps], None]) -> Array:
        """Return this rank's part of a combination, whose steps are driven by `drive`."""
        result, dtype = self._new(array, self._own_part(array, axis).shape) if out is None else out, program.scattered_dtype
        if dtype is None:
            total = self._new(array, array.shape)
            drive(self._steps(program, [array], [total]))
            result[...] = self._own_part(total, axis)
            return result
        moved = np.moveaxis(array, axis, 0)
        source: Array = self._guard.allocate(lambda: quiet()(moved.astype, dtype, "C", "unsafe", True, False))
        part = np.moveaxis(result, axis, 0)
        # peers may still read the source while the result is written
        is_direct = part.dtype == dtype and part.flags.c_contiguous and not np.may_share_memory(source, part)
        target = part if is_direct else self._new(source, part.shape)
        drive(self._steps(program, [source], [target]))
        if not is_direct:
            quiet()(np.copyto, part, target, "unsafe")
        return result

    def fits_part(self, target: Array, array: Array, axis: int) -> bool:
        """Return whether this rank's part of an array can be written to `target`; False also if that needs a closer look."""
        return target.__class__ is array.__class__ and _fits(target, self._own_part(array, axis))

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
        """Check the arguments of an all-reduce; arrays that have a program were checked when it was made."""
        if not self.programs.has(op, arrays, options):
            self.programs.check(op, arrays, options)
        if out is not None:
            for target, array in zip(out, arrays, strict=True):
                check_target(target, array)

    def _program(
        self,
        call: Call,
        op: ReduceOp,
        arrays: Sequence[Array],
        options: CommunicationOptions,
        axis: int | None = None,
        is_known: bool = False,
    ) -> Program:
        """Return the program of a call, which ranks compare first if it binds memory, or has a deadline and is not known."""
        is_new = not self.programs.has(op, arrays, options, axis)
        if (is_new and self._guard.checks) or ((call.ends or self._calls.is_strict) and not is_known):
            self._guard.agree(call)
        if is_new and self._gpu is not None:  # binding may free memory that enqueued operations use
            self._guard.run(call, self._gpu.executor.settle())
        return self.programs.find(op, arrays, options, axis)

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

    def _steps(self, program: Program, sources: Sequence[Array], results: Sequence[Array]) -> Steps:
        steps = self._combine(program, sources, results)
        return self._gpu.abort_on_error(steps) if self._gpu is not None and program.on_gpu else steps

    def _combine(self, program: Program, sources: Sequence[Array], results: Sequence[Array]) -> Steps:
        """Return the steps that combine `sources` into `results`; they begin with a barrier of the node."""
        if self._window is not None and not program.begins_with_barrier:
            yield from self._window.barrier()
        if self._gpu is not None and program.on_gpu and self._gpu.executor.compares_by_messages:
            yield from self._gpu.barrier()
        yield from program.run(sources, results)
        if not program.detects_mismatch:
            self._current.add_unconfirmed(sum(array.nbytes for array in sources))

    def _carry_out(
        self, call: Call, op: ReduceOp, options: CommunicationOptions, arrays: list[Array], results: list[Array]
    ) -> list[Array]:
        """Run a started all-reduce, on the engine's thread."""
        call.begin()
        try:
            program = self._program(call, op, arrays, options)
        except CollectiveError as error:
            self._guard.give_up_started(call, error, self._calls.is_strict)
            raise
        self._guard.begin(call, program.signature("start_all_reduce"))
        self._guard.run(call, self._steps(program, arrays, results))
        self._settle()
        return results

    def _settle(self) -> None:
        """With MPISTRAT_STRICT, compare at once what could be compared later."""
        if self._calls.is_strict:
            self._current.settle()
