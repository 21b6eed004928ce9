"""Which arrays share a bucket, by bytes_per_pack and num_packs as TensorFlow defines them, and where each lies in it. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from copy import copy
from itertools import accumulate

from mpistrat.device.kernels import Segment


class Layout:
    """Arrays that lie one after the other, or `count` of their elements from `first` on; by default all the rest."""

    def __init__(self, counts: Sequence[int], first: int = 0, count: int | None = None) -> None:
        self.offsets = [0, *accumulate(counts)]
        self.first = first
        self.count = self.offsets[-1] - first if count is None else count

    @property
    def is_one_array(self) -> bool:
        """Whether the range is one whole array."""
        return len(self.offsets) == 2 and self.count == self.offsets[-1]

    def part(self, start: int, stop: int) -> Layout:
        """Return elements [start, stop) of the range."""
        part = copy(self)
        part.first, part.count = self.first + start, stop - start
        return part

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


def pack_by_bytes(sizes_bytes: Sequence[int], bytes_per_pack: int) -> list[list[int]]:
    """Return packs of indices, in order; one pack if the limit is 0.

    A pack is complete when it is larger than the limit, so packs exceed it a little.
    """
    packs: list[list[int]] = []
    open_bytes = 0
    for index, size in enumerate(sizes_bytes):
        if not packs or (bytes_per_pack and open_bytes > bytes_per_pack):
            packs.append([])
            open_bytes = 0
        packs[-1].append(index)
        open_bytes += size
    return packs


def split_evenly(count: int, num_packs: int) -> list[int]:
    """Return the elements of each of equal packs; the last one takes the remainder: all, of fewer elements than packs."""
    width = count // num_packs
    return [width] * (num_packs - 1) + [count - width * (num_packs - 1)] if width else [count]
