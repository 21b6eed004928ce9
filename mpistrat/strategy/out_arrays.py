"""The arrays of `out=`, of whichever library: what results are written to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat.arrays import Array, as_array
from mpistrat.device.binding import bound_device
from mpistrat.device.interop import is_a
from mpistrat.errors import InvalidArgumentError
from mpistrat.structures import Structure, flatten, leaf_names

__all__ = ["read_out"]


def read_out(out: Any, structure: Structure, leaves: Sequence[Any], arrays: Sequence[Array]) -> tuple[list[Array], list[Array]]:
    """Return the memory of the leaves of `out`, and what is reduced: for a leaf that is in both, one array in both lists.

    Parameters
    ----------
    out : nest of array
        What results are written to.
    structure : Structure
        That of the value.
    leaves, arrays : sequence
        The leaves of the value, and what was read of them.

    Raises
    ------
    InvalidArgumentError
        If `out` has another structure, or holds something else than arrays to write to.
    """
    targets, found = flatten(out)
    if found != structure:
        raise InvalidArgumentError(f"out must have the structure of the value, {structure}; got {found}")
    memory = [_memory(target, name) for target, name in zip(targets, leaf_names(out, "out"), strict=True)]
    given = zip(targets, leaves, memory, arrays, strict=True)
    return memory, [each if target is leaf else array for target, leaf, each, array in given]


def _memory(target: Any, name: str) -> Array:
    """Return the memory of an array, which must be there already: what would be a copy of it is refused."""
    device = bound_device()
    is_tensor = is_a(target, "torch", "Tensor")
    is_array = isinstance(target, np.ndarray) or (device is not None and isinstance(target, device.array_module.ndarray))
    if not (is_tensor or is_array) or (is_tensor and (target.is_conj() or target.is_neg())):
        raise InvalidArgumentError(
            f"{name} must be an array to write to: NumPy's, CuPy's, or a tensor of PyTorch; got {type(target).__name__}"
        )
    return as_array(target, name)
