"""Reductions: the verbs of a communicator that combine arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from mpistrat.arrays import Array, are_apart, is_on_device, new_array, part_bounds
from mpistrat.communicator.gpu_arrays import GpuArrays, has_arrays
from mpistrat.communicator.options import NATIVE, WIRE_DTYPES, CommunicationImplementation, CommunicationOptions
from mpistrat.communicator.planning import DevicePlanner, Planner, Reduction
from mpistrat.communicator.programs import Known, Programs, fits
from mpistrat.communicator.validate import check_gather, check_target
from mpistrat.device.cuda import address
from mpistrat.device.kernels import divide_kernel
from mpistrat.errors import CollectiveError, InvalidArgumentError, UnavailableError
from mpistrat.execution.comparison import Call
from mpistrat.execution.engine import Work
from mpistrat.execution.executor import Executor
from mpistrat.execution.guard import Guard
from mpistrat.execution.program import Begin, Program
from mpistrat.groups.agreement import CallsDifferError, Signature
from mpistrat.reduction import HALF_DTYPES, Fold, ReduceOp, quiet
from mpistrat.steps import Steps


class Reductions:
    """The reductions of one communicator, and the `programs` that they run."""

    def __init__(
        self, executor: Executor, guard: Guard, planner: Planner, gpu: GpuArrays | None, say: Callable[[str], None]
    ) -> None:
        self._guard, self._gpu = guard, gpu
        device = None if gpu is None else DevicePlanner(gpu, say)
        self.programs = Programs(guard, planner, device)
        self._present, self._rank, self._size = executor.hierarchy.call, executor.hierarchy.rank, executor.hierarchy.world.size
        # returns a context manager that makes this rank's GPU current, if it has one
        self.active: Callable[[], AbstractContextManager[None]] = nullcontext if gpu is None else gpu.device.activate

    def reduce(
        self,
        verb: str,
        op: ReduceOp,
        arrays: Sequence[Array],
        options: CommunicationOptions | None,
        out: Sequence[Array] | None,
        axis: int | None = None,
    ) -> list[Array]:
        """Make the call of a verb of `mpistrat.Communicator`, and remember it. A collective call."""
        with self.active(), self._guard:
            call, asked = self._guard.begin(verb, options, partial(Reduction, op, arrays, axis=axis), partial(self._check, out))
            call.signature.nbytes = sum(array.nbytes for array in arrays)
            program = self._program(call, asked)
            run, known = program.run, program.blocking or program.run
            if axis is not None and program.scattered_shape is None:
                run = known = partial(self._scatter, program, axis)
            self.programs.remember(asked, options, program, call.signature, known)
            self._guard.make_current(call)
            if program.scattered_shape is None:
                return run(arrays, out, partial(self._guard.run, call))
            self._guard.deadlines.begin_limit(call.seconds)  # NCCL makes the first call as all later ones
            try:
                return known(arrays, out)
            except BaseException as error:
                raise self._guard.fail_current(error) from None

    def capture(
        self,
        gpu: GpuArrays,
        op: ReduceOp,
        arrays: Sequence[Array],
        options: CommunicationOptions | None,
        out: Sequence[Array] | None,
    ) -> list[Array]:
        """Make an all-reduce a part of the CUDA graph that is captured on the caller's stream. A collective call."""
        verb, nccl = "all_reduce in a CUDA graph", gpu.executor.transports.everywhere
        with self.active(), self._guard:
            call, _ = self._guard.begin(verb, options, partial(Reduction, op, arrays), partial(self._check_captured, out))
            self._guard.agree(call)
            assert out is not None, "was checked"
            results = list(out)

            def enqueue() -> Steps:
                for dtype in sorted({array.dtype for array in arrays}, key=str):
                    pairs = [pair for pair in zip(arrays, results, strict=True) if pair[0].dtype == dtype]
                    if nccl is not None:
                        sources, targets = zip(*pairs, strict=True)
                        nccl.capture(sources, targets, Fold(op, dtype, self._size if op is ReduceOp.MEAN else 1))
                        continue
                    for source, target in pairs:  # of a rank alone
                        target[...] = source
                yield from ()

            self._guard.run(call, gpu.abort_on_error(enqueue()))  # replays of the others would wait for a rank that fails here
            return results

    def check_capture(self, gpu: GpuArrays | None) -> None:
        """Check that an all-reduce can be a part of a CUDA graph."""
        if gpu is None or (gpu.executor.transports.everywhere is None and self._size > 1):
            where = "ranks compute on CPUs" if gpu is None else f"arrays on GPUs are reduced by {gpu.executor.transports}"
            raise UnavailableError(f"a CUDA graph can have collectives where NCCL joins the GPUs of all ranks; here {where}")

    def prepare_capture(self, gpu: GpuArrays) -> Steps:
        """Load the kernels of means, and wait for what was enqueued: neither can be done while a graph is captured."""
        for dtype in (*HALF_DTYPES, np.dtype(np.float32), np.dtype(np.float64)):
            gpu.device.prepare(divide_kernel(dtype))
        yield from gpu.executor.settle()

    def _check_captured(self, out: Sequence[Array] | None, asked: Reduction) -> None:
        options = asked.options
        self.programs.check(replace(asked, options=replace(options, implementation="NCCL")) if self._size > 1 else asked)
        if out is None:
            raise InvalidArgumentError("an all_reduce in a CUDA graph needs out=, which may be the arrays themselves")
        if options.deterministic or options.wire_dtype in WIRE_DTYPES:
            raise InvalidArgumentError("in a CUDA graph NCCL sums arrays as they are, without deterministic and wire_dtype")
        for array, target in zip(asked.arrays, out, strict=True):
            check_target(target, array)
            if array.dtype in HALF_DTYPES and options.intra_dtype != NATIVE:
                raise InvalidArgumentError(
                    f"{array.dtype} is summed in float32, in memory that a CUDA graph cannot hold; "
                    "CommunicationOptions(intra_dtype='native') sums it as it is"
                )
        # another view of its target is its target too
        own = [target if address(array) == address(target) else array for array, target in zip(asked.arrays, out, strict=True)]
        if not (all(array.flags.c_contiguous for array in asked.arrays) and are_apart(own, out)):
            raise InvalidArgumentError("in a CUDA graph arrays are C-contiguous and share no memory; out is them, or apart")

    def start_all_reduce(
        self, op: ReduceOp, arrays: Sequence[Array], options: CommunicationOptions | None, out: Sequence[Array] | None
    ) -> Work[list[Array]]:
        """Start what `all_reduce` does: see `mpistrat.Communicator.start_all_reduce`. A collective call."""
        with self.active():
            with self._guard.starting():
                call, asked, refused = self._guard.prepare(
                    "start_all_reduce", options, partial(Reduction, op, arrays), partial(self._check, out)
                )
                if refused is None:
                    call.is_started, call.signature.nbytes = True, sum(array.nbytes for array in arrays)
                    gpu = self._gpu if has_arrays(arrays) else None
                    if gpu is not None and out is None:
                        out = gpu.maker(arrays)()  # in memory of the caller's stream
                    carry_out: Callable[[], list[Array]] = partial(self._carry_out, call, asked, arrays, options, out)
                    if gpu is not None:
                        carry_out = gpu.on_own_stream(carry_out, partial(self._guard.run, call))
                    return self._guard.start(call, carry_out)
            with self._guard:  # the other ranks find out when the engine begins their call
                call.start_clock()
                return self._guard.refuse(call, refused)

    def _begin(
        self, begin: Begin, signature: Signature, arrays: Sequence[Array], out: Sequence[Array] | None
    ) -> list[Work[list[Array]]]:
        """Begin the call of a signature, which is the current one, and return its handle: who asks for the result sums."""
        call = Call(self._guard.number, "start_all_reduce", signature, is_started=True)
        [source], target = arrays, None if out is None else out[0]
        has_arrived, finish = begin(source)
        result = np.empty(source.shape, source.dtype) if target is None else target

        def carry_out() -> list[Array]:
            try:
                self._guard.run(call, finish(result))
            except CollectiveError as error:
                self._guard.give_up_started(call, error)
                raise
            return [result]

        def complete() -> list[Array] | None:
            if not has_arrived():
                return None
            try:
                self._guard.raise_if_failed()
                for _ in finish(result):
                    pass
            except (CallsDifferError, UnavailableError):  # `carry_out` tells
                return None
            return [result]

        return [self._guard.start(call, carry_out, complete)]

    def _scatter(
        self,
        program: Program,
        axis: int,
        arrays: Sequence[Array],
        out: Sequence[Array] | None,
        drive: Callable[[Steps], None] | None = None,
    ) -> list[Array]:
        """Reduce-scatter an array by its program: see `Program.run`. A collective call."""
        [array], target, dtype = arrays, None if out is None else out[0], program.scattered_dtype
        if program.blocking is not None and drive is None:
            part = self._own_part(program.blocking(arrays, None)[0], axis)
            if target is None:
                return [part.copy()]
            target[...] = part
            return [target]
        with self.active():
            make = new_array if self._gpu is None or not is_on_device(array) else self._gpu.empty
            result = make(self._own_part(array, axis).shape, array.dtype) if target is None else target
            if dtype is None:
                result[...] = self._own_part(program.run(arrays, None, drive)[0], axis)
                return [result]
            source: Array = quiet()(partial(np.moveaxis(array, axis, 0).astype, dtype, order="C", copy=False))
            part = np.moveaxis(result, axis, 0)
            # peers may still read the source while the result is written
            is_direct = part.dtype == dtype and part.flags.c_contiguous and not np.may_share_memory(source, part)
            total = part if is_direct else new_array(part.shape, dtype)
            program.run([source], [total], drive)
            if not is_direct:
                quiet()(np.copyto, part, total, "unsafe")
            return [result]

    def fits_part(self, target: Array, array: Array, axis: int) -> bool:
        """Return whether this rank's part of an array can be written to `target`; False also if that needs a closer look."""
        return target.__class__ is array.__class__ and fits(target, self._own_part(array, axis))

    def _own_part(self, array: Array, axis: int | None) -> Array:
        """Return this rank's part of an array along an axis; the array if there is none."""
        if axis is None:
            return array
        axis %= array.ndim
        first, last = part_bounds(array.shape[axis], self._size)[self._rank : self._rank + 2]
        part: Array = array[(slice(None),) * axis + (slice(first, last),)]
        return part

    def _check(self, out: Sequence[Array] | None, asked: Reduction) -> None:
        """Check the arguments of a call; arrays that have a program were checked when it was made."""
        if asked.axis is not None:
            check_gather(asked.arrays[0], asked.axis, "reduce_scatter")
        # the implementation is not part of what has a program
        if self.programs.find(asked) is None or asked.options.implementation is CommunicationImplementation.NCCL:
            self.programs.check(asked)
        if out is not None:
            for target, array in zip(out, asked.arrays, strict=True):
                check_target(target, array, self._own_part(array, asked.axis).shape)

    def _program(self, call: Call, asked: Reduction) -> Program:
        """Return the program of a call, which ranks compare first if it binds memory, or has a deadline.

        One that blocks is compared with a deadline only once: from then on it may be a known call on some ranks.
        """
        program, is_limited = self.programs.find(asked), bool(call.ends) or self._present.is_strict
        is_agreed = program is not None and program.is_agreed and not call.is_started
        if program is None or (is_limited and not is_agreed):
            self._guard.agree(call)
        elif call.ends:
            self._guard.raise_if_given_up(call)
        if program is None:
            settling = iter(()) if self._gpu is None else self._gpu.executor.settle()
            try:
                program = self.programs.compile(asked, partial(self._guard.run, call, settling))
            except UnavailableError as error:  # a rank has left the call
                self._guard.fail(call.verb, error)
                raise
        program.is_agreed = program.is_agreed or (is_limited and program.blocking is not None)
        return program

    def _carry_out(
        self,
        call: Call,
        asked: Reduction,
        arrays: Sequence[Array],
        options: CommunicationOptions | None,
        out: Sequence[Array] | None,
    ) -> list[Array]:
        """Run a started all-reduce, on the engine's thread."""
        call.start_clock()
        try:
            program = self._program(call, asked)
        except CollectiveError as error:
            self._guard.give_up_started(call, error)
            raise
        if program.begin is not None and not (call.seconds or self._present.is_strict):
            run: Any = partial(self._begin, program.begin, call.signature)
            self.programs.add(("start", asked.op._value_), arrays, options, Known(call.signature, call.signature.digest, run))
        self._guard.make_current(call)
        return program.run(arrays, out, partial(self._guard.run, call))
