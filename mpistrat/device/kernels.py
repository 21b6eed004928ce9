"""The names of the kernel instances of `kernels.cu`, and what one launch of them works on: Segment, SegmentTable. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mpistrat.reduction import ReduceOp

_INTEGERS = {"bool": "uint8", "int8": "signed char", "int16": "short", "int32": "int", "int64": "long long"}
_INTEGERS |= {name: name for name in ("uint8", "uint16", "uint32", "uint64")}
_FLOATS = {"float16": "float16", ml_dtypes.bfloat16: "bfloat16", "float32": "float", "float64": "double"}
_COMPLEX = {"complex64": "Complex<float>", "complex128": "Complex<double>"}
TYPES: dict[np.dtype[Any], str] = {np.dtype(kind): name for kind, name in (_INTEGERS | _FLOATS | _COMPLEX).items()}

_FOLDS = {ReduceOp.SUM: "Sum", ReduceOp.MEAN: "Sum", ReduceOp.MIN: "Min", ReduceOp.MAX: "Max", ReduceOp.PROD: "Prod"}
_FOLDS_OF_BOOL = {ReduceOp.SUM: "Max", ReduceOp.MAX: "Max", ReduceOp.MIN: "Min", ReduceOp.PROD: "Min"}


def move_kernel(source: np.dtype[Any], target: np.dtype[Any]) -> str:
    """Return the kernel that copies many arrays, cast from one dtype to another."""
    return f"move_segments<{TYPES[source]}, {TYPES[target]}>"


def fold_kernel(dtype: np.dtype[Any], op: ReduceOp) -> str:
    """Return the kernel that combines a range of several ranks' memory."""
    return f"fold_peers<{TYPES[dtype]}, {fold_name(dtype, op)}>"


def fold_into_kernel(dtype: np.dtype[Any], op: ReduceOp) -> str:
    """Return the kernel that combines a received array with another one, in place."""
    return f"fold_into<{TYPES[dtype]}, {fold_name(dtype, op)}>"


def divide_kernel(dtype: np.dtype[Any]) -> str:
    """Return the kernel that divides values in place, complex ones as twice as many real ones."""
    return f"divide_values<{TYPES[real_dtype(dtype)]}>"


def real_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of the two parts of a complex number; that of other values is their own."""
    return np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype


def fold_name(dtype: np.dtype[Any], op: ReduceOp) -> str:
    """Return the name of what combines such values in kernels, and in capitals in NCCL."""
    return (_FOLDS_OF_BOOL if dtype.kind == "b" else _FOLDS)[op]


THREADS = 256  # per block
BYTES_UNDER_WAY = 64  # that a thread reads at a time
PACKET_BYTES = 16
MAX_BLOCKS = 1056
"""Of a kernel that works through one range: eight for each of the 132 multiprocessors of the largest GPUs there are."""


@dataclass(frozen=True)
class Segment:
    """Elements [start, stop) of one array, the first of which is element `offset` of a range of arrays laid end to end."""

    array: int
    start: int
    stop: int
    offset: int


class SegmentTable:
    """For each of many arrays: its source, its target, and the blocks of the launch that copy it.

    `rows` are addresses of source and target, and elements; `first_tile` is the first block of each, `num_tiles` the number of
    blocks. Empty arrays need none.
    """

    def __init__(self, counts: Sequence[int], source: np.dtype[Any], target: np.dtype[Any]) -> None:
        self._kept = [index for index, count in enumerate(counts) if count]
        per_tile = THREADS * BYTES_UNDER_WAY // source.itemsize
        tiles = [-(-counts[index] // per_tile) for index in self._kept]
        self.rows: NDArray[Any] = np.zeros((len(self._kept), 3), np.uint64)
        self.rows[:, 2] = [counts[index] for index in self._kept]
        self.first_tile: NDArray[Any] = np.cumsum([0, *tiles[:-1]], dtype=np.uint32)[: len(tiles)]
        self.num_tiles = sum(tiles)

    def point(self, sources: Sequence[int] | None = None, targets: Sequence[int] | None = None) -> None:
        """Set the addresses of all sources, of all targets, or both; those of empty arrays are ignored."""
        for column, places in enumerate((sources, targets)):
            if places is not None and self._kept:
                kept = places if len(places) == len(self._kept) else [places[index] for index in self._kept]
                self.rows[:, column] = np.array(kept, np.uint64)

    def in_memory(self, memory: NDArray[np.uint8]) -> SegmentTable:
        """Return a copy whose rows lie in memory, with the first blocks behind them."""
        table, size = copy(self), self.rows.nbytes
        table.rows = memory[:size].view(np.uint64).reshape(self.rows.shape)
        table.rows[...], memory[size:] = self.rows, self.first_tile.view(np.uint8)
        return table


def num_blocks(count: int, itemsize: int) -> int:
    """Return the blocks of a kernel that works through one range: a packet for each thread, unless there are too many."""
    per_block = THREADS * max(1, PACKET_BYTES // itemsize)
    return min(-(-count // per_block), MAX_BLOCKS)
