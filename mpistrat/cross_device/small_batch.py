"""SmallBatch: a few small arrays through one call of MPI, for programs that reduce little and often.

A batch that takes a recipe of one bucket and the plan `flat` sends the same bytes either way; this one spends less time in
Python. So ranks may go different ways, one because its timeline is on, say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from mpistrat.arrays import Array
from mpistrat.cross_device.recipe import Bucket
from mpistrat.reduction import ReduceOp, accumulation_dtype, divide

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["SMALL_BATCH_BYTES", "SmallBatch"]

SMALL_BATCH_BYTES = 1 << 16  # beyond, copying takes longer than what is saved


class SmallBatch:
    """The places in a buffer of arrays of certain shapes and one dtype.

    Parameters
    ----------
    op : ReduceOp
        How to combine.
    arrays : sequence of ndarray
        Only their shapes and their dtype count.
    bucket : Bucket
        The order in which they lie in the buffer, and how long that is.
    num_replicas : int
        Divides the sum, where `op` is MEAN.
    native : MPI.Op
        What MPI calls the operation.
    allreduce : callable
        ``MPI_Allreduce`` of the communicator of all replicas.
    """

    def __init__(
        self,
        op: ReduceOp,
        arrays: Sequence[Array],
        bucket: Bucket,
        num_replicas: int,
        native: MPI.Op,
        allreduce: Callable[..., None],
    ) -> None:
        from mpi4py import MPI

        self._dtype = arrays[0].dtype
        self._sent_dtype = accumulation_dtype(op, self._dtype)
        self._divisor = num_replicas if op is ReduceOp.MEAN else 1
        self._native, self._allreduce, self._in_place = native, allreduce, MPI.IN_PLACE
        self._indices = bucket.indices
        starts, count = [0] * len(arrays), 0
        for index in bucket.indices:
            starts[index], count = count, count + arrays[index].size
        self._padding = np.zeros(bucket.bound.flat_count - count, self._dtype)
        self._places = [(start, start + prod(array.shape), array.shape) for start, array in zip(starts, arrays, strict=True)]

    def run(self, arrays: Sequence[Array]) -> list[Array]:
        """Return the arrays combined: views of one new array. A collective call."""
        given = [arrays[index].reshape(-1) for index in self._indices]
        total = np.concatenate([*given, self._padding], dtype=self._sent_dtype)
        self._allreduce(self._in_place, total, self._native)
        if self._divisor > 1:
            divide(total, self._divisor, out=total)
        if total.dtype != self._dtype:
            total = total.astype(self._dtype)
        return [total[start:stop].reshape(shape) for start, stop, shape in self._places]
