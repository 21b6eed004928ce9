"""DeviceExecutor: plans on memory of a GPU, by transports that work on it.

File law: arrays are copied on the caller's current stream, and transports order themselves after it. What is done by the end
of a plan is on that stream; no other one is waited for by the host, unless peers read this rank's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpistrat.algorithms.plan import Plan, Scope, Verb
from mpistrat.arrays import Array
from mpistrat.device.abstract import Device, Event, address
from mpistrat.execution.executor import CopySteps, Executor
from mpistrat.execution.select import DeviceTransports, device_transports
from mpistrat.groups.group import Group
from mpistrat.packing.fuse_device import DeviceCopyIn, DeviceCopyOut
from mpistrat.packing.layout import Layout
from mpistrat.reduction import Fold, ReduceOp
from mpistrat.transports.base import Operation, Part, Transport
from mpistrat.transports.flat_arrays import FlatArrays
from mpistrat.transports.nccl import nccl_refusal
from mpistrat.transports.ordered import Caster, ordered_all_reduce
from mpistrat.transports.steps import WAITING, Steps

__all__ = ["DeviceExecutor"]

DIRECT_FROM_BYTES = 1 << 20  # of each array: to pack smaller ones takes less time than to begin as many operations

_REDUCING = (Verb.ALL_REDUCE, Verb.REDUCE_SCATTER, Verb.REDUCE)


class DeviceExecutor(Executor):
    """Binds plans to transports of device memory. Making one is a collective call.

    Parameters
    ----------
    host : Executor
        Of the same hierarchy: what device memory is staged over, and the timeline.
    device : Device
        Of this rank.

    Attributes
    ----------
    enqueues : bool
        Whether plans end when their work has been enqueued, unless their call has a deadline, was started, or is timed.

    Raises
    ------
    TransportError
        On all ranks, if the settings name a transport that does not serve on one node.
    """

    transports: DeviceTransports

    def __init__(self, host: Executor, device: Device) -> None:
        super().__init__(host.hierarchy, device_transports(host.hierarchy, device, host.transports))
        self.device, self._device, self.timeline = device, device, host.timeline
        self._shares_memory = host._shares_memory  # where ranks meet before each call
        self._copied_out: Event | None = None
        self._window = host.intra.window if host.hierarchy.world.num_nodes == 1 else None
        nccl, call, timeline = self.transports.everywhere, host.hierarchy.call, host.timeline
        self.enqueues = nccl is not None and self._window is not None
        if nccl is not None and self._window is not None:
            nccl.watch(lambda: call.must_poll or timeline.enabled, self._window.has_given_up)

    def max_in_flight(self, depth: int) -> int:
        """Return how many of `depth` chunks may be between nodes: one where rails have no channels.

        A copy to the host comes first, and which of several ends first differs between ranks.
        """
        return depth if self.transports.has_channels else 1

    def copy_in(self, layout: Layout, start: int, stop: int, buffer: Array, dtypes: Sequence[np.dtype[Any]]) -> CopySteps:
        """Return what copies arrays of these dtypes into a range of a bucket, when it has been copied out to its end."""
        return _Before(self._follow, DeviceCopyIn(self._device, layout, start, stop, buffer, dtypes))

    def copy_out(
        self,
        layout: Layout,
        start: int,
        stop: int,
        parts: Sequence[Part],
        buffer: Array,
        op: ReduceOp,
        divisor: int,
        dtypes: Sequence[np.dtype[Any]],
    ) -> CopySteps:
        """Return what copies a range of a bucket out to arrays, and waits for that where peers may write there next."""
        assert all(len(part.addends) == 1 for part in parts), "transports of device memory combine by themselves"
        sources = [(part.start, part.stop, part.addends[0]) for part in parts] or [(0, buffer.size, buffer)]
        return _After(DeviceCopyOut(self._device, layout, start, stop, sources, divisor, dtypes), self._note_copied)

    def lies_in(self, array: Array, buffer: Array) -> bool:
        """Return whether an array is memory of a buffer."""
        return address(buffer) <= address(array) < address(buffer) + buffer.nbytes

    def nccl_refusal(self, dtype: np.dtype[Any], op: ReduceOp) -> str:
        """Return which nodes do not use NCCL, and why, or what it does not combine, or an empty text: alike on all ranks."""
        return self.transports.lacks_nccl or nccl_refusal(dtype, op)

    @property
    def pinned_bytes(self) -> int:
        """The memory of the host that device memory is staged through."""
        of_groups = (self.world, self.intra, self.transports.intra_by_host, self.transports.leaders)
        every = [*of_groups, *self.rails.values(), *self.transports.small_rails.values()]
        return sum(transport.pinned_bytes for transport in every if transport is not None)

    def abort(self, reason: str) -> None:
        """Give up what NCCL has under way: its kernels would wait for peers for ever. The peers must do likewise."""
        if self._window is not None:
            self._window.give_up()
        self.intra.abort(reason)

    def settle(self) -> Steps:
        """Wait until all that was enqueued has ended."""
        yield from self.intra.settle()
        while not self._has_copied_out():
            yield WAITING

    def close(self) -> None:
        """Free the scratch memory and what transports made; all that was enqueued has ended. A collective call."""
        for bound in self.bound_plans:
            bound.unbind()  # memory of peers must not be mapped any more when they free it
        self.intra.dispose()

    def between(
        self, plan: Plan, layout: Layout, dtype: np.dtype[Any], op: ReduceOp, given: Sequence[np.dtype[Any]]
    ) -> Callable[[FlatArrays, Fold], Steps] | None:
        """Return what combines one array, or a few large ones, on one node: see `Executor.between`."""
        is_large = layout.count * dtype.itemsize >= DIRECT_FROM_BYTES * (len(layout.offsets) - 1)
        if not self.intra.combines_arrays or {phase.scope for phase in plan.phases} != {Scope.INTRA}:
            return None
        if set(given) != {dtype} or not layout.has_whole_arrays or not (layout.is_one_array or is_large):
            return None
        return None if self.intra.refusal(dtype, op) else self.intra.all_reduce_between

    def _inside(self, verb: Verb, dtype: np.dtype[Any], op: ReduceOp) -> Transport:
        """Return the transport inside the node, or where it does not combine such values one through the host."""
        by_host = self.transports.intra_by_host
        return by_host if by_host and verb in _REDUCING and self.intra.refusal(dtype, op) else self.intra

    def _in_order(self, group: Group, buffer: Array, op: ReduceOp, channel: int, caster: Caster | None) -> Operation:
        """Bind what the host does, between copies of the whole buffer."""
        order = [(rank, 0) for rank in range(group.size)]
        return self.transports.world.around(
            buffer, lambda whole: ordered_all_reduce(group, [whole], order, whole, op, channel, caster)
        )

    def _has_copied_out(self) -> bool:
        with self._device.activate():  # the engine asks too, where it combines arrays of the host
            return self._copied_out is None or self._copied_out.done()

    def _follow(self) -> None:
        """Let the current stream wait for the last copies out; where they are its own, that takes no time."""
        # handles do not tell streams apart: CUDA gives that of one gone to the next, and threads' default ones share one
        if self._copied_out is not None:
            self._device.current_stream().wait(self._copied_out)

    def _note_copied(self) -> Steps:
        self._copied_out = self._device.current_stream().record()
        while self.intra.peers_read and not self._copied_out.done():
            yield WAITING


class _Before:
    """Something to be done before arrays are copied."""

    def __init__(self, act: Callable[[], None], copy: CopySteps) -> None:
        self._act, self._copy = act, copy

    def run(self, arrays: Sequence[Array]) -> Steps:
        self._act()
        return self._copy.run(arrays)


class _After:
    """Steps to be taken after arrays are copied."""

    def __init__(self, copy: CopySteps, steps: Callable[[], Steps]) -> None:
        self._copy, self._steps = copy, steps

    def run(self, arrays: Sequence[Array]) -> Steps:
        yield from self._copy.run(arrays)
        yield from self._steps()
