"""The table by which one launch on a device moves many arrays. Pure: see `kernels.cu` for who reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["BYTES_UNDER_WAY", "THREADS", "SegmentTable"]

THREADS = 256
"""Threads of a block."""

BYTES_UNDER_WAY = 64
"""What a thread reads."""

PACKET_BYTES = 16


class SegmentTable:
    """Where each of many arrays is, where it goes, and which blocks of a launch move it.

    Parameters
    ----------
    counts : sequence of int
        Elements of each array; empty ones need no block.
    source, target : dtype
        What is read, and what is written.

    Attributes
    ----------
    rows : ndarray of uint64, shape (segments, 3)
        Address of the source, address of the target, elements.
    first_tile : ndarray of uint32, shape (segments,)
        The first block of each segment.
    num_tiles : int
        Blocks of the launch.
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
        """Set the addresses of all arrays; those of empty ones do not matter."""
        if self._kept:
            self.rows[:, :2] = np.array([(sources[index], targets[index]) for index in self._kept], np.uint64)
