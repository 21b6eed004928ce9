"""Cut batches: a global batch into the replicas' shares, or into pieces for one replica; and parts into batches.

Shares are the ceiling split. Rows keep their order. Every replica but the last ones has the same number; the last may have
fewer, or none:

==============  ========  ==================================
rows            replicas  handed out
==============  ========  ==================================
0 1 2 3         2         0 1 | 2 3
0 1 2 3         3         0 1 | 2 3 | nothing
0 1 2 3         5         0 | 1 | 2 | 3 | nothing
==============  ========  ==================================
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any, NoReturn

import numpy as np

from mpistrat.arrays import Array, as_array, like
from mpistrat.errors import InvalidArgumentError
from mpistrat.structures import flatten, leaf_names, map_leaves

__all__ = ["batched", "num_rows", "pieces", "readable", "shard_bounds", "share"]


def shard_bounds(num_rows: int, replica: int, num_replicas: int) -> tuple[int, int]:
    """Return the first row of a replica's share of a batch, and the row after its last."""
    share = -(-num_rows // num_replicas)
    return min(replica * share, num_rows), min((replica + 1) * share, num_rows)


def readable(leaf: Any) -> Array:
    """Return what is fed as an array: what `as_array` reads, and text and dates, which no collective carries.

    Raises
    ------
    InvalidArgumentError
        If its memory is on a device that is not this replica's.
    UnsupportedDtypeError
        If it is no array, or has a mask.
    """
    return np.asarray(leaf) if type(leaf) in (np.ndarray, np.memmap) else as_array(leaf)


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
    """Yield the rows of `parts`, nests of NumPy arrays, in batches of `batch_size`; the last may have fewer, or is dropped.

    A batch within one part is a view of it. Of a part nothing is held when the next one is asked for: it may use its memory.
    """
    kept: list[Any] = []
    missing = batch_size
    for part in parts:
        first, end = 0, num_rows(part)
        while end - first >= missing:
            yield _join([*kept, _cut(part, first, first + missing)])
            kept, first, missing = [], first + missing, batch_size
        if first < end:
            kept.append(map_leaves(lambda leaf: readable(leaf).copy(), _cut(part, first, end)))
            missing -= end - first
    if kept and not drop_remainder:
        yield _join(kept)


def _cut(batch: Any, start: int, stop: int) -> Any:
    return map_leaves(lambda leaf: leaf[start:stop], batch)


def _copy(leaf: Any) -> Any:
    return like(readable(leaf).copy(), leaf)


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
