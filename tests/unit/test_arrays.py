"""Arrays: what counts as one, without a copy where possible, and what is refused."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mpistrat.arrays import as_array
from mpistrat.errors import UnsupportedDtypeError


@pytest.mark.parametrize("dtype", ["?", "i1", "u8", "f2", "f8", "c8", ml_dtypes.bfloat16])
def test_an_array_is_itself(dtype: Any) -> None:
    array = np.zeros((2, 3), dtype)[:, ::-1]
    assert as_array(array) is array


class SpeaksDlpack:
    def __init__(self) -> None:
        self.array = np.arange(3.0)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.array

    def __dlpack__(self, **arguments: Any) -> Any:
        return self.array.__dlpack__(**arguments)


@pytest.mark.parametrize(
    ("value", "shape", "dtype"),
    [
        (3, (), "int64"),
        (2.5, (), "float64"),
        (True, (), "bool"),
        (1j, (), "complex128"),
        ([[1, 2], [3, 4]], (2, 2), "int64"),
        ([], (0,), "float64"),
        (np.float32(1), (), "float32"),
        (range(3), (3,), "int64"),
        (SpeaksDlpack(), (3,), "float64"),
    ],
)
def test_what_is_like_an_array_becomes_one(value: Any, shape: tuple[int, ...], dtype: str) -> None:
    array = as_array(value)
    assert (array.shape, array.dtype.name) == (shape, dtype)


def test_the_memory_of_others_is_shared() -> None:
    value = SpeaksDlpack()
    assert np.shares_memory(as_array(value), value.array)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (None, "object"),
        ("text", "<U4"),
        ([object()], "object"),
        (np.array(["a"]), "<U1"),
        (np.array([b"a"]), r"\|S1"),
        (np.array(["2024-01-01"], "M8[D]"), r"datetime64\[D\]"),
        (np.array([1], "m8[s]"), r"timedelta64\[s\]"),
        (np.zeros(2, "f4,i4"), r"\[\('f0', '<f4'\), \('f1', '<i4'\)\]"),
        ({"a": 1}, "object"),
    ],
)
def test_what_holds_no_numbers_is_refused(value: Any, found: str) -> None:
    message = rf"args\[0\] has dtype {found}, which no collective can carry; accepted are arrays of bool, integers, float16"
    with pytest.raises(UnsupportedDtypeError, match=message):
        as_array(value, "args[0]")


def test_a_ragged_list_is_refused() -> None:
    with pytest.raises(
        UnsupportedDtypeError, match=r"value cannot be read as an array: .*inhomogeneous.*; pass an array of numbers"
    ):
        as_array([[1, 2], [3]])
