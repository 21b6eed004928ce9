"""Copy in, copy out: one pass over memory that also casts, and divides for MEAN."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpistrat.arrays import Array
from mpistrat.packing.layout import Layout
from mpistrat.reduction import divide

__all__ = ["CopyIn", "CopyOut"]


class CopyIn:
    """Copies arrays into one range of a bucket's buffer.

    Parameters
    ----------
    layout : Layout
        The bucket.
    start, stop : int
        The range, in elements of the bucket.
    buffer : ndarray
        Where it goes; what it has beyond the range is padding, set to zero.
    """

    def __init__(self, layout: Layout, start: int, stop: int, buffer: Array) -> None:
        self._moves = [
            (buffer[piece.offset : piece.offset + piece.stop - piece.start], piece.array, piece.start, piece.stop)
            for piece in layout.pieces(start, stop)
        ]
        self._padding = buffer[stop - start :]

    def run(self, arrays: Sequence[Array]) -> None:
        """Copy from flat `arrays`, casting where the buffer has another dtype."""
        for target, array, start, stop in self._moves:
            np.copyto(target, arrays[array][start:stop], casting="unsafe")
        if self._padding.size:
            self._padding.fill(0)


class CopyOut:
    """Copies parts of a bucket's buffer out to arrays.

    Parameters
    ----------
    layout : Layout
        The bucket.
    start, stop : int
        The range of the bucket that the parts belong to.
    parts : sequence of (first, last, ndarray)
        Where elements [first, last) of the range lie.
    divisor : int
        Divides what is copied; 1 for every operation but MEAN.
    """

    def __init__(
        self, layout: Layout, start: int, stop: int, parts: Sequence[tuple[int, int, Array]], divisor: int
    ) -> None:
        self._divisor = divisor
        self._moves = [
            (source[piece.offset : piece.offset + piece.stop - piece.start], piece.array, piece.start, piece.stop)
            for first, last, source in parts
            for piece in layout.pieces(start + first, min(start + last, stop))
        ]

    def run(self, arrays: Sequence[Array]) -> None:
        """Copy to flat `arrays`, casting where they have another dtype than the buffer."""
        if self._divisor == 1:
            for source, array, start, stop in self._moves:
                np.copyto(arrays[array][start:stop], source, casting="unsafe")
        else:
            for source, array, start, stop in self._moves:
                divide(source, self._divisor, out=arrays[array][start:stop])
