"""What replicas must know of each other's arrays before they exchange them."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrat.arrays import Array
from mpistrat.errors import InvalidArgumentError
from mpistrat.groups.agreement import word_of
from mpistrat.groups.group import Group
from mpistrat.reduction import HALF_DTYPES

__all__ = ["require_equal", "shape_header", "shape_of", "shape_word"]

_MAX_NDIM, _NAME_BYTES = 64, 32


def shape_word(array: Array, free_axis: int | None = None, landing_extent: int | None = None) -> int:
    """Return a number that is the same for arrays of one dtype and of equal extents, but for those along `free_axis`.

    There the results must have one extent, where ranks name it.
    """
    extents = tuple(-1 if axis == free_axis else extent for axis, extent in enumerate(array.shape))
    return word_of(f"{array.dtype.name} {extents} {free_axis} {landing_extent}")


def require_equal(words: np.ndarray[Any, np.dtype[np.int64]], needed: str, group: Group, array: Array) -> None:
    """Check that the arrays of all ranks have one `shape_word`. A collective call where they do not.

    Raises
    ------
    InvalidArgumentError
        On every rank, if they do not.
    """
    if (words == words[0]).all():
        return
    found = group.comm.allgather(f"{array.dtype} {array.shape}")
    shapes = ", ".join(f"replica {rank}: {text}" for rank, text in enumerate(found))
    raise InvalidArgumentError(f"{needed}; got {shapes}")


def shape_header(array: Array) -> Array:
    """Return the shape and dtype of an array in a fixed number of bytes."""
    header = np.zeros(1 + _MAX_NDIM + _NAME_BYTES // 8, np.int64)
    header[0] = array.ndim
    header[1 : 1 + array.ndim] = array.shape
    name = (array.dtype.name if array.dtype in HALF_DTYPES else array.dtype.str).encode()
    header[1 + _MAX_NDIM :].view(np.uint8)[: len(name)] = np.frombuffer(name[:_NAME_BYTES], np.uint8)
    return header


def shape_of(header: Array) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return the shape and dtype that a header says."""
    name = header[1 + _MAX_NDIM :].view(np.uint8).tobytes().rstrip(b"\0").decode()
    return tuple(int(extent) for extent in header[1 : 1 + header[0]]), np.dtype(name)
