"""What replicas must know of each other's arrays before they gather them."""

from __future__ import annotations

from zlib import crc32

import numpy as np

from mpistrat.arrays import Array
from mpistrat.errors import InvalidArgumentError
from mpistrat.groups.group import Group

__all__ = ["gather_extents"]

_FIRST, _MAX_NDIM = 3, 64


def gather_extents(group: Group, array: Array, axis: int) -> list[int]:
    """Return every rank's extent along `axis`. A collective call.

    Raises
    ------
    InvalidArgumentError
        On every rank, if numbers of axes, other extents or dtypes differ.
    """
    mine = np.zeros(_FIRST + _MAX_NDIM, np.int64)
    # the checksum differs between dtypes and is the same on all ranks
    mine[:_FIRST] = array.ndim, crc32(array.dtype.name.encode()), axis
    mine[_FIRST : _FIRST + array.ndim] = array.shape
    rows = np.empty((group.size, mine.size), np.int64)
    group.comm.Allgather(mine, rows)
    others = rows.copy()
    others[:, _FIRST + axis] = 0
    if (others != others[0]).any():
        shapes = [f"replica {rank}: {tuple(row[_FIRST : _FIRST + row[0]].tolist())}" for rank, row in enumerate(rows)]
        raise InvalidArgumentError(
            f"all_gather along axis {axis} needs one axis, one dtype and equal extents on all other axes; got "
            f"{', '.join(shapes)}, "
            f"{array.dtype} on replica {group.rank}"
        )
    return [int(extent) for extent in rows[:, _FIRST + axis]]
