"""Parts: arrays of the caller as one long array, cut into one part per rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mpistrat.arrays import Array
from mpistrat.reduction import Fold
from mpistrat.transports.flat_arrays import FlatArrays, Section
from mpistrat.transports.window import NodeWindow

__all__ = ["Parts"]


class Parts:
    """The arrays of a rank, and which part of them each rank sums; where bounds are given it keeps what it has summed."""

    def __init__(self, window: NodeWindow, arrays: FlatArrays, fold: Fold, bounds: Sequence[int] | None = None) -> None:
        self.window, self.rank, self.size = window, window.group.rank, window.group.size
        self.others = [peer for peer in range(self.size) if peer != self.rank]
        self.arrays, self.fold, self.itemsize = arrays, fold, arrays.dtype.itemsize
        self.scatters = bounds is not None
        self.bounds = bounds or [index * arrays.count // self.size for index in range(self.size + 1)]

    def views(self, pieces: Sequence[Section], buffers: Sequence[Array]) -> Iterator[tuple[Array, Array, list[Array]]]:
        """Yield, for each piece of a range, what is there of the sources, the targets and buffers that hold just that range."""
        sources, targets = self.arrays.sources, self.arrays.targets
        for piece in pieces:
            here = slice(piece.start, piece.stop)
            there = slice(piece.offset, piece.offset + piece.stop - piece.start)
            yield sources[piece.array][here], targets[piece.array][here], [buffer[there] for buffer in buffers]
