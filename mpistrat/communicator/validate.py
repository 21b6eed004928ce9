"""Local checks of the arguments of collective calls, and the texts that describe these calls."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from mpistrat.arrays import Array, are_disjoint, as_array, as_target, is_aligned, is_on_device, like
from mpistrat.errors import InvalidArgumentError, UnsupportedDtypeError
from mpistrat.lazy import MPI


def read_arrays(values: Sequence[Any], out: object = None) -> tuple[list[Array], list[Array] | None]:
    """Return values as aligned arrays, and the memory of `out`: for a value that is in both, one array in both lists."""
    if out is None:
        return [_read(value, "an array") for value in values], None
    if not isinstance(out, (list, tuple)) or len(out) != len(values):
        found = len(out) if isinstance(out, (list, tuple)) else type(out).__name__
        raise InvalidArgumentError(f"out must hold one array for each of the {len(values)} that are passed; got {found}")
    targets = [as_target(target) for target in out]
    if len(out) > 1 and not are_disjoint(targets):
        raise InvalidArgumentError("out holds an array twice, or arrays that overlap: each result needs memory of its own")
    pairs = zip(values, out, targets, strict=True)
    return [memory if value is target else _read(value, "an array") for value, target, memory in pairs], targets


def alike(results: Sequence[Array], values: Sequence[Any], out: Sequence[Any] | None) -> list[Any]:
    """Return results as arrays of the libraries of the values, or `out`, where they have been written to."""
    # of a tensor in `out` too: the streams of its own library wait for what was written
    found = list(map(like, results, values if out is None else out))
    return found if out is None else list(out)


def check_comm(comm: object) -> None:
    """Check that it is an intracommunicator."""
    if comm == MPI.COMM_NULL:
        raise InvalidArgumentError(
            "a Communicator is made by the ranks that are in it; this rank got MPI.COMM_NULL, so it is not among them.\n"
            "    incorrect:  comm = mpistrat.Communicator(sub)\n"
            "    correct:    if sub != MPI.COMM_NULL: comm = mpistrat.Communicator(sub)"
        )
    if not isinstance(comm, MPI.Intracomm):
        raise InvalidArgumentError(f"a Communicator needs an intracommunicator, like MPI.COMM_WORLD; got {type(comm).__name__}")


def check_gather(array: Array, axis: int, verb: str = "all_gather") -> None:
    """Check that an array has an axis of this number."""
    if array.ndim == 0:
        raise InvalidArgumentError(f"{verb} needs arrays with at least one axis; got a scalar: pass x.reshape(1)")
    axis = checked_int(axis, "axis")
    if not -array.ndim <= axis < array.ndim:
        accepted = f"-{array.ndim} to {array.ndim - 1} are accepted"
        raise InvalidArgumentError(f"axis {axis} is out of range for an array of shape {array.shape}: {accepted}")


def check_parts(arrays: Sequence[Array], num_replicas: int) -> None:
    """Check the arrays of an all-to-all: one for each replica, all of one dtype, and of one shape but for the first axis."""
    if len(arrays) != num_replicas:
        raise InvalidArgumentError(f"all_to_all needs one array for each of the {num_replicas} replicas; got {len(arrays)}")
    if len({(array.dtype, array.ndim, array.shape[1:]) for array in arrays}) > 1:
        found = ", ".join(f"{array.dtype} {array.shape}" for array in arrays)
        raise InvalidArgumentError(f"all_to_all needs arrays of one dtype that differ in the first extent alone; got {found}")


def check_target(target: Array, array: Array, shape: tuple[int, ...] | None = None) -> None:
    """Check that the result for an array can be written to `target`; in `shape`, -1 is an extent that is not known yet."""
    wanted = array.shape if shape is None else shape
    # CuPy has no read-only arrays
    contiguous, writable = target.flags.c_contiguous, getattr(target.flags, "writeable", True)
    aligned = is_aligned(target)
    if not (_has_shape(target, wanted) and target.dtype == array.dtype and contiguous and writable and aligned):
        text = str(wanted).replace("-1", "any")
        raise InvalidArgumentError(
            f"out must be a writable, C-contiguous {array.dtype} array of shape {text}; "
            f"got {target.dtype} {target.shape}, contiguous={contiguous}, writable={writable}, aligned={aligned}"
        )
    if is_on_device(target) != is_on_device(array):
        where = ["in host memory", "on a GPU"][:: -1 if is_on_device(array) else 1]
        raise InvalidArgumentError(f"out must lie where the array does: the array is {where[0]}, out {where[1]}")


@lru_cache(1024)
def name_of(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype, which NumPy composes anew each time."""
    return str(dtype)


def _read(value: Any, name: str) -> Array:
    if isinstance(value, (list, tuple)):
        raise UnsupportedDtypeError("a communicator takes an array or a list of arrays; got a list in a list: use a strategy")
    array = as_array(value, name)
    return array if is_aligned(array) else array.copy()


def _has_shape(array: Array, wanted: tuple[int, ...]) -> bool:
    if array.shape == wanted:
        return True
    return array.ndim == len(wanted) and all(want in (-1, found) for want, found in zip(wanted, array.shape, strict=True))


def checked_index(value: Any, argument: str, count: int) -> int:
    """Return `value` as an int, after checking that it is the number of one of so many."""
    number = checked_int(value, argument)
    if not 0 <= number < count:
        raise InvalidArgumentError(f"{argument} must be one of 0 to {count - 1}; got {number}")
    return number


def checked_int(value: Any, argument: str, least: int | None = None) -> int:
    """Return `value` as an int, after checking that it is one, and not below the least that is accepted."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{argument} must be an int; got {value!r}") from None
    if least is not None and number < least:
        raise InvalidArgumentError(f"{argument} must be at least {least}; got {number}")
    return number
