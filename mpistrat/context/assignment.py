"""Fitting a value to an array that stands already: its shape, its dtype, and where it lies."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrat.arrays import Array, as_array, is_on_device, to_device, to_host
from mpistrat.errors import InvalidArgumentError, UnsupportedDtypeError

__all__ = ["assignable", "converted"]


def assignable(value: Any, target: Array, owner: object) -> Array:
    """Return `value` as an array of the shape and dtype of `target`, the array of `owner`, and where that is.

    Raises
    ------
    InvalidArgumentError
        If the shapes differ.
        Or an integer is out of range for the dtype of `target`.
    UnsupportedDtypeError
        If that dtype cannot hold the kind of number that `value` has.
    """
    array = as_array(value)
    if array.shape != target.shape:
        raise InvalidArgumentError(
            f"{owner!r} has shape {target.shape}; a value of shape {array.shape} cannot be assigned to it"
        )
    fit = converted(array, target.dtype, owner)
    return to_device(fit) if is_on_device(target) else to_host(fit)


def converted(array: Array, dtype: np.dtype[Any], owner: object) -> Array:
    """Return `array` in the dtype of `owner`, where each number stays of its kind: integers of either sign are of one kind.

    Raises
    ------
    InvalidArgumentError
        If an integer is out of range.
    UnsupportedDtypeError
        If `dtype` cannot hold the kind of number.
    """
    if array.dtype == dtype:
        return array
    if not (np.can_cast(array.dtype, dtype, casting="same_kind") or (array.dtype.kind == "i" and dtype.kind == "u")):
        raise UnsupportedDtypeError(
            f"{owner!r} has dtype {dtype}; a value of dtype {array.dtype} would lose its kind: cast it first, "
            f"value.astype({dtype.name!r})"
        )
    if dtype.kind in "iu" and array.size:
        limits, least, greatest = np.iinfo(dtype), int(array.min()), int(array.max())
        if least < limits.min or greatest > limits.max:
            raise InvalidArgumentError(
                f"{owner!r} has dtype {dtype}, which holds {limits.min} to {limits.max}; numbers from {least} to "
                f"{greatest} would wrap around"
            )
    return array.astype(dtype)
