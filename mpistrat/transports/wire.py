"""Wire: casts float32 values to bfloat16 or float16 for their way between nodes.

Rounding is to nearest, ties to even, as in IEEE arithmetic. Values that are too large become infinite, NaN stays NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrat.arrays import Array

_FLOAT16 = np.dtype(np.float16)
# NumPy casts float16 element by element; for a block of at least so many, a dozen passes of integer arithmetic are faster
_BLOCK, _MIN_BLOCK = 1 << 15, 1 << 13
_OVERFLOW = np.float32(65520)  # smaller values round to a finite float16


class Cast:
    """Casts up to `count` values at a time."""

    def __init__(self, dtype: np.dtype[Any], count: int) -> None:
        self._scratch = np.empty((2, min(count, _BLOCK)), np.uint32) if dtype == _FLOAT16 else None
        self.scratch_bytes = 0 if self._scratch is None else self._scratch.nbytes

    def compress(self, values: Array, sent: Array) -> None:
        """Round float32 `values` into `sent`."""
        for start in range(0, values.size, _BLOCK):
            piece, target = values[start : start + _BLOCK], sent[start : start + _BLOCK]
            if self._scratch is not None and piece.size >= _MIN_BLOCK and _is_below(piece, _OVERFLOW):
                _narrow_float16(piece, target, self._scratch[:, : piece.size])
            else:
                with np.errstate(over="ignore", invalid="ignore"):
                    np.copyto(target, piece, casting="unsafe")

    def decompress(self, sent: Array, values: Array) -> None:
        """Convert what was sent to float32, into `values`."""
        for start in range(0, sent.size, _BLOCK):
            piece, target = sent[start : start + _BLOCK], values[start : start + _BLOCK]
            # infinity and NaN come out as 65536 and more
            if self._scratch is None or piece.size < _MIN_BLOCK or not _widen_float16(piece, target):
                np.copyto(target, piece)


def _is_below(values: Array, limit: np.float32) -> bool:
    """Return whether all values are numbers with an absolute value below the limit."""
    return bool(values.min() > -limit and values.max() < limit)


def _narrow_float16(values: Array, sent: Array, scratch: Array) -> None:
    """Round numbers by adding a power of two whose last bit has the value of the last bit of the float16 result.

    For a value with exponent e, or that of the smallest normal float16 if e is smaller, this is 2**(e + 13), whose last bit is
    2**(e - 10).
    """
    bits, power, digits = values.view(np.uint32), scratch[0], scratch[1]
    np.bitwise_and(bits, np.uint32(0x7F800000), out=power)
    np.maximum(power, np.uint32((127 - 14) << 23), out=power)
    np.add(power, np.uint32(13 << 23), out=power)
    rounded = digits.view(np.float32)
    np.abs(values, out=rounded)
    np.add(rounded, power.view(np.float32), out=rounded)
    np.subtract(digits, power, out=digits)
    # the digits include the leading 1 of a normal number, which adds one to the exponent
    np.right_shift(power, np.uint32(13), out=power)
    np.subtract(power, np.uint32((127 - 14 + 13) << 10), out=power)
    np.add(digits, power, out=digits)
    np.right_shift(bits, np.uint32(16), out=power)
    np.bitwise_and(power, np.uint32(0x8000), out=power)
    np.bitwise_or(digits, power, out=digits)
    np.copyto(sent.view(np.uint16), digits, casting="unsafe")


def _widen_float16(sent: Array, values: Array) -> bool:
    """Shift sign, exponent and digits to their float32 positions, and correct the bias; return whether all are numbers."""
    bits = values.view(np.int32)
    np.copyto(bits, sent.view(np.int16))
    np.left_shift(bits, np.int32(13), out=bits)
    np.bitwise_and(bits, np.int32(0x8FFFE000 - (1 << 32)), out=bits)
    np.multiply(values, np.float32(2.0**112), out=values)
    return _is_below(values, _OVERFLOW)
