"""Fast paths of one all-reduce over all ranks: for one array, and for a batch of small arrays.

They send the same bytes as the plan `flat` of one bucket, with less Python. So one rank may take a fast path while another,
whose timeline is enabled for instance, runs the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np

from mpistrat.arrays import Array
from mpistrat.communicator.bound_batch import Bucket
from mpistrat.groups.agreement import Signature
from mpistrat.reduction import ReduceOp, accumulation_dtype, divide

__all__ = ["SMALL_BATCH_BYTES", "OneArray", "SmallBatch"]

SMALL_BATCH_BYTES = 1 << 16  # in larger batches the copies take longer than the Python that is saved


class OneArray:
    """One array, sent without a copy and reduced in its own dtype.

    Parameters
    ----------
    op : ReduceOp
        How to combine.
    num_replicas : int
        Divisor of MEAN.
    combine : callable
        All-reduces an array, into its second argument, or into a new array where that is None.
    signature : Signature
        Of the call.
    """

    def __init__(
        self, op: ReduceOp, num_replicas: int, combine: Callable[[Array, Array | None], Array], signature: Signature
    ) -> None:
        self._divisor = num_replicas if op is ReduceOp.MEAN else 1
        self.combine, self.signature, self.digest = combine, signature, signature.digest

    def run(self, arrays: Sequence[Array]) -> list[Array]:
        """All-reduce the one array. A collective call."""
        target = self.combine(arrays[0], None)
        if self._divisor > 1:
            divide(target, self._divisor, out=target)
        return [target]


class SmallBatch:
    """Arrays of certain shapes and one dtype in one message.

    Parameters
    ----------
    op : ReduceOp
        How to combine.
    arrays : sequence of ndarray
        Only their shapes and their dtype are used.
    bucket : Bucket
        The order of the arrays in the message, and its length.
    num_replicas, combine, signature : int, callable, Signature
        As for `OneArray`.
    """

    def __init__(
        self,
        op: ReduceOp,
        arrays: Sequence[Array],
        bucket: Bucket,
        num_replicas: int,
        combine: Callable[[Array, Array | None], Array],
        signature: Signature,
    ) -> None:
        assert bucket.indices == tuple(reversed(range(len(arrays)))), "arrays are packed from the last to the first"
        self._dtype = arrays[0].dtype
        self._sent_dtype = accumulation_dtype(op, self._dtype)
        self._is_cast = self._sent_dtype != self._dtype
        self._divisor = num_replicas if op is ReduceOp.MEAN else 1
        self._combine, self.signature, self.digest = combine, signature, signature.digest
        # what is sent: the arrays, then padding
        self._given = np.zeros(bucket.bound.flat_count, self._dtype)
        self._bytes = self._given.view(np.uint8).data[: sum(array.nbytes for array in arrays)]
        self._record = _record([array.shape for array in arrays], self._dtype)
        self._scalars = [index for index, array in enumerate(arrays) if not array.ndim]

    def run(self, arrays: Sequence[Array]) -> list[Array]:
        """All-reduce the arrays; results are disjoint views of one new array. A collective call."""
        self._bytes[:] = _joined(arrays[::-1])
        total = self._combine(self._given.astype(self._sent_dtype) if self._is_cast else self._given, None)
        if self._divisor > 1:
            divide(total, self._divisor, out=total)
        # item() returns the fields of a record as views, all in one call
        results: list[Any] = list(np.ndarray((), self._record, total.astype(self._dtype) if self._is_cast else total).item())
        for index in self._scalars:
            results[index] = results[index].reshape(())
        return results


def _joined(arrays: Sequence[Any]) -> bytes:
    """Return the bytes of arrays in C order; several times as fast as `numpy.concatenate` for many tiny arrays."""
    try:
        return b"".join(arrays)
    except TypeError:  # one of them is not contiguous
        return b"".join(map(np.ndarray.tobytes, arrays))


def _record(shapes: Sequence[tuple[int, ...]], dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of a record with an array of each shape, the last one first in memory; scalars have one axis."""
    sizes = [prod(shape) * dtype.itemsize for shape in reversed(shapes)]
    starts = list(accumulate(sizes, initial=0))
    return np.dtype(
        {
            "names": [f"array {index}" for index in range(len(shapes))],
            "formats": [(dtype, shape or (1,)) for shape in shapes],
            "offsets": starts[-2::-1],
            "itemsize": starts[-1],
        }
    )
