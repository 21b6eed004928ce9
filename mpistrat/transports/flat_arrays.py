"""FlatArrays: the caller's arrays, addressed as one long array."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any

from mpistrat.arrays import Array
from mpistrat.device.segments import Segment

__all__ = ["FlatArrays", "SegmentCache"]


class SegmentCache:
    """The segments of ranges of a list of arrays: they depend on the arrays' sizes, not on their addresses.

    Parameters
    ----------
    find : callable
        Returns the segments in elements [start, stop) of all arrays, in order.

    Attributes
    ----------
    find : callable
        The same, cached.
    derived : dict
        What else has been computed from them.
    """

    def __init__(self, find: Callable[[int, int], Sequence[Segment]]) -> None:
        self.find = cache(find)
        self.derived: dict[Hashable, Any] = {}


class FlatArrays:
    """The caller's arrays, C-contiguous, one-dimensional and of one dtype; sources and targets may be the same.

    Parameters
    ----------
    sources, targets : sequence of ndarray
        The arrays to combine, and those for the results.
    count : int
        Elements of all arrays, or of the range of them that is combined.
    segments : SegmentCache
        Of these arrays.
    """

    def __init__(self, sources: Sequence[Array], targets: Sequence[Array], count: int, segments: SegmentCache) -> None:
        self.sources, self.targets, self.count, self.segments = sources, targets, count, segments
        self.dtype = targets[0].dtype
        self.nbytes = count * self.dtype.itemsize
