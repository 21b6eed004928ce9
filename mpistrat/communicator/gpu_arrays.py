"""GpuArrays: what a communicator does with arrays on the GPU of its rank.

They are combined there: see `execution.device_executor`. Arrays in host memory, such as numbers, go the way of the host, also
beside others in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from mpistrat.arrays import Array, is_on_device
from mpistrat.communicator.device_plans import DevicePlanCache, MixedPlanCache
from mpistrat.communicator.guard import CollectiveGuard
from mpistrat.communicator.plan_cache import PlanCache
from mpistrat.device.abstract import Device, Event
from mpistrat.execution.device_executor import DeviceExecutor
from mpistrat.execution.executor import Executor
from mpistrat.transports.steps import WAITING, Steps

__all__ = ["GpuArrays", "has_arrays"]


class GpuArrays:
    """The part of a communicator that works on GPUs. Making one is a collective call.

    Parameters
    ----------
    device : Device
        Of this rank.
    host : Executor
        Of the communicator's host memory, over which device memory is staged.
    plans : PlanCache
        Those of host memory.
    guard : CollectiveGuard
        Is told where this rank gives a call up.
    say : callable
        Is told which plans are chosen, and why.

    Attributes
    ----------
    plans : MixedPlanCache
        Those of both kinds of memory.
    executor : DeviceExecutor
        Binds plans to transports of device memory.

    Raises
    ------
    TransportError
        On all ranks, if the settings name a transport that does not serve on one node.
    """

    def __init__(
        self, device: Device, host: Executor, plans: PlanCache, guard: CollectiveGuard, say: Callable[[str], None]
    ) -> None:
        self._device, self._guard, guard.is_on_gpu = device, guard, True
        self.executor = DeviceExecutor(host, device)
        self.plans = MixedPlanCache(plans, DevicePlanCache(self.executor, say))
        self.stream = device.stream()

    @property
    def path(self) -> str:
        """Which transports arrays on GPUs take, and why not faster ones."""
        return str(self.executor.transports)

    def activate(self) -> AbstractContextManager[None]:
        """Make the GPU the one that the calling thread computes on; undone when left."""
        return self._device.activate()

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a new array on the GPU."""
        array: Array = self._device.array_module.empty(shape, dtype)
        return array

    def watched(self, steps: Steps) -> Steps:
        """Go through steps on GPUs; no rank is left with a kernel that waits for another one that has failed."""
        try:
            yield from steps
        except GeneratorExit:  # this rank or another has given up, and told the others
            self.executor.abort("the collective was given up")
            raise
        except Exception as error:
            self.executor.abort(f"{type(error).__name__}: {error}")
            self._guard.give_up()
            raise

    def after_given(self, carry_out: Callable[[], list[Array]], finish: Callable[[Steps], None]) -> Callable[[], list[Array]]:
        """Return what does the same after what the caller's current stream has been given so far, on a stream of its own.

        Parameters
        ----------
        carry_out : callable
            What the engine is to do.
        finish : callable
            Goes through the steps that wait until it is done.
        """
        given = self._device.current_stream().record()

        def run() -> list[Array]:
            with self._device.activate(self.stream):
                self.stream.wait(given)
                results = carry_out()
                finish(self.watched(_until(self.stream.record())))
            return results

        return run

    def abandon(self) -> None:
        """Give up what NCCL has under way: a collective has failed, and to end it properly takes all ranks."""
        self.executor.abort("a collective has failed")

    def close(self) -> None:
        """Free what the executor holds, when all that was enqueued has ended. A collective call."""
        self._guard.drive_present(self.executor.settle())
        self.executor.close()


def has_arrays(arrays: Sequence[Array]) -> bool:
    """Return whether some of the arrays are on a GPU."""
    return any(map(is_on_device, arrays))


def _until(event: Event) -> Steps:
    while not event.done():
        yield WAITING
