"""Copy arrays into a bucket's buffer and out of it: one pass over memory that also casts, and divides for MEAN.

Both copies are steps (`mpistrat.steps`): they yield after each segment of at most SEGMENT_BYTES, or several small ones, so that
the caller can advance messages in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mpistrat.arrays import Array
from mpistrat.packing.layout import Layout
from mpistrat.reduction import ReduceOp, combine, divide_quietly

SEGMENT_BYTES, GROUP_BYTES = 1 << 18, 1 << 16

_Piece = tuple[int, Any, slice]
"""Part of an array: the index of the array, what of it, and where that lies in the bucket."""


class CopyIn:
    """Copies arrays into `buffer`, a range of a bucket; what lies beyond it is padding, and set to zero."""

    def __init__(self, layout: Layout, buffer: Array) -> None:
        groups = _groups(layout, 0, layout.count, buffer.itemsize)
        self._moves = [[(buffer[place], array, part) for array, part, place in group] for group in groups]
        self._padding = buffer[layout.count :]

    def run(self, arrays: Sequence[Array]) -> Iterator[bool]:
        """Copy from flat `arrays`, casting where the buffer has another dtype."""
        for group in self._moves:
            for target, array, part in group:
                target[...] = arrays[array][part]
            yield True
        if self._padding.size:
            self._padding.fill(0)


class CopyOut:
    """Copies parts of a range of a bucket out to arrays, divided by `divisor`.

    A part ``(first, last, addends)`` says that elements [first, last) of the range are the addends, combined in this order.
    Small arrays that lie side by side are combined and divided together, apart from the addends, which peers may read.
    """

    def __init__(self, layout: Layout, parts: Sequence[tuple[int, int, tuple[Array, ...]]], op: ReduceOp, divisor: int) -> None:
        self._fold = combine(op)
        self._divisor = divisor
        self._moves: list[tuple[list[Array], Array, list[tuple[Array, int, Any]]]] = []
        for first, last, addends in parts:
            apart = np.empty(min(GROUP_BYTES // addends[0].itemsize, last - first), addends[0].dtype)
            for group in _groups(layout, first, min(last, layout.count), addends[0].itemsize):
                begin, end = group[0][2].start, group[-1][2].stop
                total = apart[: end - begin]
                pieces = [(total[place.start - begin : place.stop - begin], array, part) for array, part, place in group]
                self._moves.append(([addend[begin:end] for addend in addends], total, pieces))

    def run(self, arrays: Sequence[Array]) -> Iterator[bool]:
        """Copy to flat `arrays`, casting where they have another dtype than the buffer."""
        for addends, total, pieces in self._moves:
            if len(pieces) == 1:
                [(_, array, part)] = pieces
                total = arrays[array][part]
            source = addends[0] if len(addends) == 1 else self._folded(addends, total)
            divide_quietly(source, self._divisor, total)
            if len(pieces) > 1:
                for piece, array, part in pieces:
                    arrays[array][part] = piece
            yield True

    def _folded(self, addends: Sequence[Array], target: Array) -> Array:
        """Return the addends combined: in the target, unless it has another dtype."""
        total = target if target.dtype == addends[0].dtype else np.empty_like(addends[0])
        self._fold(addends[0], addends[1], out=total)
        for addend in addends[2:]:
            self._fold(total, addend, out=total)
        return total


def _groups(layout: Layout, start: int, stop: int, itemsize: int) -> list[list[_Piece]]:
    """Return the segments in a range of a bucket: small ones together, each a part of an array, or all of it."""
    groups: list[list[_Piece]] = []
    for segment in layout.segments(start, stop, SEGMENT_BYTES // itemsize):
        array, count = segment.array, segment.stop - segment.start
        is_whole, end = count == layout.offsets[array + 1] - layout.offsets[array], segment.offset + count
        if not groups or (end - groups[-1][0][2].start) * itemsize > GROUP_BYTES:
            groups.append([])
        part = ... if is_whole else slice(segment.start, segment.stop)
        groups[-1].append((array, part, slice(segment.offset, end)))
    return groups
