"""ArraySpec: shape and dtype of the arrays of an element, known before the element or in place of one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpistrat.arrays import as_array, like
from mpistrat.inputs.rebatch import num_rows
from mpistrat.structures import map_leaves

__all__ = ["ArraySpec", "empty_like", "spec_of"]


@dataclass(frozen=True)
class ArraySpec:
    """What the arrays in one place of every element have in common.

    Attributes
    ----------
    shape : tuple
        Extents; None for the rows of a batch, which need not always be as many.
    dtype : dtype
        Type of one array element.
    """

    shape: tuple[int | None, ...]
    dtype: np.dtype[Any]


def spec_of(batch: Any) -> Any:
    """Return the nest of specs that describes a batch and all like it.

    Raises
    ------
    InvalidArgumentError
        If it is not a batch: see `rebatch.num_rows`.
    """
    num_rows(batch)
    return map_leaves(lambda leaf: ArraySpec((None, *map(int, leaf.shape[1:])), _dtype(leaf)), batch)


def empty_like(batch: Any) -> Any:
    """Return a batch of no rows that is otherwise like `batch`, in arrays of the same kinds; it keeps none of its memory."""
    return map_leaves(lambda spec, leaf: like(np.empty((0, *spec.shape[1:]), spec.dtype), leaf), spec_of(batch), batch)


def _dtype(leaf: Any) -> np.dtype[Any]:
    dtype = leaf.dtype
    return dtype if isinstance(dtype, np.dtype) else as_array(leaf[:0]).dtype
