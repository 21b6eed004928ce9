"""cuda_ipc: device memory of the GPUs of one node, mapped into every process; peers are read where they lie.

As `shared_memory`, in GPU memory: every rank has one arena, buffers lie at equal offsets in all of them, a
reduce-scatter lets one kernel of each rank sum its part over the arenas of all, and the parts of an all-gather or broadcast
are the owners' memory. It works without NCCL, also where several ranks share a GPU.

An all-reduce is both: each rank sums its part, and reads those of the others when all have. The sum of rank k begins with the
arena of rank k + 1, then that of rank k + 2, and so on, so that ranks read different GPUs at a time.

Invariant: no kernel waits for another process. A rank announces that its memory is ready after the host has seen the event
of what wrote it, so that neither time slicing nor a peer that died holds up a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpistrat.device.cuda import Device, DeviceArray, address
from mpistrat.device.kernels import PACKET_BYTES, fold_kernel, num_blocks
from mpistrat.errors import MpistratError, TransportError
from mpistrat.groups.agreement import gather_or_raise
from mpistrat.groups.group import Group
from mpistrat.reduction import ReduceOp
from mpistrat.steps import Steps, until
from mpistrat.transports.base import DeviceTransport, Operation, Part, in_turn
from mpistrat.transports.shared_memory import ArenaTransport
from mpistrat.transports.window import NodeWindow

SHARED_BLOCK_BYTES = 1 << 21  # CUDA shares whole blocks of this size, and smaller allocations lie in one together


class CudaIpcTransport(ArenaTransport, DeviceTransport):
    """The verbs over mapped memory. They work only on memory that `allocate` returned."""

    name = "cuda_ipc"
    combines_halves = True

    def __init__(self, group: Group, device: Device | None = None) -> None:
        super().__init__(group, device)
        self.peers_read = group.size > 1
        self._sync_window = NodeWindow(group)
        self._arenas: list[DeviceArray] = []
        self._own: DeviceArray = None
        self._table: DeviceArray = None

    def allocate(self, nbytes: int) -> DeviceArray:
        """Return this rank's arena; every rank asks for the same size, once until `close`.

        Raises TransportError on all ranks, if one of them has no memory, or cannot map the arena of another.
        """
        assert not self._arenas, "allocate was called twice without close"
        whole_blocks = -(-max(nbytes, 1) // SHARED_BLOCK_BYTES) * SHARED_BLOCK_BYTES

        def export() -> bytes:
            self._stream, self._own = self.device.stream(), self.device.allocate(whole_blocks)
            self._table = self.device.allocate(8 * self.group.size)
            return self.device.export(self._own)

        def map_peers() -> None:  # `close` must be able to unmap what has been mapped if this fails
            for rank, handle in enumerate(handles):
                self._arenas.append(self._own if rank == self.group.rank else self.device.map(handle, nbytes))
            self.device.put(self._table, np.array(list(map(address, self._arenas)), np.uint64).view(np.uint8))

        try:
            handles = gather_or_raise(self.group, export)
            gather_or_raise(self.group, map_peers)
        except MpistratError as error:
            self.close()
            raise TransportError(f"{self.group.name}: {error}") from error
        return self._own[:nbytes]

    def all_reduce(self, buffer: DeviceArray, op: ReduceOp, channel: int = 0) -> Operation:
        """Bind a reduce-scatter, followed by an all-gather, whose parts are the owners' memory."""
        return self._all_reduce(buffer, op, (self.group.rank + 1) % self.group.size)

    def all_reduce_in_order(self, buffer: DeviceArray, op: ReduceOp) -> Operation:
        """Bind the same; all sums begin with the arena of rank 0."""
        return self._all_reduce(buffer, op, 0)

    def reduce_scatter(self, buffer: DeviceArray, bounds: Sequence[int], op: ReduceOp) -> Operation:
        """Bind: wait for all, then sum this rank's part over all arenas in one pass."""
        return self._scatter(buffer, bounds, op, (self.group.rank + 1) % self.group.size)

    def close(self) -> None:
        """Unmap the peers' arenas, and free this rank's once nobody has it mapped."""
        self._arenas, self._table = [], None
        self.group.comm.Barrier()
        self._own = None

    def _all_reduce(self, buffer: DeviceArray, op: ReduceOp, first_peer: int) -> Operation:
        bounds = _even_bounds(buffer, self.group.size)
        gathered = self.all_gather(buffer, bounds)
        return in_turn(gathered.parts, self._scatter(buffer, bounds, op, first_peer).run, gathered.run)

    def _scatter(self, buffer: DeviceArray, bounds: Sequence[int], op: ReduceOp, first_peer: int) -> Operation:
        """Bind: wait for all, then sum this rank's part over all arenas, from that of a rank on."""
        start, stop = bounds[self.group.rank : self.group.rank + 2]
        kernel, count, own = fold_kernel(buffer.dtype, op), stop - start, buffer[start:stop]
        peers = address(self._table), np.int32(self.group.size), self._offset(buffer) + start * buffer.dtype.itemsize
        arguments = *peers, address(own), count, np.int32(first_peer)
        self.device.prepare(kernel)

        def run() -> Steps:
            yield from self._barrier()
            if not count:
                return
            self._stream.wait(self.device.current_stream().record())
            self._stream.launch(kernel, num_blocks(count, buffer.dtype.itemsize), arguments)
            yield from until(self._stream.record().done)

        return Operation(run, [Part(start, stop, (own,))])

    def _barrier(self) -> Steps:
        yield from until(self.device.current_stream().record().done)
        yield from self._sync_window.barrier()


def _even_bounds(buffer: DeviceArray, parts: int) -> list[int]:
    """Return bounds of equal parts that begin where packets do; the last ones may be shorter, or empty."""
    per_packet = max(1, PACKET_BYTES // buffer.dtype.itemsize)
    length = -(-buffer.size // (parts * per_packet)) * per_packet
    return [min(index * length, buffer.size) for index in range(parts + 1)]
