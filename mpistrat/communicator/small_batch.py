"""What takes one all-reduce over all ranks: an array, or a batch of small ones, from the second call with arrays like these on.

A batch of one bucket with the plan `flat` sends the same bytes either way; these paths spend less time in
Python. So ranks may go different ways, one because its timeline is on, say.
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

SMALL_BATCH_BYTES = 1 << 16  # beyond, copying takes longer than what is saved


class OneArray:
    """An array that is sent as it lies, and summed in its own dtype.

    Parameters
    ----------
    op : ReduceOp
        How to combine.
    num_replicas : int
        Divides the sum, where `op` is MEAN.
    combine : callable
        Combines an array of all replicas: into its second argument, or into a new array where that is None.
    signature : Signature
        Of the call.
    """

    def __init__(
        self, op: ReduceOp, num_replicas: int, combine: Callable[[Array, Array | None], Array], signature: Signature
    ) -> None:
        self._divisor = num_replicas if op is ReduceOp.MEAN else 1
        self.combine, self.signature, self.word = combine, signature, signature.word

    def run(self, arrays: Sequence[Array]) -> list[Array]:
        """Return the one array combined. A collective call."""
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
        Only their shapes and their dtype count.
    bucket : Bucket
        The order in which they are sent, and in how long a message.
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
        self._combine, self.signature, self.word = combine, signature, signature.word
        self._padding = bytes((bucket.bound.flat_count - sum(array.size for array in arrays)) * self._dtype.itemsize)
        self._record = _record([array.shape for array in arrays], self._dtype)
        self._scalars = [index for index, array in enumerate(arrays) if not array.ndim]

    def run(self, arrays: Sequence[Array]) -> list[Array]:
        """Return the arrays combined: views of one new array, apart from each other. A collective call."""
        given = np.frombuffer(_joined(arrays[::-1], self._padding), self._dtype)
        total = self._combine(given.astype(self._sent_dtype) if self._is_cast else given, None)
        if self._divisor > 1:
            divide(total, self._divisor, out=total)
        # the fields of a record come out as views, all in one call
        results = list(np.ndarray((), self._record, total.astype(self._dtype) if self._is_cast else total).item())
        for index in self._scalars:
            results[index] = results[index].reshape(())
        return results


def _joined(arrays: Sequence[Any], padding: bytes) -> bytes:
    """Return the bytes of arrays in C order: for many tiny ones several times as fast as to concatenate them."""
    try:
        return b"".join([*arrays, padding])
    except TypeError:  # one of them is not contiguous
        return b"".join([*map(np.ndarray.tobytes, arrays), padding])


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
