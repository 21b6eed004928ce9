"""The names of the kernel instances of `kernels.cu`, for each dtype and operation. Pure."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from mpistrat.reduction import HALF_DTYPES, ReduceOp

__all__ = ["TYPES", "computed_in", "divide_kernel", "fold_into_kernel", "fold_kernel", "move_kernel", "real_dtype"]

TYPES: dict[np.dtype[Any], str] = {
    np.dtype(kind): name
    for kind, name in (
        (np.bool_, "uint8"),
        (np.int8, "signed char"),
        (np.uint8, "uint8"),
        (np.int16, "short"),
        (np.uint16, "uint16"),
        (np.int32, "int"),
        (np.uint32, "uint32"),
        (np.int64, "long long"),
        (np.uint64, "uint64"),
        (np.float16, "float16"),
        (ml_dtypes.bfloat16, "bfloat16"),
        (np.float32, "float"),
        (np.float64, "double"),
        (np.complex64, "Complex<float>"),
        (np.complex128, "Complex<double>"),
    )
}

_FOLDS = {ReduceOp.SUM: "Sum", ReduceOp.MEAN: "Sum", ReduceOp.MIN: "Min", ReduceOp.MAX: "Max", ReduceOp.PROD: "Prod"}
_FOLDS_OF_BOOL = {ReduceOp.SUM: "Max", ReduceOp.MAX: "Max", ReduceOp.MIN: "Min", ReduceOp.PROD: "Min"}


def move_kernel(source: np.dtype[Any], target: np.dtype[Any]) -> str:
    """Return the kernel that copies many arrays, cast from one dtype to another."""
    return f"move_segments<{TYPES[source]}, {TYPES[target]}>"


def fold_kernel(dtype: np.dtype[Any], op: ReduceOp) -> str:
    """Return the kernel that combines a range of several ranks' memory."""
    return f"fold_peers<{TYPES[dtype]}, {_fold(dtype, op)}>"


def fold_into_kernel(dtype: np.dtype[Any], op: ReduceOp) -> str:
    """Return the kernel that combines a received array with another one, in place."""
    return f"fold_into<{TYPES[dtype]}, {_fold(dtype, op)}>"


def divide_kernel(dtype: np.dtype[Any]) -> str:
    """Return the kernel that divides values in place, complex ones as twice as many real ones."""
    return f"divide_values<{TYPES[real_dtype(dtype)]}>"


def real_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of the two parts of a complex number; that of other values is their own."""
    return np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype


def computed_in(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which kernels compute with values: float32 for 16-bit floats."""
    return np.dtype(np.float32) if dtype in HALF_DTYPES else dtype


def _fold(dtype: np.dtype[Any], op: ReduceOp) -> str:
    return (_FOLDS_OF_BOOL if dtype.kind == "b" else _FOLDS)[op]
