"""Assignment: convert a value to the dtype and device of the array that it is assigned to, if it fits there."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrat.arrays import Array, as_array, is_on_device, to_device, to_host
from mpistrat.errors import InvalidArgumentError, UnsupportedDtypeError

__all__ = ["assignable", "converted"]


def assignable(value: Any, target: Array, owner: object) -> Array:
    """Return `value` as an array that can be assigned to `target`: in its dtype, and on its device.

    Parameters
    ----------
    value : array_like
        Must have the shape of `target`.
    target : array
        The array to assign to.
    owner : object
        The variable that `target` belongs to, for error messages.

    Raises
    ------
    InvalidArgumentError
        If the shapes differ, or an integer is out of range for the dtype of `target`.
    UnsupportedDtypeError
        If the dtype of `target` cannot hold the kind of number that `value` has.
    """
    array = as_array(value)
    if array.shape != target.shape:
        raise InvalidArgumentError(
            f"{owner!r} has shape {target.shape}; a value of shape {array.shape} cannot be assigned to it"
        )
    fit = converted(array, target.dtype, owner)
    return to_device(fit) if is_on_device(target) else to_host(fit)


def converted(array: Array, dtype: np.dtype[Any], owner: object) -> Array:
    """Return `array` in `dtype`, the one of `owner`; signed and unsigned integers count as the same kind of number.

    Raises
    ------
    InvalidArgumentError
        If an integer is out of range.
    UnsupportedDtypeError
        If `dtype` cannot hold the kind of number: a float as an integer, a complex number as a float.
    """
    if array.dtype == dtype:
        return array
    if not (np.can_cast(array.dtype, dtype, casting="same_kind") or (array.dtype.kind == "i" and dtype.kind == "u")):
        raise UnsupportedDtypeError(
            f"{owner!r} has dtype {dtype}, which cannot hold a value of dtype {array.dtype}; cast it first, "
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
