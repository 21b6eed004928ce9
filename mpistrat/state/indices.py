"""Indices along the leading axes of a variable, checked and converted to flat indices."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from mpistrat.arrays import Array, as_array, to_host
from mpistrat.communicator.sparse import IndexedSlices
from mpistrat.errors import InvalidArgumentError, UnsupportedDtypeError

__all__ = ["FlatIndices", "checked_slices", "flat_indices", "flattened"]


class FlatIndices(NamedTuple):
    """Indices of entries of an array whose leading axes are flattened to one.

    Attributes
    ----------
    numbers : ndarray of int64
        The index of each entry, in host memory.
    shape : tuple of int
        The shape of one entry.
    """

    numbers: Array
    shape: tuple[int, ...]


def flat_indices(call: str, indices: Any, shape: tuple[int, ...]) -> FlatIndices:
    """Return the flat indices of `indices` into an array of a shape.

    Parameters
    ----------
    call : str
        The call, for errors.
    indices : array_like of int
        Its last axis holds the indices of one entry, along the first axes of the array.
    shape : tuple of int
        The shape of the array.

    Raises
    ------
    InvalidArgumentError
        If `indices` has no axis or too many indices per entry, or an index is negative or out of range.
    UnsupportedDtypeError
        If they are not integers.
    """
    array = to_host(as_array(indices, "indices"))
    if array.size and array.dtype.kind not in "iu":
        raise UnsupportedDtypeError(f"{call}: indices must be integers; got dtype {array.dtype}")
    if not array.ndim or array.shape[-1] > len(shape):
        raise InvalidArgumentError(
            f"{call}: the last axis of indices holds up to {len(shape)} indices, one for each axis of shape {shape}; got "
            f"indices of shape {array.shape}"
        )
    depth = array.shape[-1]
    numbers = np.zeros(array.shape[:-1], np.int64)
    for axis, extent in enumerate(shape[:depth]):
        along = array[..., axis]
        if along.size and not 0 <= int(along.min()) <= int(along.max()) < extent:
            raise InvalidArgumentError(
                f"{call}: indices along axis {axis} must be 0 to {extent - 1}; got {int(along.min())} to {int(along.max())}"
            )
        numbers = numbers * extent + along.astype(np.int64)
    return FlatIndices(numbers, shape[depth:])


def flattened(array: Array, entry: tuple[int, ...]) -> Array:
    """Return an array with its axes before those of an entry flattened to one: a view if it is contiguous."""
    leading = array.shape[: array.ndim - len(entry)]
    return array.reshape(math.prod(leading), *entry)


def checked_slices(call: str, indices: Any, updates: Any, shape: tuple[int, ...]) -> IndexedSlices:
    """Return updates of single entries as rows, with their flat indices.

    Parameters
    ----------
    call, indices, shape : str, array_like of int, tuple of int
        As for `flat_indices`, which raises the same errors too.
    updates : array_like
        One entry for each index.

    Raises
    ------
    InvalidArgumentError
        If the shape of `updates` is not that of the indices, followed by that of an entry.
    """
    numbers, entry = flat_indices(call, indices, shape)
    values = as_array(updates, "updates")
    if values.shape != numbers.shape + entry:
        raise InvalidArgumentError(f"{call}: these indices need updates of shape {numbers.shape + entry}; got {values.shape}")
    return IndexedSlices(values.reshape(numbers.size, *entry), numbers.reshape(-1))
