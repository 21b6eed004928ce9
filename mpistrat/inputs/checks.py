"""Check integer arguments of datasets."""

from __future__ import annotations

import operator
from typing import Any

from mpistrat.errors import InvalidArgumentError

__all__ = ["checked_int"]


def checked_int(value: Any, argument: str, least: int) -> int:
    """Return `value` as an int.

    Raises
    ------
    TypeError
        If it is not an integer.
    InvalidArgumentError
        If it is less than `least`.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{argument} must be an int; got {value!r}") from None
    if number < least:
        raise InvalidArgumentError(f"{argument} must be at least {least}; got {number}")
    return number
