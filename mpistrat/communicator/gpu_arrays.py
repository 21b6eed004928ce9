"""GpuArrays: the part of a communicator that reduces arrays on its rank's GPU, by `execution.device_executor`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from mpistrat.arrays import Array, is_captured_elsewhere, is_on_device
from mpistrat.device.cuda import Device, Event, Stream, address
from mpistrat.execution.compile import Bucket
from mpistrat.execution.device_executor import DeviceExecutor
from mpistrat.execution.engine import Work, wait_for_gpu
from mpistrat.execution.executor import Executor
from mpistrat.execution.guard import Guard
from mpistrat.execution.program import Blocking, Program
from mpistrat.groups.agreement import CallsDifferError
from mpistrat.steps import Steps, until
from mpistrat.transports.nccl import Enqueue
from mpistrat.transports.nccl_watcher import UNSEEN_SECONDS

T = TypeVar("T")
_Meet = Callable[[], "Steps | None"]

PER_THREAD_STREAM = 2  # the pointer that CUDA has for the default stream of each thread


class GpuArrays:
    """Executor and stream for arrays on GPUs. Making one is a collective call.

    `stream` is that of started operations.
    """

    def __init__(self, device: Device, host: Executor, guard: Guard) -> None:
        self.device, self._guard, guard.is_on_gpu = device, guard, True
        self.executor = DeviceExecutor(host, device)
        guard.deadlines.check_gpu = partial(self.executor.raise_failure, UNSEEN_SECONDS / 2)
        self.stream = device.stream()
        self.may_capture = False
        self._caller: Stream | None = None  # of what is being enqueued on that stream, with what is kept for it
        self._kept: list[Any] = []
        self._under_way: deque[_End] = deque()
        self._module = device.array_module

    def admits(self, arrays: Sequence[Any], out: Sequence[Any] | None) -> bool:
        """Return whether a known call may be made: arrays on a GPU are on that of this rank, and no graph is captured."""
        if not (arrays and is_on_device(arrays[0])):  # they lie in one memory
            return True
        index = self.device.index
        for array in arrays if out is None or out is arrays else [*arrays, *out]:
            if array.data.device_id != index:
                return False
        return not self.is_capturing()

    def is_capturing(self) -> bool:
        """Return whether a CUDA graph is being captured, on the caller's stream or by PyTorch on another one."""
        return self.device.current_stream().is_capturing() or is_captured_elsewhere(self.device)

    def abort_on_error(self, steps: Steps) -> Steps:
        """Run steps on GPUs; if they fail, abort, so that no kernel waits forever for a rank that has failed."""
        try:
            yield from steps
        except GeneratorExit:  # a rank has given up, and has notified the others
            self.executor.abort("the collective was given up")
            raise
        except CallsDifferError:  # found by all ranks in the barrier, before one of them enqueued anything
            raise
        except Exception as error:
            self.executor.abort(f"{type(error).__name__}: {error}")
            self._guard.deadlines.barrier.give_up()
            raise

    def wait_for_others(self) -> None:
        """Wait for what others have started on this GPU: see `wait_for_gpu`."""
        wait_for_gpu(self._guard)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a new array, in memory of the caller's stream: CuPy gives that to nobody else before its turn there."""
        if self._caller is None:
            array: Array = self._module.empty(shape, dtype)
            return array
        return self._made(lambda: [self._module.empty(shape, dtype)])[0]

    def maker(self, arrays: Sequence[Array]) -> Callable[[], list[Array]]:
        """Return what makes new arrays in such memory, of the shapes and dtypes of others."""
        return partial(self._made, self.device.maker(arrays))

    def _made(self, make: Callable[[], list[Array]]) -> list[Array]:
        if self._caller is None:
            return make()
        with self.device.activate(self._caller):
            made = make()
        self._kept += made
        return made

    def by_nccl(self, enqueue: Enqueue, like: tuple[Any, Any], in_place: bool, meet: _Meet | None = None) -> Blocking:
        """Return what has NCCL make a result of a shape and dtype from one array, with as little Python as possible.

        If that can be done `in_place`, the array may be the result. `meet` returns the steps that wait for the other ranks, by
        default `DeviceExecutor.barrier`; if it returns None, nothing is done, and no result returned.
        """
        meet, guard = meet or self.executor.barrier, self._guard

        def run(arrays: Sequence[Array], out: Sequence[Array] | None) -> list[Array]:
            [source] = arrays
            self.wait_for_others()
            with self.device.activate():
                target = self.empty(*like) if out is None else out[0]
                start, end = address(source), address(target)
                overlaps = start < end + target.nbytes and end < start + source.nbytes
                if not source.flags.c_contiguous or (overlaps and not (in_place and start == end)):
                    source = source.copy()
                    start = address(source)
                steps = meet()
                if steps is None:
                    return []
                guard.deadlines.drive_short(self.abort_on_error(_followed(steps, enqueue, start, end)))
            return [target]

        return run

    def along(self, axis: int, shape: tuple[int, ...], dtype: np.dtype[Any], run: Blocking) -> Blocking:
        """Return what makes a result of a shape by `run`, which takes arrays of a dtype with that axis as their first one."""

        def run_along(arrays: Sequence[Array], out: Sequence[Array] | None) -> list[Array]:
            [array] = arrays
            with self.device.activate():
                moved = np.moveaxis(array, axis, 0)
                result = self.empty(shape, array.dtype) if out is None else out[0]
                made = run([moved.astype(dtype, order="C", copy=False)], None)
                for each in made:
                    result[...] = np.moveaxis(each, 0, axis)
            return [result] if made else []

        return run_along

    def enqueue(self, call: Callable[..., T], arrays: Sequence[Array], out: Sequence[Array] | None) -> Work[T]:
        """Make a call on the stream of started operations, after the work of the current one so far; return its handle.

        Arrays and results are kept until nobody can get their memory too early: the program may drop them at once.
        """
        with self.device.activate():
            while self._under_way and self._under_way[0].event.done():
                self._under_way.popleft()
            self._caller, self._kept = caller, kept = self.device.current_stream(), [*arrays, *(out or ())]
            self.stream.wait(caller.record())
            try:
                with self.device.activate(self.stream):
                    results = call(arrays, out=out)
            finally:
                self._caller = None
                what = f"collective {self._guard.number}, {self._guard.signature.text}"
                self._under_way.append(_End(self, what, self.stream.record(), caller, kept))
            return Work.ended(results, self._under_way[-1])

    def finish(self) -> None:
        """Wait on the host until all that was enqueued on the current stream has ended.

        If NCCL was aborted meanwhile, what it should have written is undefined, and this raises.
        """
        with self.device.activate():
            self._finish(self._guard.deadlines.drive, self.device.current_stream().record())

    def finish_started(self, what: str, event: Event) -> None:
        """Wait on the host until the GPU has come to the end of a started call: NCCL's watcher holds its deadline."""
        with self.device.activate():
            self._finish(partial(self._guard.deadlines.wait, what), event)

    def _finish(self, drive: Callable[[Steps], None], event: Event) -> None:
        try:
            drive(self.abort_on_error(self._until(event)))
        except BaseException as error:
            raise self._guard.fail_current(error) from None

    def _until(self, event: Event) -> Steps:
        for waits in until(event.done):
            self.executor.raise_failure()
            yield waits
        self.executor.raise_failure()

    def on_own_stream(self, carry_out: Callable[[], list[Array]], finish: Callable[[Steps], None]) -> Callable[[], list[Array]]:
        """Return `carry_out` on the stream of started operations, after the work enqueued so far on the current stream."""
        enqueued = self.device.current_stream().record()

        def run() -> list[Array]:
            with self.device.activate(self.stream):
                self.stream.wait(enqueued)
                results = carry_out()
                finish(self.abort_on_error(self._until(self.stream.record())))
            return results

        return run


class DeviceProgram(Program):
    """A program of arrays on the GPU."""

    def __init__(self, gpu: GpuArrays, buckets: Sequence[Bucket], arrays: Sequence[Array]) -> None:
        super().__init__(gpu.executor, buckets, arrays)
        self._gpu, self._new_results = gpu, gpu.maker(arrays)

    def run(
        self, arrays: Sequence[Array], out: Sequence[Array] | None, drive: Callable[[Steps], None] | None = None
    ) -> list[Array]:
        if drive is None:
            self._gpu.wait_for_others()
        with self._gpu.device.activate():
            return super().run(arrays, out, drive)

    def steps(self, sources: Sequence[Array], results: Sequence[Array]) -> Steps:
        return self._gpu.abort_on_error(super().steps(sources, results))


def _followed(steps: Steps, enqueue: Enqueue, start: int, end: int) -> Steps:
    yield from steps
    enqueue(start, end)


class _End:
    """The end of what was enqueued on the stream of started operations; raises if that has been aborted.

    What is `kept` for it is dropped when all that comes on the stream of its caller comes after the event.
    """

    def __init__(self, gpu: GpuArrays, what: str, event: Event, caller: Stream, kept: list[Any]) -> None:
        self._gpu, self._what, self.event, self._caller, self._kept = gpu, what, event, caller, kept

    def done(self) -> bool:
        with self._gpu.device.activate():
            has_come = self.event.done()
        self._gpu.executor.raise_failure()
        if has_come:
            self._kept.clear()
        return has_come

    def wait(self, host: bool) -> None:
        if host:
            self._gpu.finish_started(self._what, self.event)
            self._kept.clear()
            return
        self._gpu.executor.raise_failure()
        with self._gpu.device.activate():
            current = self._gpu.device.current_stream()
            current.wait(self.event)
            if current.pointer == self._caller.pointer != PER_THREAD_STREAM:
                self._kept.clear()


def has_arrays(arrays: Sequence[Array]) -> bool:
    """Return whether some of the arrays are on a GPU."""
    return any(map(is_on_device, arrays))
