"""Arrays: what counts as one."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpistrat.errors import UnsupportedDtypeError

__all__ = ["Array", "as_array"]

Array = NDArray[Any]


def as_array(value: Any, name: str = "value") -> Array:
    """Return `value` as a NumPy array, without a copy where it is one already.

    Parameters
    ----------
    value : array_like
        An array, a Python number, a (rectangular) list of numbers, or anything that speaks ``__array__``,
        ``__array_interface__`` or DLPack.
    name : str
        What to call it in an error.

    Raises
    ------
    UnsupportedDtypeError
        If it is a ragged list, or its elements are objects, text or dates.
    """
    if type(value) is np.ndarray:
        array: Array = value
    else:
        try:
            array = np.asarray(value)
        except ValueError as error:
            raise UnsupportedDtypeError(f"{name} cannot be read as an array: {error}; pass an array of numbers") from None
    if array.dtype.kind in "OUSMmT" or array.dtype.names is not None:
        raise UnsupportedDtypeError(
            f"{name} has dtype {array.dtype}, which no collective can carry; accepted are arrays of bool, integers, float16, "
            "bfloat16, float32, float64 and complex numbers"
        )
    return array
