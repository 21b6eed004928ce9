"""Parts: arrays of the caller as one long array, cut into one part per rank."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from mpistrat.arrays import Array
from mpistrat.reduction import Fold

if TYPE_CHECKING:
    from mpistrat.transports.shared_memory import SharedMemoryTransport

__all__ = ["Cuts", "Lists", "Parts", "Piece"]


class Piece(Protocol):
    """Elements [start, stop) of one array, which begin `offset` elements into a range of the long one."""

    @property
    def array(self) -> int: ...  # noqa: D102
    @property
    def start(self) -> int: ...  # noqa: D102
    @property
    def stop(self) -> int: ...  # noqa: D102
    @property
    def offset(self) -> int: ...  # noqa: D102


class Cuts:
    """The pieces of ranges of some arrays, found once: what is cut does not depend on where the arrays lie.

    Parameters
    ----------
    find : callable
        Returns what lies in elements [start, stop) of all of them, in order.

    Attributes
    ----------
    pieces : callable
        Returns what `find` does, and remembers it.
    kept : dict
        What else has been made of them.
    """

    def __init__(self, find: Callable[[int, int], Sequence[Piece]]) -> None:
        self.pieces = cache(find)
        self.kept: dict[Hashable, Any] = {}


class Lists:
    """Arrays of the caller, C-contiguous, one-dimensional and of one dtype; sources and targets may be the same.

    Parameters
    ----------
    sources, targets : sequence of ndarray
        What is combined, and where the results go.
    count : int
        Elements of all arrays, or of the range of them that is combined.
    cuts : Cuts
        What lies where in them.
    """

    def __init__(self, sources: Sequence[Array], targets: Sequence[Array], count: int, cuts: Cuts) -> None:
        self.sources, self.targets, self.count, self.cuts = sources, targets, count, cuts
        self.dtype = targets[0].dtype
        self.nbytes = count * self.dtype.itemsize


class Parts:
    """The arrays of a rank, and which part of them each rank sums."""

    def __init__(self, transport: SharedMemoryTransport, lists: Lists, fold: Fold) -> None:
        self.transport, self.rank, self.size = transport, transport.group.rank, transport.group.size
        self.others = [peer for peer in range(self.size) if peer != self.rank]
        self.lists, self.fold, self.itemsize = lists, fold, lists.dtype.itemsize
        self.bounds = [index * lists.count // self.size for index in range(self.size + 1)]

    def views(self, pieces: Sequence[Piece], buffers: Sequence[Array]) -> Iterator[tuple[Array, Array, list[Array]]]:
        """Yield, for each piece of a range, what is there of the sources, the targets and buffers that hold just that range."""
        sources, targets = self.lists.sources, self.lists.targets
        for piece in pieces:
            here = slice(piece.start, piece.stop)
            there = slice(piece.offset, piece.offset + piece.stop - piece.start)
            yield sources[piece.array][here], targets[piece.array][here], [buffer[there] for buffer in buffers]
