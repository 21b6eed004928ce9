"""DeviceExecutor: runs plans on GPU memory.

Invariant: arrays are copied on the caller's current stream, and transports order their work after it. At the end of a plan all
work is ordered on that stream; the host does not wait for the GPU, unless peers read this rank's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from mpistrat.algorithms.plan import Plan, Scope, Verb
from mpistrat.arrays import Array
from mpistrat.device.cuda import Device, DeviceArray, Event, address
from mpistrat.device.kernels import divide_kernel
from mpistrat.execution.executor import BucketSpec, CopySteps, Direct, Dtypes, Executor
from mpistrat.execution.select import DeviceTransports, device_transports, nccl_rails
from mpistrat.groups.agreement import Agreement
from mpistrat.groups.deadline_barrier import AbortNotice
from mpistrat.groups.group import Group
from mpistrat.packing import DeviceCopyIn, DeviceCopyOut, Layout
from mpistrat.reduction import ReduceOp
from mpistrat.steps import WAITING, Steps, until
from mpistrat.transports.base import DeviceTransport, Operation, Part, Transport, Watched, in_turn
from mpistrat.transports.nccl import NcclTransport
from mpistrat.transports.nccl_bindings import nccl_refusal
from mpistrat.transports.pairwise import ordered_all_reduce

DIRECT_FROM_BYTES = 1 << 20  # per array: smaller ones are packed faster than one operation each is launched

_REDUCING = (Verb.ALL_REDUCE, Verb.REDUCE_SCATTER)


class DeviceExecutor(Executor):
    """Binds plans to transports of device memory. Making one is a collective call.

    A plan that uses NCCL begins with a barrier: in the shared memory of the node, or by messages, where ranks that NCCL joins
    share none (`compares_by_messages`). Where it `enqueues`, plans end when their work has been enqueued, unless that is timed.
    """

    device: Device
    intra: DeviceTransport
    transports: DeviceTransports

    def __init__(self, host: Executor, device: Device) -> None:
        super().__init__(host.hierarchy, device_transports(host.hierarchy, device, host.transports))
        self.device, self.timeline = device, host.timeline
        # ranks compare calls in host memory
        self._compares_inside, self._window = host._compares_inside, host._window
        self._agreement = Agreement(host.hierarchy.world_group)
        self._agreement.rows = host.world.rows
        self._copied_out: Event | None = None
        self._notice = AbortNotice(host.hierarchy.world_group)
        self._nccl_rails: Mapping[int, NcclTransport] = {}
        self.enqueues = self.transports.everywhere is not None
        self.compares_by_messages = self.enqueues and (host.hierarchy.world.num_nodes > 1 or host.intra.window is None)
        self._watch()

    def max_in_flight(self, depth: int) -> int:
        """Return how many of `depth` chunks may be in flight between nodes: one if rails have no channels.

        Chunks are copied to the host first, and the order in which several copies complete differs between ranks.
        """
        return depth if self.transports.has_channels else 1

    def copy_in(self, layout: Layout, buffer: Array, dtypes: Dtypes) -> CopySteps:
        """Return what copies arrays of these dtypes into a range of a bucket, after earlier copies out of it."""
        copy = DeviceCopyIn(self.device, layout, buffer, dtypes)

        def run(arrays: Sequence[Array]) -> Steps:
            self._follow()
            yield from copy.run(arrays)

        return run

    def copy_out(self, layout: Layout, parts: Sequence[Part], buffer: Array, op: ReduceOp, dtypes: Dtypes) -> CopySteps:
        """Return what copies a range of a bucket out to arrays, and waits for it if peers read memory by themselves."""
        assert all(len(part.addends) == 1 for part in parts), "transports of device memory leave no addends to fold"
        sources = [(part.start, part.stop, part.addends[0]) for part in parts] or [(0, buffer.size, buffer)]
        copy = DeviceCopyOut(self.device, layout, sources, self.divisor(op), dtypes)

        def run(arrays: Sequence[Array]) -> Steps:
            yield from copy.run(arrays)
            self._copied_out = self.device.current_stream().record(self._copied_out)
            while self.intra.peers_read and not self._copied_out.done():
                yield WAITING

        return run

    def shares_memory(self, array: Array, buffer: Array) -> bool:
        return address(buffer) <= address(array) < address(buffer) + buffer.nbytes

    def adds_in_order(self, dtype: np.dtype[Any], op: ReduceOp) -> bool:
        # a product of complex numbers may be rounded once on a GPU where NumPy rounds twice
        return self.intra.adds_in_order and not (dtype.kind == "c" and op is ReduceOp.PROD)

    def orders(self, dtype: np.dtype[Any], op: ReduceOp) -> bool:
        """Return whether GPUs combine in the order of the ranks what NCCL, which joins all of them, does not combine."""
        nccl = self.transports.everywhere
        return nccl is not None and bool(nccl.refusal(dtype, op)) and self.adds_in_order(dtype, op)

    def nccl_refusal(self, dtype: np.dtype[Any], op: ReduceOp) -> str:
        """Return why NCCL is not used on some nodes or cannot combine these values, or an empty text: the same on all ranks."""
        return self.transports.lacks_nccl or nccl_refusal(dtype, op)

    def path_of(self, plan: Plan, dtype: np.dtype[Any], op: ReduceOp) -> str:
        """Return the transports of all ranks, and why not faster ones, as text."""
        return str(self.transports)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned host memory through which device memory is staged."""
        transports = self.transports
        every = transports.world_by_host, transports.intra, transports.intra_by_host, *transports.rails.values()
        return sum(transport.pinned_bytes for transport in every)

    def abort(self, reason: str) -> None:
        """Abort NCCL's operations, whose kernels would wait forever for peers. The peers must abort theirs too."""
        self._notice.send()
        for transport in self._on_gpus:
            transport.abort(reason)

    @property
    def _on_gpus(self) -> Sequence[DeviceTransport]:
        """The transports that enqueue kernels which wait for peers, in the order in which they are disposed of."""
        every = (self.transports.everywhere, *self._nccl_rails.values(), self.intra)
        return tuple(dict.fromkeys(filter(None, every)))

    def raise_failure(self, grace_seconds: float = 0.0) -> None:
        """Raise TransportError if what was enqueued has been aborted: see `DeviceTransport.raise_failure`."""
        for transport in self._on_gpus:
            transport.raise_failure(grace_seconds)

    def settle(self) -> Steps:
        """Wait until all that was enqueued has ended."""
        for transport in self._on_gpus:
            yield from transport.settle()
        yield from until(self._has_copied_out)

    def close(self) -> None:
        """Free the scratch memory and the transports, once all that was enqueued has ended. A collective call."""
        self.hierarchy.call.drive(self.settle())
        for bound in self.bound_plans:
            bound.unbind()  # memory of peers must not be mapped any more when they free it
        self._arena = np.empty(0, np.uint8)
        for transport in (*self._on_gpus, *self.rails.values()):
            transport.dispose()

    def adapt(self, plan: Plan, pack: BucketSpec) -> Plan:
        """Return a plan as it runs here: NCCL combines one array where it lies, or a few large ones: see `Executor.adapt`."""
        layout, dtype, op = pack.layout, pack.dtype, pack.op
        is_large = layout.count * dtype.itemsize >= DIRECT_FROM_BYTES * (len(layout.offsets) - 1)
        has_whole_arrays = layout.count == layout.offsets[-1]
        are_alike = set(pack.dtypes) == {dtype} and has_whole_arrays and (layout.is_one_array or is_large)
        if plan.in_order or not are_alike or plan.scopes not in ({Scope.INTRA}, {Scope.WORLD}):
            return plan
        transport, [scope] = self._direct(plan, dtype, op), plan.scopes
        serves = transport.combines_arrays and not transport.refusal(dtype, op)
        return plan.in_one_phase(scope, is_direct=True) if serves else plan

    def bind_direct(self, plan: Plan, pack: BucketSpec) -> Direct:
        if pack.op is ReduceOp.MEAN:
            self.device.prepare(divide_kernel(pack.dtype))
        return self._direct(plan, pack.dtype, pack.op).all_reduce_arrays

    def _direct(self, plan: Plan, dtype: np.dtype[Any], op: ReduceOp) -> Transport:
        return self.intra if plan.scopes == {Scope.INTRA} else self._over_all(dtype, op)

    def barrier(self) -> Steps:
        """Wait until all ranks that NCCL joins have entered and have their memory, and compare their calls.

        NCCL is called afterwards: it compares nothing, and its kernels wait for all ranks.
        """
        if not self.compares_by_messages:
            return super().barrier()
        return chain(super().barrier(), self._agreement.barrier(self.hierarchy.call.digest))

    def begins_with_barrier(self, plan: Plan) -> bool:
        return not self.compares_by_messages and super().begins_with_barrier(plan)

    def detects_mismatch(self, plan: Plan) -> bool:
        return self.compares_by_messages or super().detects_mismatch(plan)

    def _inside(self, verb: Verb, dtype: np.dtype[Any], op: ReduceOp) -> Transport:
        """Return the transport inside the node, or one through the host if that does not combine such values."""
        by_host = self.transports.intra_by_host
        return by_host if verb in _REDUCING and self.intra.refusal(dtype, op) else self.intra

    def _over_all(self, dtype: np.dtype[Any], op: ReduceOp) -> Transport:
        """Return the transport over all ranks: NCCL, or one through the host if such values need that."""
        nccl = self.transports.everywhere
        return self.transports.world_by_host if nccl is None or nccl.refusal(dtype, op) else nccl

    def _rail(self, shard: int, part: Array, op: ReduceOp) -> Transport:
        """Return the transport along a rail: NCCL, if it joins all ranks and combines such values."""
        nccl = self.transports.everywhere
        if nccl is None or nccl.refusal(part.dtype, op):
            return super()._rail(shard, part, op)
        if not self._nccl_rails:  # made when all ranks bind the first plan along rails
            self._nccl_rails = nccl_rails(self.hierarchy, self.device, nccl)
            self._watch()
        return self._nccl_rails[shard]

    def _watch(self) -> None:
        """From now on operations return when they are enqueued."""
        call, timeline, notice = self.hierarchy.call, self.timeline, self._notice
        watched = Watched(lambda: timeline.enabled, lambda: call.ends, notice.has_come, notice.send, lambda: call.has_failed)
        for transport in self._on_gpus if self.enqueues else ():
            transport.watch(watched)

    def _in_order(self, group: Group, buffer: Array, op: ReduceOp, channel: int, wire: np.dtype[Any] | None) -> Operation:
        """Bind an ordered all-reduce: by NCCL where that joins all ranks, else in host memory, between copies of the buffer.

        Casts are made on the GPU.
        """
        nccl = self.transports.everywhere
        if nccl is not None and wire is None and group is self.hierarchy.world_group and self.adds_in_order(buffer.dtype, op):
            return nccl.all_reduce_in_order(buffer, op)

        def through_host(whole: Array) -> Operation:
            return self.transports.world_by_host.via_host(whole, lambda copy: ordered_all_reduce(group, copy, op, channel))

        return through_host(buffer) if wire is None else _cast_on_device(self.device, buffer, wire, through_host)

    def _has_copied_out(self) -> bool:
        with self.device.activate():  # the engine asks too, where it combines arrays of the host
            return self._copied_out is None or self._copied_out.done()

    def _follow(self) -> None:
        """Make the current stream wait for the last copies out; that costs nothing on the stream that made them."""
        # the handle cannot tell whether it is that stream: CUDA reuses handles, and the default streams of threads share one
        if self._copied_out is not None:
            self.device.current_stream().wait(self._copied_out)


def _cast_on_device(device: Device, buffer: DeviceArray, dtype: np.dtype[Any], bind: Callable[[Any], Operation]) -> Operation:
    """Bind an operation to memory of a narrower dtype, into which a kernel casts a buffer before, and back afterwards."""
    layout, narrow = Layout([buffer.size]), device.allocate(buffer.size * dtype.itemsize).view(dtype)
    pack = DeviceCopyIn(device, layout, narrow, [buffer.dtype])
    unpack = DeviceCopyOut(device, layout, [(0, buffer.size, narrow)], 1, [buffer.dtype])
    operation = bind(narrow)
    acts = partial(pack.run, [buffer]), operation.run, partial(unpack.run, [buffer])
    return in_turn([Part(0, buffer.size, (buffer,))], *acts, scratch_bytes=narrow.nbytes + operation.scratch_bytes)
