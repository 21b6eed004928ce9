"""ArraySpec: shape and dtype of an array in the elements of a dataset."""

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
    """The shape and dtype that one leaf has in every element.

    Attributes
    ----------
    shape : tuple
        Extents; None for the rows of a batch, whose number may vary.
    dtype : dtype
        Type of one array element.
    """

    shape: tuple[int | None, ...]
    dtype: np.dtype[Any]


def spec_of(batch: Any) -> Any:
    """Return the nest of specs of a batch.

    Raises
    ------
    InvalidArgumentError
        If it is not a batch: see `rebatch.num_rows`.
    """
    num_rows(batch)
    return map_leaves(lambda leaf: ArraySpec((None, *map(int, leaf.shape[1:])), _dtype(leaf)), batch)


def empty_like(batch: Any) -> Any:
    """Return a batch like `batch`, but without rows, in new arrays of the same kinds."""
    return map_leaves(lambda spec, leaf: like(np.empty((0, *spec.shape[1:]), spec.dtype), leaf), spec_of(batch), batch)


def _dtype(leaf: Any) -> np.dtype[Any]:
    dtype = leaf.dtype
    return dtype if isinstance(dtype, np.dtype) else as_array(leaf[:0]).dtype
