"""Row selections: which rows of an array an index names, so that only these are sent. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mpistrat.arrays import Array

__all__ = ["RowSelection", "positions", "select_rows"]


class RowSelection(NamedTuple):
    """Rows of an array, and what else an index says about them: ``array[index]`` is ``array[rows][inner]``.

    Attributes
    ----------
    rows : range or ndarray of int64
        The rows; a range ascends.
    inner : tuple
        The index into the array of these rows.
    """

    rows: range | Array
    inner: tuple[Any, ...]


def select_rows(index: Any, num_rows: int) -> RowSelection | None:
    """Return the rows that an index names; None if it names none of the first axis, as a mask or a new axis does.

    Raises
    ------
    IndexError
        If a row is out of range.

    >>> select_rows((slice(None, None, -2), 1), 6)
    RowSelection(rows=range(1, 6, 2), inner=(slice(None, None, -1), 1))
    """
    first, *others = index if isinstance(index, tuple) and index else (index,)
    if first is Ellipsis and not others:
        return RowSelection(range(num_rows), (slice(None),))
    if isinstance(first, slice):
        rows = range(num_rows)[first]
        return RowSelection(rows, (slice(None), *others)) if rows.step > 0 else RowSelection(rows[::-1], (_BACKWARDS, *others))
    if isinstance(first, bool):
        return None
    if isinstance(first, (int, np.integer)):
        row = range(num_rows)[first]
        return RowSelection(range(row, row + 1), (0, *others))
    named = np.asarray(first) if isinstance(first, (list, np.ndarray)) else np.zeros(0)
    if named.dtype.kind not in "iu" or not all(part is Ellipsis or isinstance(part, (int, slice)) for part in others):
        return None
    if named.size and not -num_rows <= int(named.min()) <= int(named.max()) < num_rows:
        raise IndexError(f"rows must be {-num_rows} to {num_rows - 1}; got {int(named.min())} to {int(named.max())}")
    return RowSelection(np.where(named < 0, named + num_rows, named).astype(np.int64), (*[slice(None)] * named.ndim, *others))


def positions(rows: range, start: int, stop: int) -> slice:
    """Return where in ascending rows those from `start` to before `stop` stand.

    >>> positions(range(1, 10, 3), 4, 8)
    slice(1, 3, None)
    """
    return slice(*(len(range(rows.start, min(bound, rows.stop), rows.step)) for bound in (start, stop)))


_BACKWARDS = slice(None, None, -1)
