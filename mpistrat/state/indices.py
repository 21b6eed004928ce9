"""Indices into the leading axes of a variable: checked, and each counted as one number."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from mpistrat.arrays import Array, as_array, to_host
from mpistrat.communicator.sparse import IndexedSlices
from mpistrat.errors import InvalidArgumentError, UnsupportedDtypeError

__all__ = ["Places", "checked_places", "checked_slices", "flattened"]


class Places(NamedTuple):
    """Which entries of an array are meant, where its leading axes count as one.

    Attributes
    ----------
    numbers : ndarray of int64
        The number of each entry, in host memory.
    shape : tuple of int
        The shape of one entry.
    """

    numbers: Array
    shape: tuple[int, ...]


def checked_places(call: str, indices: Any, shape: tuple[int, ...]) -> Places:
    """Return the places that `indices` names in an array of a shape.

    Parameters
    ----------
    call : str
        What errors say was called.
    indices : array_like of int
        Its last axis holds the indices of one place, along the first axes of the array.
    shape : tuple of int
        That of the array.

    Raises
    ------
    InvalidArgumentError
        If `indices` has no axis, names more axes than there are, or an index is negative or outside the array.
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
    return Places(numbers, shape[depth:])


def flattened(array: Array, entry: tuple[int, ...]) -> Array:
    """Return an array with the axes before those of an entry as one: a view of it, where it lies in C order."""
    leading = array.shape[: array.ndim - len(entry)]
    return array.reshape(math.prod(leading), *entry)


def checked_slices(call: str, indices: Any, updates: Any, shape: tuple[int, ...]) -> IndexedSlices:
    """Return updates of single entries as rows, and where each belongs when the leading axes count as one.

    Parameters
    ----------
    call, indices, shape : str, array_like of int, tuple of int
        As for `checked_places`, which says what is raised too.
    updates : array_like
        One entry for each place.

    Raises
    ------
    InvalidArgumentError
        If there is not one update of the shape of an entry for each place.
    """
    numbers, entry = checked_places(call, indices, shape)
    values = as_array(updates, "updates")
    if values.shape != numbers.shape + entry:
        raise InvalidArgumentError(f"{call}: these indices need updates of shape {numbers.shape + entry}; got {values.shape}")
    return IndexedSlices(values.reshape(numbers.size, *entry), numbers.reshape(-1))
