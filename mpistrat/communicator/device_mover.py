"""DeviceMover: arrays on GPUs are moved between ranks by NCCL, without passing through host memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpistrat.arrays import Array, as_bytes
from mpistrat.communicator.gpu_arrays import GpuArrays
from mpistrat.transports.nccl import NcclTransport
from mpistrat.transports.steps import Steps
from mpistrat.transports.window import NodeWindow


class DeviceMover:
    """Moves arrays between the ranks of a group, each with a GPU, as bytes.

    Invariant: NCCL is called after a barrier, when every rank has its memory: its kernels wait for all ranks.
    """

    def __init__(self, window: NodeWindow | None, gpu: GpuArrays, nccl: NcclTransport) -> None:
        self._window, self._gpu, self._nccl = window, gpu, nccl

    def fetch(self, array: Array) -> Array:
        """Return an array where it can be moved: where it is."""
        return array

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[np.generic], out: Array | None = None) -> Array:
        """Return memory for a result: `out`, if there is one."""
        if out is not None:
            return out
        made: Array = self._gpu.device.array_module.empty(shape, dtype)
        return made

    def all_gather(self, whole: Array, bounds: Sequence[int]) -> Steps:
        """Return the steps that give every rank bytes ``bounds[r]:bounds[r + 1]`` of each rank r."""
        return self._together(self._nccl.all_gather(as_bytes(whole), bounds).run())

    def broadcast(self, array: Array, root: int) -> Steps:
        """Return the steps that give every rank the array of `root`."""
        return self._together(self._nccl.broadcast(as_bytes(array), root).run())

    def exchange(self, sends: Sequence[Array], receives: Sequence[Array]) -> Steps:
        """Return the steps that send an array to each peer, and receive one from each; empty ones are not sent."""
        return self._together(self._nccl.exchange(sends, receives))

    def _together(self, steps: Steps) -> Steps:
        return self._gpu.abort_on_error(self._after_barrier(steps))

    def _after_barrier(self, steps: Steps) -> Steps:
        yield from self._gpu.barrier() if self._window is None else self._window.barrier()
        yield from steps
