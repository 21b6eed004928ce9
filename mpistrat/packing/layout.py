"""Where each array lies in a bucket's buffer. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

__all__ = ["Layout", "Piece"]


@dataclass(frozen=True)
class Piece:
    """Elements of one array that lie together in a range of the buffer.

    Attributes
    ----------
    array : int
        Index of the array in the bucket.
    start, stop : int
        Its elements, counted in the array.
    offset : int
        Where they begin, counted from the beginning of the range.
    """

    array: int
    start: int
    stop: int
    offset: int


class Layout:
    """Arrays laid one behind the other, or a range of them.

    Parameters
    ----------
    counts : sequence of int
        Elements of each array.
    first : int
        Where the range begins, in elements of all arrays.
    count : int, optional
        Elements of the range; all that follow by default.
    """

    def __init__(self, counts: Sequence[int], first: int = 0, count: int | None = None) -> None:
        self.offsets = [0, *accumulate(counts)]
        self.first = first
        self.count = self.offsets[-1] - first if count is None else count

    @property
    def is_one_array(self) -> bool:
        """Whether the range is all of a single array."""
        return len(self.offsets) == 2 and self.count == self.offsets[-1]

    @property
    def has_whole_arrays(self) -> bool:
        """Whether the range is all of every array."""
        return self.first == 0 and self.count == self.offsets[-1]

    def pieces(self, start: int, stop: int, longest: int) -> list[Piece]:
        """Return what lies in elements [start, stop) of the buffer, in order, as pieces of at most `longest` elements."""
        found: list[Piece] = []
        start, stop = start + self.first, stop + self.first
        array = max(0, bisect_right(self.offsets, start) - 1)
        while array < len(self.offsets) - 1 and self.offsets[array] < stop:
            origin = self.offsets[array]
            first, last = max(start, origin), min(stop, self.offsets[array + 1])
            found += [
                Piece(array, begin - origin, min(begin + longest, last) - origin, begin - start)
                for begin in range(first, last, longest)
            ]
            array += 1
        return found
