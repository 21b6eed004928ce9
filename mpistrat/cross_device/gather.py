"""What replicas must know of each other's arrays before they exchange them."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import numpy as np

from mpistrat.arrays import Array
from mpistrat.errors import InvalidArgumentError
from mpistrat.groups.group import Group

__all__ = ["check_equal", "gather_extents", "incoming_extents"]

_FIRST, _MAX_NDIM = 2, 64


def gather_extents(group: Group, array: Array, axis: int) -> list[int]:
    """Return every rank's extent along `axis`. A collective call.

    Raises
    ------
    InvalidArgumentError
        On every rank, if numbers of axes, other extents or dtypes differ.
    """
    rows = _gathered(group, array, axis)
    needed = f"all_gather along axis {axis} needs one axis, one dtype and equal extents on all other axes"
    _require_equal(rows, axis, needed, group, array)
    return [int(extent) for extent in rows[:, _FIRST + axis]]


def check_equal(group: Group, array: Array, root: int) -> None:
    """Check that the arrays of all ranks have one shape and dtype, and are meant for one rank. A collective call.

    Raises
    ------
    InvalidArgumentError
        On every rank, if shapes, dtypes or roots differ.
    """
    _require_equal(_gathered(group, array, root), None, "gather needs equal shapes, one dtype and one root", group, array)


def incoming_extents(group: Group, arrays: Sequence[Array]) -> list[int]:
    """Return the first extent of the array that each rank sends to this one; 1 for scalars. A collective call.

    Raises
    ------
    InvalidArgumentError
        On every rank, if numbers of axes, other extents or dtypes differ.
    """
    mine = np.stack([_header(array, 0) for array in arrays])
    rows = np.empty_like(mine)
    group.comm.Alltoall(mine, rows)
    axis = 0 if arrays[0].ndim else None
    needed = "all_to_all needs one dtype, and equal extents on all axes but the first"
    # every rank hears of every other one, so what does not fit is seen by all
    _require_equal(rows, axis, needed, group, arrays[group.rank])
    return [1 if axis is None else int(extent) for extent in rows[:, _FIRST]]


def _gathered(group: Group, array: Array, number: int) -> Array:
    mine = _header(array, number)
    rows = np.empty((group.size, mine.size), np.int64)
    group.comm.Allgather(mine, rows)
    return rows


def _header(array: Array, number: int) -> Array:
    """Return the shape and dtype as numbers, with the axis or root in the last place."""
    header = np.zeros(_FIRST + _MAX_NDIM + 1, np.int64)
    # the checksum differs between dtypes and is the same on all ranks
    header[:_FIRST] = array.ndim, crc32(array.dtype.name.encode())
    header[_FIRST : _FIRST + array.ndim] = array.shape
    header[-1] = number
    return header


def _require_equal(rows: Array, free_axis: int | None, needed: str, group: Group, array: Array) -> None:
    others = rows.copy()
    if free_axis is not None:
        others[:, _FIRST + free_axis] = 0
    if (others != others[0]).any():
        shapes = [f"replica {rank}: {tuple(row[_FIRST : _FIRST + row[0]].tolist())}" for rank, row in enumerate(rows)]
        raise InvalidArgumentError(f"{needed}; got {', '.join(shapes)}, {array.dtype} on replica {group.rank}")
