"""Copy arrays into a bucket's buffer and out of it: one pass over memory that also casts, and divides for MEAN.

Both copies are steps (`mpistrat.steps`): they yield after each segment of at most SEGMENT_BYTES, so that the caller can
advance messages in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from mpistrat.arrays import Array
from mpistrat.packing.layout import Layout
from mpistrat.reduction import ReduceOp, combine, divide_quietly

SEGMENT_BYTES = 1 << 18


class CopyIn:
    """Copies arrays into `buffer`, the range [start, stop) of a bucket; what lies beyond it is padding, and set to zero."""

    def __init__(self, layout: Layout, start: int, stop: int, buffer: Array) -> None:
        self._moves = [
            (buffer[segment.offset : segment.offset + segment.stop - segment.start], segment.array, segment.start, segment.stop)
            for segment in layout.segments(start, stop, SEGMENT_BYTES // buffer.itemsize)
        ]
        self._padding = buffer[stop - start :]

    def run(self, arrays: Sequence[Array]) -> Iterator[bool]:
        """Copy from flat `arrays`, casting where the buffer has another dtype."""
        for target, array, start, stop in self._moves:
            target[...] = arrays[array][start:stop]
            yield True
        if self._padding.size:
            self._padding.fill(0)


class CopyOut:
    """Copies parts of a range of a bucket out to arrays, divided by `divisor`.

    A part ``(first, last, addends)`` says that elements [first, last) of the range are the addends, combined in this order.
    """

    def __init__(
        self,
        layout: Layout,
        start: int,
        stop: int,
        parts: Sequence[tuple[int, int, tuple[Array, ...]]],
        op: ReduceOp,
        divisor: int,
    ) -> None:
        self._fold = combine(op)
        self._divisor = divisor
        self._moves = [
            (
                [addend[segment.offset : segment.offset + segment.stop - segment.start] for addend in addends],
                segment.array,
                segment.start,
                segment.stop,
            )
            for first, last, addends in parts
            for segment in layout.segments(start + first, min(start + last, stop), SEGMENT_BYTES // addends[0].itemsize)
        ]

    def run(self, arrays: Sequence[Array]) -> Iterator[bool]:
        """Copy to flat `arrays`, casting where they have another dtype than the buffer."""
        for addends, array, start, stop in self._moves:
            target = arrays[array][start:stop]
            source = addends[0] if len(addends) == 1 else self._folded(addends, target)
            divide_quietly(source, self._divisor, target)
            yield True

    def _folded(self, addends: Sequence[Array], target: Array) -> Array:
        """Return the addends combined: in the target, unless it has another dtype."""
        total = target if target.dtype == addends[0].dtype else np.empty_like(addends[0])
        self._fold(addends[0], addends[1], out=total)
        for addend in addends[2:]:
            self._fold(total, addend, out=total)
        return total
