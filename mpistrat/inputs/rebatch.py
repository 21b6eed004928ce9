"""Split and rebatch: a global batch into the rows of each replica, and parts of any size into batches.

Rows keep their order. Shares are as equal as possible, the first ones longer by one row:

==============  ========  ==================================
rows            replicas  shares
==============  ========  ==================================
0 1 2 3         2         0 1 | 2 3
0 1 2 3         3         0 1 | 2 | 3
0 1 2 3         5         0 | 1 | 2 | 3 | nothing
==============  ========  ==================================
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, cycle, pairwise
from typing import Any

import numpy as np

from mpistrat.arrays import Array, as_array, like, part_bounds
from mpistrat.communicator.validate import checked_int
from mpistrat.errors import InvalidArgumentError
from mpistrat.structures import flatten, leaf_names, map_leaves

_MOST_VIRTUAL_REPLICAS = 1 << 16  # each batch has a bound, and `sum_of_parts` a call, for each of them


def shard_bounds(num_rows: int, replica: int, num_replicas: int, count: int = 1) -> tuple[int, int]:
    """Return the bounds [start, stop) of the rows of `count` replicas in a batch, from `replica` on."""
    bounds = part_bounds(num_rows, num_replicas)
    return bounds[replica], bounds[replica + count]


def own_parts(virtual_replicas: Any, rank: int, num_ranks: int) -> range:
    """Return the virtual replicas that a rank computes."""
    if not num_ranks <= checked_int(virtual_replicas, "virtual_replicas", 1) <= _MOST_VIRTUAL_REPLICAS:
        raise InvalidArgumentError(
            f"virtual_replicas must be at least {num_ranks}, one for each rank, and at most {_MOST_VIRTUAL_REPLICAS}; got "
            f"{virtual_replicas}"
        )
    return range(*shard_bounds(virtual_replicas, rank, num_ranks))


def share_sizes(num_rows: int, replica: int, num_replicas: int) -> list[int]:
    """Return the sizes of the shares of a batch, rotated to begin with that of a replica: together they are always a batch."""
    bounds = part_bounds(num_rows, num_replicas)
    sizes = [stop - start for start, stop in pairwise(bounds)]
    return sizes[replica:] + sizes[:replica]


def readable(leaf: Any) -> Array:
    """Return a leaf as an array: unlike `as_array`, also arrays of text and dates, which collectives do not support."""
    return np.asarray(leaf) if type(leaf) in (np.ndarray, np.memmap) else as_array(leaf)


def num_rows(batch: Any) -> int:
    """Return the number of rows of a batch: the extent of all its arrays along the first axis."""
    leaves = flatten(batch)[0]
    extents = {tuple(getattr(leaf, "shape", ())[:1]) for leaf in leaves}
    if len(extents) == 1 and extents != {()}:
        return int(*extents.pop())
    found = ", ".join(
        f"{name} has shape {tuple(leaf.shape)}" if hasattr(leaf, "shape") else f"{name} is {leaf!r}"
        for name, leaf in zip(leaf_names(batch, "element"), leaves, strict=True)
    )
    raise InvalidArgumentError(
        "every element of a dataset must be a batch, a nest of arrays with the same number of rows along their first axis; got "
        f"{found or 'an element without arrays'}. Batch the dataset with the global batch size, "
        "mpistrat.ArrayDataset(arrays, batch_size) or mpistrat.MapDataset(samples, batch_size) for example"
    )


def share(batch: Any, replica: int, num_replicas: int, count: int = 1) -> Any:
    """Return the rows of replicas in a global batch, copied: sources reuse memory, and replicas may write to it."""
    return map_leaves(_copy, _cut(batch, *shard_bounds(num_rows(batch), replica, num_replicas, count)))


def shares(batch: Any, replica: int, num_replicas: int) -> Iterator[Any]:
    """Yield all shares of a batch, in the order of `share_sizes`."""
    sizes = share_sizes(num_rows(batch), replica, num_replicas)
    for size, stop in zip(sizes, accumulate(sizes), strict=True):
        yield _cut(batch, stop - size, stop)


def batched(parts: Iterable[Any], sizes: Iterable[int], drop_remainder: bool) -> Iterator[Any]:
    """Yield the rows of `parts` in batches of these sizes, cyclically; the last may have fewer rows, or is dropped."""
    kept: list[Any] = []
    coming = cycle(sizes)
    missing = next(coming)
    for part in parts:
        first, end = 0, num_rows(part)
        while end - first >= missing:
            yield _join([*kept, _cut(part, first, first + missing)])
            kept, first, missing = [], first + missing, next(coming)
        if first < end:  # copied, because the next part may reuse the memory
            kept.append(map_leaves(_copy, _cut(part, first, end)))
            missing -= end - first
    if kept and not drop_remainder:
        yield _join(kept)


def _cut(batch: Any, start: int, stop: int) -> Any:
    return map_leaves(lambda leaf: leaf[start:stop], batch)


def _copy(leaf: Any) -> Any:
    return like(readable(leaf).copy(), leaf)


def _join(parts: list[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    return map_leaves(lambda *leaves: like(np.concatenate([*map(readable, leaves)]), leaves[0]), *parts)


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
    """Return the nest of specs of a batch."""
    num_rows(batch)
    return map_leaves(lambda leaf: ArraySpec((None, *map(int, leaf.shape[1:])), _dtype(leaf)), batch)


def empty_like(batch: Any) -> Any:
    """Return a batch like `batch`, but without rows, in new arrays of the same kinds."""
    return map_leaves(lambda spec, leaf: like(np.empty((0, *spec.shape[1:]), spec.dtype), leaf), spec_of(batch), batch)


def _dtype(leaf: Any) -> np.dtype[Any]:
    dtype = leaf.dtype
    return dtype if isinstance(dtype, np.dtype) else as_array(leaf[:0]).dtype
