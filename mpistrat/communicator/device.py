"""DeviceCommunicator: a communicator of replicas that compute on GPUs.

Arrays on the GPU are combined there: see `execution.device_executor`. Arrays in host memory, such as numbers, go the way of
the host, also beside others in one call. Verbs that only move arrays copy those on the GPU to the host first, and what comes
back to the GPU.

File law: the short ways of the host tell arrays apart by shape and dtype alone, so arrays on the GPU never get there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

from mpistrat.arrays import Array, is_on_device
from mpistrat.communicator.bound_batch import BoundBatch, is_current
from mpistrat.communicator.call import Call
from mpistrat.communicator.device_plans import DevicePlanCache, MixedPlanCache
from mpistrat.communicator.fast_paths import SIGNATURE
from mpistrat.communicator.guard import FRAMES
from mpistrat.communicator.mpi import MpiCommunicator
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.communicator.plan_cache import PlanCache
from mpistrat.communicator.validate import apart, check_out
from mpistrat.device.base import Device, Event
from mpistrat.errors import InvalidArgumentError, TransportError
from mpistrat.execution.device_executor import DeviceExecutor
from mpistrat.execution.work import Work
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.reduction import ReduceOp
from mpistrat.transports.steps import WAITING, Steps

__all__ = ["DeviceCommunicator"]


class DeviceCommunicator(MpiCommunicator):
    """All ranks of a hierarchy, each of which has a GPU. Making one is a collective call.

    Parameters
    ----------
    hierarchy : Hierarchy
        The groups to work on; `close` frees them too.
    device : Device
        Of this rank.
    options : CommunicationOptions, optional
        As for `MpiCommunicator`.
    num_packs : int, optional
        Likewise.

    Raises
    ------
    InvalidArgumentError
        If `num_packs` is negative.
    TransportError
        On all ranks, if the settings name a transport that does not serve on one node.
    """

    def __init__(
        self,
        hierarchy: Hierarchy,
        device: Device,
        options: CommunicationOptions | None = None,
        num_packs: int | None = None,
    ) -> None:
        self._device = device
        super().__init__(hierarchy, options, num_packs)
        self._on_device = DeviceExecutor(self._executor, device)
        host = self._plans
        assert isinstance(host, PlanCache), "these are the plans of the host"
        self._plans = MixedPlanCache(host, DevicePlanCache(self._on_device, self._say))
        self._stream = device.stream()
        self._array_type = device.array_module.ndarray
        # plans that the cache still has: when it lets one go, all ranks compare the next call like it
        self._known: WeakValueDictionary[tuple[Any, ...], BoundBatch] = WeakValueDictionary()
        self._say(f"arrays on GPUs: {self.path}")

    @property
    def path(self) -> str:
        """Which transports arrays on GPUs take, and why not faster ones."""
        return str(self._on_device.transports)

    def all_reduce(
        self,
        op: ReduceOp | str,
        arrays: Sequence[Array],
        options: CommunicationOptions | None = None,
        out: Sequence[Array] | None = None,
    ) -> list[Array]:
        """Combine each array across replicas: see `Communicator.all_reduce`. A collective call.

        Results on the GPU are there when the caller's current stream gets to what is put on it next.
        """
        op = ReduceOp.parse(op)
        known = self._known_batch(op, arrays) if options is None else None
        if known is not None:
            results = self._all_reduce_by(known, arrays, out)
            if results is not None:
                return results
        if not any(map(is_on_device, arrays if out is None else (*arrays, *out))):
            return super().all_reduce(op, arrays, options, out)
        with self._device.activate(), self._guard:
            call, steps, results = self._begin(op, arrays, options, out)
            self._guard.run(call, steps)
            return results

    def all_reduce_again(self, op: ReduceOp, arrays: Sequence[Array], noted: int = 0, frames: int = 2) -> list[Array] | None:
        """Combine arrays in host memory like earlier ones: see `Communicator.all_reduce_again`. A collective call."""
        return None if any(map(is_on_device, arrays)) else super().all_reduce_again(op, arrays, noted, frames)

    def start_all_reduce(
        self,
        op: ReduceOp | str,
        arrays: Sequence[Array],
        options: CommunicationOptions | None = None,
        out: Sequence[Array] | None = None,
        structure: object = None,
    ) -> Work[list[Array]]:
        """Start what `all_reduce` does: see `Communicator.start_all_reduce`. A collective call.

        It begins after what the caller's current stream has been given so far; when it has ended, its results are there for
        every stream.
        """
        with self._device.activate():
            return super().start_all_reduce(op, arrays, options, out, structure)

    def reduce_scatter(
        self, op: ReduceOp | str, array: Array, axis: int = 0, options: CommunicationOptions | None = None
    ) -> Array:
        """Combine arrays, and take this replica's part: see `Communicator.reduce_scatter`. A collective call."""
        with self._device.activate():
            return super().reduce_scatter(op, array, axis, options)

    def all_gather(self, array: Array, axis: int = 0, options: CommunicationOptions | None = None) -> Array:
        """Concatenate along `axis`, in replica order: see `Communicator.all_gather`. A collective call."""
        return self._up(array, super().all_gather(self._down(array), axis, options))

    def gather(self, array: Array, root: int = 0, options: CommunicationOptions | None = None) -> list[Array] | None:
        """Collect the arrays of all replicas on one: see `Communicator.gather`. A collective call."""
        arrived = super().gather(self._down(array), root, options)
        return arrived and [self._up(array, one) for one in arrived]

    def all_to_all(self, arrays: Sequence[Array], options: CommunicationOptions | None = None) -> list[Array]:
        """Send an array to each replica: see `Communicator.all_to_all`. A collective call."""
        arrived = super().all_to_all(list(map(self._down, arrays)), options)
        return [self._up(array, one) for array, one in zip(arrays, arrived, strict=True)]

    def broadcast(self, array: Array, root: int = 0, options: CommunicationOptions | None = None) -> Array:
        """Return the array of replica `root`: see `Communicator.broadcast`. A collective call."""
        return self._up(array, super().broadcast(self._down(array), root, options))

    def _known_batch(self, op: ReduceOp, arrays: Sequence[Array]) -> BoundBatch | None:
        """Return the plan of an earlier call with arrays like these, all on the GPU, if a call like it needs no check."""
        if self._guard.refusal or self._options.timeout_seconds or self.is_strict:
            return None
        kind = self._array_type
        for array in arrays:
            if type(array) is not kind:
                return None
        batch = self._known.get(self._likeness(op, arrays))
        return batch if batch is not None and is_current(batch, self._on_device) else None

    def _all_reduce_by(self, batch: BoundBatch, arrays: Sequence[Array], out: Sequence[Array] | None) -> list[Array] | None:
        """Combine arrays on the GPU by the plan of an earlier call; None, and nothing done, where all must be looked at."""
        guard = self._guard
        if out is not None:
            try:
                self._check_out(out, arrays)
            except InvalidArgumentError:
                return None  # the other ranks must learn of it
        if not guard.lock.acquire(False):
            return None
        slot = 0
        try:
            self.num_collectives = number = self.num_collectives + 1
            guard.signature = signature = batch.signature("all_reduce")
            self._present.word = word = signature.word ^ guard.noted_before(0)
            index = guard.indexes.get(word) or guard.index(word, "all_reduce", signature.text, signature.details)
            slot = self._recorder.enter(guard.communicator, number, index, FRAMES)
            with self._device.activate():
                results, sources = self._landing(arrays, out)
                guard.drive_present(self._steps(batch, sources, results))
            self._recorder.leave(slot)
            return results
        except BaseException as error:
            if slot:
                self._recorder.fail(slot)
            raise guard.explain(error) from None
        finally:
            guard.lock.release()

    def _learn(self, op: ReduceOp, arrays: Sequence[Array], batch: BoundBatch) -> None:
        if arrays and all(map(is_on_device, arrays)):
            self._known[self._likeness(op, arrays)] = batch
        else:
            super()._learn(op, arrays, batch)

    def _likeness(self, op: ReduceOp, arrays: Sequence[Array]) -> tuple[Any, ...]:
        return (op._value_, self._num_packs, *map(SIGNATURE, arrays))

    def _abandon(self) -> None:
        self._on_device.abort("a collective has failed")  # to give NCCL's communicator up properly takes all its ranks

    def _free(self) -> None:
        self._plans.clear()
        self._on_device.close()
        super()._free()

    def _landing(self, arrays: Sequence[Array], out: Sequence[Array] | None) -> tuple[list[Array], Sequence[Array]]:
        if out is not None:
            results = self._check_out(out, arrays)
            return results, apart(arrays, results)
        try:
            return [self._empty(array) for array in arrays], arrays
        except MemoryError as error:
            self._guard.give_up()
            self._guard.fail("all_reduce", error)
            raise TransportError(
                f"rank {self.rank}: no memory for the results ({error}); pass out=, or smaller arrays, or free some of CuPy's: "
                "cupy.get_default_memory_pool().free_all_blocks()"
            ) from None

    def _empty(self, array: Array) -> Array:
        if not is_on_device(array):
            return super()._empty(array)
        empty: Array = self._device.array_module.empty(array.shape, array.dtype)
        return empty

    def _part(self, total: Array, axis: int) -> Array:
        if not is_on_device(total):
            return super()._part(total, axis)
        axis %= total.ndim
        least, longer = divmod(total.shape[axis], self.size)
        start = self.rank * least + min(self.rank, longer)
        stop = start + least + (self.rank < longer)
        part: Array = total[(slice(None),) * axis + (slice(start, stop),)].copy()
        return part

    def _check_out(self, out: Sequence[Array], arrays: Sequence[Array]) -> list[Array]:
        results = check_out(out, arrays)
        for target, array in zip(results, arrays, strict=True):
            if is_on_device(target) != is_on_device(array):
                where = ["in host memory", "on a GPU"][:: -1 if is_on_device(array) else 1]
                raise InvalidArgumentError(f"out must lie where the array does: the array is {where[0]}, out {where[1]}")
        return results

    def _steps(self, batch: BoundBatch, sources: Sequence[Array], results: Sequence[Array]) -> Steps:
        steps = super()._steps(batch, sources, results)
        return self._watched(steps) if any(map(is_on_device, results)) else steps

    def _job(
        self, call: Call, op: ReduceOp, arrays: list[Array], results: list[Array], num_packs: int | None
    ) -> Callable[[], list[Array]]:
        carry_out = super()._job(call, op, arrays, results, num_packs)
        if not any(map(is_on_device, arrays)):
            return carry_out
        given = self._device.current_stream().record()

        def after_given() -> list[Array]:
            with self._device.activate(self._stream):
                self._stream.wait(given)
                carry_out()
                self._guard.run(call, self._watched(_until(self._stream.record())))
            return results

        return after_given

    def _watched(self, steps: Steps) -> Steps:
        """Go through steps on GPUs; no rank is left with a kernel that waits for another one that has failed."""
        try:
            yield from steps
        except GeneratorExit:  # this rank or another has given up, and told the others
            self._on_device.abort("the collective was given up")
            raise
        except Exception as error:
            self._on_device.abort(f"{type(error).__name__}: {error}")
            self._guard.give_up()
            raise

    def _down(self, array: Array) -> Array:
        """Return an array in host memory."""
        if not is_on_device(array):
            return array
        with self._device.activate():
            return self._device.get(array)

    def _up(self, original: Array, result: Array) -> Array:
        """Return what came of an array where that is."""
        if not is_on_device(original):
            return result
        with self._device.activate():
            copied: Array = self._device.array_module.asarray(result)
            return copied


def _until(event: Event) -> Steps:
    while not event.done():
        yield WAITING
