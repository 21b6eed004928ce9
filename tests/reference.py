"""The reference: random values of every rank, however they lie in memory, what each verb makes of them, and how exactly."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
HALVES = (np.dtype(np.float16), BFLOAT16)
DTYPES = (*(np.dtype(code) for code in "?bBhHiIqQefdFD"), BFLOAT16)
NO_OPS = {"b": ("SUM", "MEAN"), "c": ("MIN", "MAX")}  # by kind of dtype: what is not defined
UFUNCS = {"SUM": np.add, "MEAN": np.add, "MIN": np.minimum, "MAX": np.maximum, "PROD": np.multiply}


def _strided(array: np.ndarray) -> np.ndarray:
    if array.ndim == 0:
        return array
    wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
    wide[..., ::2] = array
    return wide[..., ::2]


def read_only(array: np.ndarray) -> np.ndarray:
    """Return an array that cannot be written to any more."""
    array.flags.writeable = False
    return array


def unaligned(array: np.ndarray) -> np.ndarray:
    """Return a copy whose first element lies at an odd address."""
    memory = np.zeros(array.nbytes + 1, np.uint8)
    view = np.frombuffer(memory.data, array.dtype, array.size, 1).reshape(array.shape)
    view[...] = array
    return view


LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "C": lambda array: array,
    "Fortran": np.asfortranarray,
    "strided": _strided,
    "backwards": lambda array: array[::-1].copy()[::-1] if array.ndim else array,
    "read-only": read_only,
    "scalar": lambda array: array if array.ndim else array[()],
    "columns": lambda array: np.moveaxis(np.ascontiguousarray(np.moveaxis(array, 0, -1)), -1, 0) if array.ndim else array,
    "broadcast": lambda array: np.broadcast_to(array[:1], array.shape) if array.ndim else array,
}


def random_values(rng: np.random.Generator, dtype: np.dtype, shape: tuple[int, ...], op: str, exact: bool) -> np.ndarray:
    """Return random values; exact ones combine to the same bits in every order."""
    if dtype.kind == "b":
        return rng.random(shape) < (0.2 if op == "MAX" else 0.8)  # so that both results occur, even with many ranks
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        # the mean of 64-bit integers is summed in 64 bits, and must not wrap around
        low, high = (info.min // 16, info.max // 16) if op == "MEAN" and dtype.itemsize == 8 else (info.min, info.max)
        return rng.integers(low, high, shape, dtype, endpoint=True)
    if dtype.kind == "c":
        return (_floats(rng, shape, op, exact) + 1j * _floats(rng, shape, op, exact)).astype(dtype)
    values = _floats(rng, shape, op, exact)
    if op in ("MIN", "MAX") and exact:
        values = np.where(rng.random(shape) < 0.1, np.nan, values)
    return values.astype(dtype)


def _floats(rng: np.random.Generator, shape: tuple[int, ...], op: str, exact: bool) -> np.ndarray:
    if op == "PROD":
        return rng.choice([-2.0, -1.0, 1.0, 2.0], shape) if exact else rng.choice([-1, 1], shape) * rng.uniform(0.5, 2, shape)
    return rng.integers(-8, 9, shape).astype(np.float64) if exact else rng.normal(size=shape) * 10


def reference(op: str, parts: list[np.ndarray], exact: bool) -> tuple[np.ndarray, np.ndarray | None]:
    """Return what the parts combine to, and by how much a result may differ; None: not at all."""
    dtype = parts[0].dtype
    if dtype.kind == "b":
        return reduce(np.logical_or if op == "MAX" else np.logical_and, parts), None
    if dtype.kind in "iu":
        return _integers(op, parts), None
    wide = np.dtype(np.complex128 if dtype.kind == "c" else np.float64)
    total = np.asarray(reduce(UFUNCS[op], [part.astype(wide) for part in parts]))
    if op in ("MIN", "MAX"):
        return total.astype(dtype), None
    if exact:
        if op == "MEAN":
            narrow = np.dtype(np.float32) if dtype in HALVES else dtype
            total = total.astype(narrow) / narrow.type(len(parts))
        return np.asarray(total, dtype), None
    mean = total / len(parts) if op == "MEAN" else total
    return mean, _bound(op, parts, mean, dtype)


# of the arrays of all ranks, or of what they are reduced to for each of them; an axis, or a root; and a rank
_RESULTS: dict[str, Callable[[Sequence[Any], Any, int], Any]] = {
    "all_reduce": lambda parts, _, rank: parts[rank],
    "reduce_scatter": lambda parts, axis, rank: np.array_split(parts[rank], len(parts), axis)[rank],
    "all_gather": lambda parts, axis, rank: np.concatenate(parts, axis),
    "broadcast": lambda parts, root, rank: parts[root],
    "gather": lambda parts, root, rank: list(parts) if rank == root else None,
    "all_to_all": lambda parts, _, rank: np.concatenate([np.array_split(part, len(parts))[rank] for part in parts]),
}


def of_verb(
    verb: str, parts: Sequence[np.ndarray], place: Any, rank: int, op: str = "", exact: bool = True
) -> tuple[Any, np.ndarray | None]:
    """Return what a rank has after a verb, which may reduce, of the arrays of all ranks, and by how much it may differ."""
    result = _RESULTS[verb]
    if not op:
        return result(parts, place, rank), None
    whole, bound = reference(op, list(parts), exact)
    of_all = lambda array: result([array] * len(parts), place, rank)  # noqa: E731
    return of_all(whole), None if bound is None else of_all(bound)


def _integers(op: str, parts: list[np.ndarray]) -> np.ndarray:
    """Combine integers of Python, and wrap around at the end as fixed-width ones do."""
    dtype = parts[0].dtype
    total = np.asarray(reduce(UFUNCS[op], [part.astype(object) for part in parts]), object)
    if op == "MEAN":
        total = np.array([abs(value) // len(parts) * (-1 if value < 0 else 1) for value in total.flat], object)
    info = np.iinfo(dtype)
    wrapped = [(int(value) - int(info.min)) % 2 ** (8 * dtype.itemsize) + int(info.min) for value in total.flat]
    return np.array(wrapped, dtype).reshape(parts[0].shape)


def _bound(op: str, parts: list[np.ndarray], result: np.ndarray, dtype: np.dtype) -> np.ndarray:
    size = len(parts)
    held = ml_dtypes.finfo(dtype)
    working = np.finfo(np.float32) if dtype in HALVES else held
    magnitude = np.abs(result) if op == "PROD" else sum(np.abs(part.astype(result.dtype)) for part in parts)
    steps = 4 * size if op == "PROD" else size
    return steps * float(working.eps) * magnitude + float(held.eps) * np.abs(result) + float(held.smallest_subnormal)


@np.errstate(all="ignore")
def check(found: Any, wanted: np.ndarray, bound: np.ndarray | None, dtype: np.dtype) -> None:
    """Fail unless an array is what it should be, within the bound if there is one."""
    assert isinstance(found, np.ndarray), type(found)
    assert (found.dtype, found.shape) == (dtype, wanted.shape)
    wide = np.complex128 if dtype.kind == "c" else np.float64
    if bound is not None:
        assert np.all(np.abs(found.astype(wide) - wanted) <= bound), (found, wanted)
    elif dtype.kind in "biu":
        assert np.array_equal(found, wanted), (found, wanted)
    else:
        assert np.array_equal(found.astype(wide), wanted.astype(wide), equal_nan=True), (found, wanted)
