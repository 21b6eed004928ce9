"""Local checks of the arguments of collective calls, and the texts that describe these calls."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from mpistrat.arrays import Array, is_on_device
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.communicator.shapes import name_of
from mpistrat.device.abstract import address
from mpistrat.errors import InvalidArgumentError, UnsupportedDtypeError
from mpistrat.reduction import ReduceOp

__all__ = [
    "can_write_directly",
    "check_array",
    "check_gather",
    "check_num_packs",
    "check_out",
    "check_parts",
    "check_root",
    "check_target",
    "copy_overlapping",
    "describe",
    "describe_all_reduce",
    "for_each",
]


def for_each(act: Callable[[Array, Array | None], Any], arrays: Any, out: Any = None) -> Any:
    """Apply `act` to one array and its target, or to each array of a list in turn."""
    if not isinstance(arrays, (list, tuple)):
        return act(arrays, out)
    targets = [None] * len(arrays) if out is None else out
    return [act(array, target) for array, target in zip(arrays, targets, strict=True)]


def check_array(array: object) -> None:
    """Check that a value is a NumPy or CuPy array, or a NumPy scalar.

    Raises
    ------
    UnsupportedDtypeError
        If it is not.
    """
    if not (isinstance(array, (np.ndarray, np.generic)) or is_on_device(array)):
        raise UnsupportedDtypeError(
            f"a communicator takes arrays of NumPy and CuPy; got {type(array).__name__}: pass numpy.asarray(x), or "
            "cupy.from_dlpack(x) of what is on the GPU"
        )


def check_gather(array: Array, axis: int, verb: str = "all_gather") -> int:
    """Return `axis` as a non-negative number.

    Raises
    ------
    InvalidArgumentError
        If the array has no axes, or `axis` is out of range.
    TypeError
        If `axis` is not an integer.
    """
    if array.ndim == 0:
        raise InvalidArgumentError(f"{verb} needs arrays with at least one axis; got a scalar: pass x.reshape(1)")
    axis = _index(axis, "axis")
    if not -array.ndim <= axis < array.ndim:
        accepted = f"-{array.ndim} to {array.ndim - 1} are accepted"
        raise InvalidArgumentError(f"axis {axis} is out of range for an array of shape {array.shape}: {accepted}")
    return axis % array.ndim


def check_num_packs(num_packs: int | None) -> int | None:
    """Return `num_packs`.

    Raises
    ------
    InvalidArgumentError
        If it is negative.
    """
    if num_packs is not None and num_packs < 0:
        raise InvalidArgumentError(f"num_packs must be None, 0 (each array by itself) or positive; got {num_packs}")
    return num_packs


def check_root(root: int, num_replicas: int) -> None:
    """Check that `root` is the number of a replica.

    Raises
    ------
    InvalidArgumentError
        If it is not.
    TypeError
        If it is not an integer.
    """
    if not 0 <= _index(root, "root") < num_replicas:
        raise InvalidArgumentError(f"root must be a replica, 0 to {num_replicas - 1}; got {root}")


def check_parts(arrays: Sequence[Array], num_replicas: int) -> None:
    """Check the arrays of an all-to-all: one for each replica, all of one dtype, and of one shape but for the first axis.

    Raises
    ------
    InvalidArgumentError
        If not.
    """
    if len(arrays) != num_replicas:
        raise InvalidArgumentError(f"all_to_all needs one array for each of the {num_replicas} replicas; got {len(arrays)}")
    if len({(array.dtype, array.ndim, array.shape[1:]) for array in arrays}) > 1:
        found = ", ".join(f"{array.dtype} {array.shape}" for array in arrays)
        raise InvalidArgumentError(
            f"all_to_all needs arrays of one dtype that differ in their first extent at most; got {found}"
        )


def check_out(out: Sequence[Array], arrays: Sequence[Array]) -> list[Array]:
    """Return `out` as a list, after checking that the results for `arrays` can be written to it.

    Raises
    ------
    InvalidArgumentError
        If its length differs, it holds an array twice, or an array in it is refused by `check_target`.
    """
    if len(out) != len(arrays):
        raise InvalidArgumentError(f"out must hold one array for each of the {len(arrays)} that are reduced; got {len(out)}")
    if len(set(map(id, out))) < len(out):
        raise InvalidArgumentError("out holds an array twice, and each result needs one of its own; pass different arrays")
    for target, array in zip(out, arrays, strict=True):
        check_target(target, array)
    return list(out)


def check_target(target: Array, array: Array, shape: tuple[int, ...] | None = None) -> None:
    """Check that the result for an array can be written to `target`.

    Parameters
    ----------
    target, array : ndarray
        The target, and the array that is communicated.
    shape : tuple of int, optional
        Shape of the result, -1 for an extent that is not known yet; that of `array` by default.

    Raises
    ------
    InvalidArgumentError
        If `target` is in other memory than `array`, has another shape or dtype, or is not C-contiguous and writable.
    """
    check_array(target)
    wanted = array.shape if shape is None else shape
    # CuPy has no read-only arrays
    contiguous, writable = target.flags.c_contiguous, getattr(target.flags, "writeable", True)
    if not (_has_shape(target, wanted) and target.dtype == array.dtype and contiguous and writable):
        text = str(wanted).replace("-1", "any")
        raise InvalidArgumentError(
            f"out must be a writable, C-contiguous {array.dtype} array of shape {text}; "
            f"got {target.dtype} {target.shape}, contiguous={contiguous}, writable={writable}"
        )
    if is_on_device(target) != is_on_device(array):
        where = ["in host memory", "on a GPU"][:: -1 if is_on_device(array) else 1]
        raise InvalidArgumentError(f"out must lie where the array does: the array is {where[0]}, out {where[1]}")


def copy_overlapping(arrays: Sequence[Array], out: Sequence[Array]) -> list[Array]:
    """Return `arrays`, copied if one overlaps with the target of another, which may be written before the array is read."""
    ranges = [_bounds(target) for target in out if target.size]
    ranges += [_bounds(array) for index, array in enumerate(arrays) if array.size and array is not out[index]]
    last, overlaps = 0, False
    for start, stop in sorted(ranges):
        overlaps = overlaps or start < last
        last = max(last, stop)
    if not overlaps:
        return list(arrays)
    return [array if array is out[index] else array.copy() for index, array in enumerate(arrays)]


def can_write_directly(target: Array, source: Array) -> bool:
    """Return whether MPI can reduce `source` straight into `target`; if not, the slow path copies or raises."""
    if type(target) is not type(source) or target.shape != source.shape or target.dtype is not source.dtype:
        return False
    if not (target.flags.carray and source.flags.aligned):
        return False
    # arrays that own their memory do not overlap, unless they are one
    owners = source.base is None and target.base is None and source is not target
    return owners or not np.may_share_memory(source, target)


def describe(arrays: Sequence[Array]) -> str:
    """Return the dtypes and shapes of arrays, and which of them are on a GPU."""
    return ", ".join(f"{name_of(array.dtype)} {array.shape}{' on a GPU' if is_on_device(array) else ''}" for array in arrays)


def describe_all_reduce(
    op: ReduceOp, arrays: Sequence[Array], options: CommunicationOptions, num_packs: int | None, axis: int | None = None
) -> str:
    """Return the arguments of an all-reduce or reduce-scatter that must be the same on all replicas."""
    shaping = {name: getattr(options, name) for name in ("wire_dtype", "error_feedback", "deterministic", "intra_dtype")}
    shaping["num_packs"] = num_packs
    others = "".join(f", {name}={value}" for name, value in shaping.items() if value not in (None, False))
    always = f"algorithm={options.algorithm}, bytes_per_pack={options.bytes_per_pack}"
    along = "" if axis is None else f"axis={axis}, "
    return f"({op.name}, [{describe(arrays)}], {along}{always}{others})"


def _has_shape(array: Array, wanted: tuple[int, ...]) -> bool:
    if array.shape == wanted:
        return True
    return array.ndim == len(wanted) and all(want in (-1, found) for want, found in zip(wanted, array.shape, strict=True))


def _bounds(array: Array) -> tuple[int, int]:
    """Return the first address of an array's memory, and the first address after it."""
    if not is_on_device(array):
        return byte_bounds(array)
    first, reach = address(array), [(extent - 1) * step for extent, step in zip(array.shape, array.strides, strict=True)]
    return first + sum(min(step, 0) for step in reach), first + sum(max(step, 0) for step in reach) + array.itemsize


def _index(value: int, argument: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{argument} must be an int; got {value!r}") from None
