"""FlatArrays: arrays of the caller as one long array, and what lies where in it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any, Protocol

from mpistrat.arrays import Array

__all__ = ["Cuts", "FlatArrays", "Section"]


class Section(Protocol):
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
    """The sections of ranges of some arrays, found once: what is cut does not depend on where the arrays lie.

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

    def __init__(self, find: Callable[[int, int], Sequence[Section]]) -> None:
        self.pieces = cache(find)
        self.kept: dict[Hashable, Any] = {}


class FlatArrays:
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
