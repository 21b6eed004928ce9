"""A reduce-scatter of arrays on GPUs: NCCL combines the arrays of the caller, and writes each rank's part where it goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat.algorithms.reduce_scatter import ScatterPlan
from mpistrat.arrays import Array
from mpistrat.device.kernels import divide_kernel
from mpistrat.execution.device_executor import DeviceExecutor
from mpistrat.reduction import Fold, ReduceOp
from mpistrat.transports.nccl import NcclTransport
from mpistrat.transports.steps import Steps

__all__ = ["DeviceScatter"]


class DeviceScatter:
    """A plan of a reduce-scatter that NCCL carries out by itself.

    Parameters
    ----------
    executor : DeviceExecutor
        Of the ranks.
    nccl : NcclTransport
        Over all of them.
    plan, dtype, op : ScatterPlan, dtype, ReduceOp
        As for `BoundScatter`: one chunk.

    Attributes
    ----------
    flat_count, scratch_bytes : int
        0: it is not an all-reduce of MPI, and holds no memory.
    begins_with_barrier : bool
        False: a barrier of the node in shared memory comes before it.
    """

    flat_count, scratch_bytes, begins_with_barrier = 0, 0, False

    def __init__(
        self, executor: DeviceExecutor, nccl: NcclTransport, plan: ScatterPlan, dtype: np.dtype[Any], op: ReduceOp
    ) -> None:
        self.plan, self._executor, self._nccl = plan, executor, nccl
        self._fold = Fold(op, dtype, plan.world.size if op is ReduceOp.MEAN else 1)
        if op is ReduceOp.MEAN:
            executor.device.prepare(divide_kernel(dtype))

    @property
    def generation(self) -> int:
        """Always the present one: no scratch memory of the executor is bound."""
        return self._executor.generation

    @property
    def is_compared(self) -> bool:
        """Whether ranks in another call cannot take part: see `Executor.is_compared`."""
        return self._executor.is_compared(self.plan.phases)

    def run(self, sources: Sequence[Array], targets: Sequence[Array]) -> Steps:
        """Return the steps that combine one source, and write this rank's part to one target. A collective call.

        Both are C-contiguous, of the dtype that was bound, and share no memory.
        """
        return self._nccl.scatter_between(sources[0].reshape(-1), self.plan.bounds, targets[0].reshape(-1), self._fold)
