"""Shapes and dtypes that replicas exchange before they exchange arrays."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from mpistrat.arrays import Array
from mpistrat.errors import InvalidArgumentError
from mpistrat.groups.agreement import digest_of
from mpistrat.groups.group import Group
from mpistrat.reduction import HALF_DTYPES

_MAX_NDIM, _NAME_BYTES = 64, 32
_DIGESTS_KEPT = 1024


def shape_digest(array: Array, free_axis: int | None = None, out_extent: int | None = None) -> int:
    """Return a hash of dtype and shape that ignores the extent along `free_axis`, but includes that of `out` if given."""
    return _shape_digest(array.dtype, array.shape, free_axis, out_extent)


@lru_cache(_DIGESTS_KEPT)
def _shape_digest(dtype: np.dtype[Any], shape: tuple[int, ...], free_axis: int | None, out_extent: int | None) -> int:
    extents = tuple(-1 if axis == free_axis else extent for axis, extent in enumerate(shape))
    # the name of a dtype says nothing of its byte order, and its code does not tell bfloat16 from another void
    return digest_of(f"{dtype.name} {dtype.str} {extents} {free_axis} {out_extent}")


@lru_cache(_DIGESTS_KEPT)
def name_of(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype, which NumPy composes anew each time."""
    return str(dtype)


def require_equal_shapes(digests: np.ndarray[Any, np.dtype[np.int64]], needed: str, group: Group, array: Array) -> None:
    """Check that the `shape_digest` of all ranks are equal. A collective call if they are not."""
    if (digests == digests[0]).all():
        return
    found = group.comm.allgather(f"{array.dtype} {array.shape}")
    shapes = ", ".join(f"replica {rank}: {text}" for rank, text in enumerate(found))
    raise InvalidArgumentError(f"{needed}; got {shapes}")


def encode_shape(array: Array) -> Array:
    """Encode the shape and dtype of an array in a fixed number of bytes."""
    header = np.zeros(1 + _MAX_NDIM + _NAME_BYTES // 8, np.int64)
    header[0] = array.ndim
    header[1 : 1 + array.ndim] = array.shape
    name = (array.dtype.name if array.dtype in HALF_DTYPES else array.dtype.str).encode()
    header[1 + _MAX_NDIM :].view(np.uint8)[: len(name)] = np.frombuffer(name[:_NAME_BYTES], np.uint8)
    return header


def decode_shape(header: Array) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return the shape and dtype that `encode_shape` encoded."""
    name = header[1 + _MAX_NDIM :].view(np.uint8).tobytes().rstrip(b"\0").decode()
    return tuple(int(extent) for extent in header[1 : 1 + header[0]]), np.dtype(name)
