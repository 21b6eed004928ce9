"""Cut batches: a global batch into the replicas' shares, or into pieces for one replica; and parts into batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any, NoReturn

import numpy as np

from mpistrat.arrays import as_array, like
from mpistrat.errors import InvalidArgumentError
from mpistrat.inputs.shard import shard_bounds
from mpistrat.structures import flatten, leaf_names, map_leaves

__all__ = ["batched", "num_rows", "pieces", "share"]


def num_rows(batch: Any) -> int:
    """Return the extent that all arrays of a batch have along their first axis.

    Raises
    ------
    InvalidArgumentError
        If there are no arrays, one has no axes, or the first extents differ: the dataset was not batched.
    """
    extents = set()
    for leaf in flatten(batch)[0]:
        shape = getattr(leaf, "shape", None)
        if not shape:
            _refuse_unbatched(batch)
        extents.add(int(shape[0]))
    if len(extents) != 1:
        _refuse_unbatched(batch)
    return extents.pop()


def share(batch: Any, replica: int, num_replicas: int) -> Any:
    """Return a replica's rows of a global batch, by the ceiling split, in arrays of their own.

    Sources may use the memory of a batch again, and replicas may write to their rows.

    Raises
    ------
    InvalidArgumentError
        If it is no batch: see `num_rows`.
    """
    return map_leaves(_copy, _cut(batch, *shard_bounds(num_rows(batch), replica, num_replicas)))


def pieces(batch: Any, replica: int, num_replicas: int) -> Iterator[Any]:
    """Yield all rows of a batch in as many pieces as there are replicas, of the sizes of the ceiling split.

    Replicas that cut batches of their own step by step see as many rows together in each step as a batch has: each begins
    with the size of its own share.

    Raises
    ------
    InvalidArgumentError
        If it is no batch: see `num_rows`.
    """
    rows = num_rows(batch)
    bounds = [shard_bounds(rows, index, num_replicas) for index in range(num_replicas)]
    sizes = [stop - start for start, stop in bounds[replica:] + bounds[:replica]]
    for size, stop in zip(sizes, accumulate(sizes), strict=True):
        yield _cut(batch, stop - size, stop)


def batched(parts: Iterable[Any], batch_size: int, drop_remainder: bool) -> Iterator[Any]:
    """Yield the rows of `parts`, nests of NumPy arrays, in batches of `batch_size`; the last may have fewer, or is dropped."""
    kept: list[Any] = []
    rows = 0
    for part in parts:
        kept.append(part)
        rows += num_rows(part)
        if rows >= batch_size:
            joined, whole = _join(kept), rows - rows % batch_size
            for first in range(0, whole, batch_size):
                yield _cut(joined, first, first + batch_size)
            kept, rows = [_cut(joined, whole, rows)], rows - whole
    if rows and not drop_remainder:
        yield _join(kept)


def _cut(batch: Any, start: int, stop: int) -> Any:
    return map_leaves(lambda leaf: leaf[start:stop], batch)


def _copy(leaf: Any) -> Any:
    # text too may be fed, which as_array refuses because no collective carries it
    return np.array(leaf) if isinstance(leaf, np.ndarray) else like(np.array(as_array(leaf)), leaf)


def _join(parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else map_leaves(lambda *leaves: np.concatenate(leaves), *parts)


def _refuse_unbatched(batch: Any) -> NoReturn:
    found = ", ".join(
        f"{name} has shape {tuple(leaf.shape)}" if hasattr(leaf, "shape") else f"{name} is {leaf!r}"
        for name, leaf in zip(leaf_names(batch, "element"), flatten(batch)[0], strict=True)
    )
    raise InvalidArgumentError(
        "every element of a dataset must be a batch, a nest of arrays with the same number of rows along their first axis; got "
        f"{found or 'an element without arrays'}. Batch the dataset with the global batch size, "
        "mpistrat.ArrayDataset(arrays, batch_size) or mpistrat.MapDataset(samples, batch_size) for example"
    )
