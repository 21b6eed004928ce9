"""Plans for arrays on a GPU, and for calls with arrays in both memories."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mpistrat import settings
from mpistrat.algorithms import planners
from mpistrat.algorithms.choose import Choice, choose
from mpistrat.algorithms.chunks import DEVICE_CHUNK_BYTES
from mpistrat.algorithms.plan import Plan, Scope
from mpistrat.arrays import Array, is_on_device
from mpistrat.communicator.bound_batch import BoundBatch, Bucket
from mpistrat.communicator.explain import Explanation, Pack
from mpistrat.communicator.options import NATIVE, CommunicationImplementation, CommunicationOptions
from mpistrat.communicator.plan_cache import PlanCache
from mpistrat.communicator.validate import describe_all_reduce
from mpistrat.execution.device_executor import DeviceExecutor, DeviceScatter
from mpistrat.execution.memory import MemoryReport
from mpistrat.packing.wire import Wire
from mpistrat.reduction import HALF_DTYPES, ReduceOp

__all__ = ["DevicePlanCache", "MixedPlanCache"]

_ROUNDING_OPS = (ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.PROD)


class DevicePlanCache(PlanCache):
    """The plan cache of device memory.

    Parameters
    ----------
    executor : DeviceExecutor
        Binds the plans.
    say : callable
        Logs which plan was chosen, and why.
    """

    def __init__(self, executor: DeviceExecutor, say: Callable[[str], None]) -> None:
        super().__init__(executor, say, executor.model)
        self._device_executor = executor
        self._wanted_chunk_bytes, self._chunk_bytes = self._chunk_bytes, self._chunk_bytes or DEVICE_CHUNK_BYTES

    def explain(self, arrays: Sequence[Array], options: CommunicationOptions) -> Explanation:
        """Return how a sum of such arrays is computed: see `PlanCache.explain`. What is only enqueued is not timed."""
        found = super().explain(arrays, options)
        last_seconds = None if self._device_executor.enqueues else found.last_seconds
        return replace(found, last_seconds=last_seconds, path=str(self._device_executor.transports))

    def memory(self) -> MemoryReport:
        """Return the memory of the executor and the plans."""
        held = super().memory()
        on_device = held.window_bytes + held.rail_bytes
        return replace(
            held, window_bytes=0, rail_bytes=0, device_bytes=on_device, pinned_bytes=self._device_executor.pinned_bytes
        )

    def _scatter(
        self, op: ReduceOp, dtype: np.dtype[Any], bounds: Sequence[int], options: CommunicationOptions
    ) -> DeviceScatter | None:
        nccl = self._device_executor.transports.everywhere
        if nccl is None or nccl.refusal(dtype, op):
            return None
        phases, count = planners.scatter_phases(self._world), bounds[-1]
        chunk_count = max(count, 1) * self._world.size
        plan = Plan("hierarchical", self._world, count, dtype.itemsize, phases, chunk_count, bounds=tuple(bounds))
        return DeviceScatter(self._device_executor, nccl, plan, dtype, op)

    def _combined_in(self, op: ReduceOp, dtype: np.dtype[Any], options: CommunicationOptions) -> np.dtype[Any]:
        is_native = options.intra_dtype == NATIVE and op in _ROUNDING_OPS and dtype in HALF_DTYPES
        if is_native and self._device_executor.transports.combine_halves:
            return dtype
        return super()._combined_in(op, dtype, options)

    def _choice(
        self, op: ReduceOp, count: int, dtype: np.dtype[Any], options: CommunicationOptions, wire: Wire | None
    ) -> Choice:
        nccl, is_summed = self._device_executor.transports.everywhere, wire is None and not options.deterministic
        by_nccl = nccl is not None and is_summed and not nccl.refusal(dtype, op)
        joins_nodes = nccl is not None and self._world.num_nodes > 1
        if joins_nodes and by_nccl and options.algorithm == "auto":
            [plan] = planners.flat(self._world, count, dtype.itemsize)
            return Choice(plan, f"{settings.INTER_TRANSPORT.name}=nccl joins all ranks, and NCCL chooses how", ())
        choice = super()._choice(op, count, dtype, options, wire)
        if dtype in HALF_DTYPES and not by_nccl:
            choice = _without_halves_in_mpi(choice)
        if not by_nccl or self._world.num_nodes == 1:
            return choice
        # kernels of several communicators run one after the other, in an order that depends on nothing else
        return replace(choice, plan=replace(choice.plan, depth=1))

    def _best(self, count: int, itemsize: int, algorithm: str, wire_itemsize: int) -> Choice:
        # inside a node NCCL chooses the algorithm of an all-reduce itself
        return choose(
            self._world,
            count,
            itemsize,
            algorithm,
            self._wanted_chunk_bytes,
            self.model,
            wire_itemsize,
            one_intra_phase=True,
            default_chunk_bytes=DEVICE_CHUNK_BYTES,
        )


def _without_halves_in_mpi(choice: Choice) -> Choice:
    """Return a plan in which MPI reduces no 16-bit floats, which it does not know.

    In the scopes that MPI joins they are exchanged, and added in float32. A plan without a phase inside nodes gains nothing by
    them: its buckets have float32.
    """
    plan, scopes = choice.plan, {phase.scope for phase in choice.plan.phases} & {Scope.WORLD, Scope.INTER}
    if Scope.WORLD in scopes:
        return replace(choice, plan=planners.flat(plan.world, plan.count, np.dtype(np.float32).itemsize)[0])
    return replace(choice, plan=replace(plan, in_order=True)) if scopes else choice


class MixedPlanCache:
    """The plan caches of both memories. In a call with arrays in both, those in host memory come first, on all ranks.

    Parameters
    ----------
    host : PlanCache
        For arrays in host memory.
    device : DevicePlanCache
        For arrays on the GPU.
    """

    def __init__(self, host: PlanCache, device: DevicePlanCache) -> None:
        self._host, self._device = host, device
        self.model = device.model

    @property
    def num_invalidated(self) -> int:
        """How often plans were evicted or lost their memory: see `PlanCache.num_invalidated`."""
        return self._host.num_invalidated + self._device.num_invalidated

    def find(
        self,
        op: ReduceOp,
        arrays: Sequence[Array],
        options: CommunicationOptions,
        axis: int | None = None,
    ) -> BoundBatch:
        """Return the plan for such arrays: see `PlanCache.find`. A collective call if there is none yet."""
        parts = self._split(arrays)
        if len(parts) == 1:
            cache = parts[0][0]
            return cache.find(op, arrays, self._options(cache, options), axis)
        found = BoundBatch(text=describe_all_reduce(op, arrays, options))
        for cache, indices in parts:
            batch = cache.find(op, [arrays[index] for index in indices], self._options(cache, options))
            found += [Bucket(tuple(indices[index] for index in bucket.indices), bucket.bound) for bucket in batch]
        return found

    def has(
        self,
        op: ReduceOp,
        arrays: Sequence[Array],
        options: CommunicationOptions,
        axis: int | None = None,
    ) -> bool:
        """Return whether there is a plan for such arrays: see `PlanCache.has`."""
        return all(
            cache.has(op, [arrays[index] for index in indices], self._options(cache, options), axis)
            for cache, indices in self._split(arrays)
        )

    def explain(self, arrays: Sequence[Array], options: CommunicationOptions) -> Explanation:
        """Return how a sum of such arrays is computed: see `PlanCache.explain`."""
        parts = [
            (cache.explain([arrays[index] for index in indices], self._options(cache, options)), indices)
            for cache, indices in self._split(arrays)
        ]
        if len(parts) == 1:
            return parts[0][0]
        packs = [
            Pack(tuple(indices[index] for index in pack.indices), pack.dtype, pack.choice, pack.model)
            for part, indices in parts
            for pack in part.packs
        ]
        return Explanation(parts[0][0].world, tuple(packs), self.model, path=parts[-1][0].path)

    def check(self, op: ReduceOp, arrays: Sequence[Array], options: CommunicationOptions) -> None:
        """Check that arrays can be combined with these options: see `PlanCache.check`."""
        for cache, indices in self._split(arrays):
            cache.check(op, [arrays[index] for index in indices], self._options(cache, options))

    def choose(self, count: int, dtype: np.dtype[Any], options: CommunicationOptions) -> Choice:
        """Return the plan for a sum of `count` elements on the GPU, and why it was chosen."""
        return self._device.choose(count, dtype, options)

    def memory(self) -> MemoryReport:
        """Return the memory of executors and plans."""
        host, device = self._host.memory(), self._device.memory()
        return replace(
            device,
            window_bytes=host.window_bytes,
            rail_bytes=host.rail_bytes,
            plan_bytes=host.plan_bytes + device.plan_bytes,
            num_plans=host.num_plans + device.num_plans,
            largest_pack_bytes=max(host.largest_pack_bytes, device.largest_pack_bytes),
        )

    def clear(self) -> None:
        """Forget all plans."""
        self._host.clear()
        self._device.clear()

    def _options(self, cache: PlanCache, options: CommunicationOptions) -> CommunicationOptions:
        """Return the options for one memory: NCCL does not apply to host memory."""
        is_nccl = options.implementation is CommunicationImplementation.NCCL
        return replace(options, implementation="AUTO") if is_nccl and cache is self._host else options

    def _split(self, arrays: Sequence[Array]) -> list[tuple[PlanCache, list[int]]]:
        """Return which arrays belong to which cache; an empty batch belongs to that of the GPU."""
        on_device = [index for index, array in enumerate(arrays) if is_on_device(array)]
        if len(on_device) in (0, len(arrays)):
            return [(self._device if on_device or not arrays else self._host, list(range(len(arrays))))]
        on_host = [index for index, array in enumerate(arrays) if not is_on_device(array)]
        return [(self._host, on_host), (self._device, on_device)]
