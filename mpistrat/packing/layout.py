"""Layout: the position of each array in a bucket's buffer. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from mpistrat.device.segments import Segment

__all__ = ["Layout"]


class Layout:
    """Arrays that lie one after the other, or a range of their elements.

    Parameters
    ----------
    counts : sequence of int
        Elements of each array.
    first : int
        The first element of the range, counted over all arrays.
    count : int, optional
        Elements of the range; by default it extends to the end of the last array.
    """

    def __init__(self, counts: Sequence[int], first: int = 0, count: int | None = None) -> None:
        self.offsets = [0, *accumulate(counts)]
        self.first = first
        self.count = self.offsets[-1] - first if count is None else count

    @property
    def is_one_array(self) -> bool:
        """Whether the range is one whole array."""
        return len(self.offsets) == 2 and self.count == self.offsets[-1]

    @property
    def has_whole_arrays(self) -> bool:
        """Whether the range contains all elements of all arrays."""
        return self.first == 0 and self.count == self.offsets[-1]

    def segments(self, start: int, stop: int, longest: int) -> list[Segment]:
        """Return the segments in elements [start, stop) of the range, in order, each of at most `longest` elements."""
        found: list[Segment] = []
        start, stop = start + self.first, stop + self.first
        array = max(0, bisect_right(self.offsets, start) - 1)
        while array < len(self.offsets) - 1 and self.offsets[array] < stop:
            origin = self.offsets[array]
            first, last = max(start, origin), min(stop, self.offsets[array + 1])
            found += [
                Segment(array, begin - origin, min(begin + longest, last) - origin, begin - start)
                for begin in range(first, last, longest)
            ]
            array += 1
        return found
