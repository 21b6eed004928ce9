"""Segment: contiguous elements of one array; SegmentTable: the segments that one launch of `kernels.cu` copies. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["BYTES_UNDER_WAY", "MAX_BLOCKS", "THREADS", "Segment", "SegmentTable", "num_blocks"]

THREADS = 256
"""Threads per block."""

BYTES_UNDER_WAY = 64
"""Bytes that a thread reads at a time."""

PACKET_BYTES = 16

MAX_BLOCKS = 1056
"""Of a kernel that works through one range: eight for each of the 132 multiprocessors of the largest GPUs there are."""


@dataclass(frozen=True)
class Segment:
    """Contiguous elements of one array, in a range of several arrays laid end to end.

    Attributes
    ----------
    array : int
        Index of the array.
    start, stop : int
        The elements, by their index in the array.
    offset : int
        The index of the first one in the range.
    """

    array: int
    start: int
    stop: int
    offset: int


class SegmentTable:
    """For each of many arrays: its source, its target, and the blocks of the launch that copy it.

    Parameters
    ----------
    counts : sequence of int
        Elements of each array; empty ones need no block.
    source, target : dtype
        The dtype that is read, and the one that is written.

    Attributes
    ----------
    rows : ndarray of uint64, shape (segments, 3)
        Address of the source, address of the target, elements.
    first_tile : ndarray of uint32, shape (segments,)
        The first block of each segment.
    num_tiles : int
        Number of blocks of the launch.
    """

    def __init__(self, counts: Sequence[int], source: np.dtype[Any], target: np.dtype[Any]) -> None:
        self._kept = [index for index, count in enumerate(counts) if count]
        per_tile = THREADS * BYTES_UNDER_WAY // source.itemsize
        tiles = [-(-counts[index] // per_tile) for index in self._kept]
        self.rows: NDArray[Any] = np.zeros((len(self._kept), 3), np.uint64)
        self.rows[:, 2] = [counts[index] for index in self._kept]
        self.first_tile: NDArray[Any] = np.cumsum([0, *tiles[:-1]], dtype=np.uint32)[: len(tiles)]
        self.num_tiles = sum(tiles)

    def point(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Set the addresses of all arrays; those of empty arrays are ignored."""
        if self._kept:
            self.rows[:, :2] = np.array([(sources[index], targets[index]) for index in self._kept], np.uint64)


def num_blocks(count: int, itemsize: int) -> int:
    """Return the blocks of a kernel that works through one range: a packet for each thread, unless there are too many."""
    per_block = THREADS * max(1, PACKET_BYTES // itemsize)
    return min(-(-count // per_block), MAX_BLOCKS)
