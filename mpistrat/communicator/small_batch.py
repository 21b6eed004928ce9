"""SmallBatch: an all-reduce of small arrays in one message.

It sends the same bytes as the plan `flat` of one bucket, with less Python. So one rank may take it while another, whose
timeline is enabled for instance, runs the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np

from mpistrat.arrays import Array
from mpistrat.communicator.bound_batch import Bucket
from mpistrat.reduction import ReduceOp, accumulation_dtype, divider, quiet

SMALL_BATCH_BYTES = 1 << 16  # in larger batches the copies take longer than the Python that is saved


class SmallBatch:
    """Arrays of certain shapes and one dtype in one message.

    `combine` all-reduces an array, into its second argument, or into a new array where that is None.
    """

    def __init__(
        self,
        op: ReduceOp,
        arrays: Sequence[Array],
        bucket: Bucket,
        divisor: int,
        combine: Callable[[Array, Array | None], Array],
    ) -> None:
        assert bucket.indices == tuple(reversed(range(len(arrays)))), "arrays are packed from the last to the first"
        self._dtype = arrays[0].dtype
        self._sent_dtype = accumulation_dtype(op, self._dtype)
        self._is_cast = self._sent_dtype != self._dtype
        self._divide, self._combine = divider(self._sent_dtype, divisor), combine
        # what is sent: the arrays, then padding
        self._given = np.zeros(bucket.bound.flat_count, self._dtype)
        self._bytes = self._given.view(np.uint8).data[: sum(array.nbytes for array in arrays)]
        self._record = _record([array.shape for array in arrays], self._dtype)
        self._scalars = [index for index, array in enumerate(arrays) if not array.ndim]

    def run(self, arrays: Sequence[Array], out: Sequence[Array] | None = None) -> list[Array]:
        """All-reduce the arrays, into `out` or to disjoint views of one new array. A collective call."""
        self._bytes[:] = _joined(arrays[::-1])
        total = self._combine(self._given.astype(self._sent_dtype) if self._is_cast else self._given, None)
        if self._divide is not None:
            self._divide(total)
        if self._is_cast:
            total = quiet()(total.astype, self._dtype)
        # item() returns the fields of a record as views, all in one call
        results: list[Any] = list(np.ndarray((), self._record, total).item())
        for index in self._scalars:
            results[index] = results[index].reshape(())
        if out is None:
            return results
        for target, result in zip(out, results, strict=True):
            target[...] = result
        return list(out)


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
