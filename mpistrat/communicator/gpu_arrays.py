"""GpuArrays: the part of a communicator that reduces arrays on its rank's GPU, by `execution.device_executor`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mpistrat.arrays import Array, is_on_device
from mpistrat.device.abstract import Device
from mpistrat.execution.device_executor import DeviceExecutor
from mpistrat.execution.executor import Executor
from mpistrat.execution.guard import Guard
from mpistrat.groups.agreement import Agreement, CallsDifferError
from mpistrat.steps import Steps, until
from mpistrat.transports.nccl_watcher import UNSEEN_SECONDS


class GpuArrays:
    """Executor and stream for arrays on GPUs. Making one is a collective call."""

    def __init__(self, device: Device, host: Executor, guard: Guard) -> None:
        self.device, self._guard, guard.is_on_gpu = device, guard, True
        self.executor = DeviceExecutor(host, device)
        guard.deadlines.check_gpu = partial(self.executor.raise_failure, UNSEEN_SECONDS / 2)
        self.stream = device.stream()
        self._agreement, self._call = Agreement(host.hierarchy.world_group), host.hierarchy.call

    def admits(self, arrays: Sequence[Any], out: Sequence[Any] | None) -> bool:
        """Return whether a known call may be made: arrays on a GPU are on that of this rank, and no graph is captured."""
        if not (arrays and is_on_device(arrays[0])):  # they lie in one memory
            return True
        every = arrays if out is None or out is arrays else [*arrays, *out]
        index = self.device.index
        return all([array.device.id == index for array in every]) and not self.is_capturing()

    def is_capturing(self) -> bool:
        """Return whether a CUDA graph is being captured on the caller's stream."""
        with self.device.activate():
            return self.device.current_stream().is_capturing()

    def barrier(self) -> Steps:
        """Return the steps that wait until all ranks have entered and have their memory, and compare their calls.

        NCCL is called afterwards: it compares nothing, and its kernels wait for all ranks. A collective call.
        """
        return self._agreement.barrier(self._call.digest if self._guard.checks else 0)

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

    def finish(self) -> None:
        """Wait on the host until all that was enqueued on the current stream has ended.

        If NCCL was aborted meanwhile, what it should have written is undefined, and this raises.
        """
        with self.device.activate():
            try:
                self._guard.deadlines.drive(self.abort_on_error(self._end()))
            except BaseException as error:
                raise self._guard.fail_current(error) from None

    def _end(self) -> Steps:
        for waits in until(self.device.current_stream().record().done):
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
                finish(self.abort_on_error(self._end()))
            return results

        return run


def has_arrays(arrays: Sequence[Array]) -> bool:
    """Return whether some of the arrays are on a GPU."""
    return any(map(is_on_device, arrays))
