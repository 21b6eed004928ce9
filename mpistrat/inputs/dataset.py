"""ArrayDataset: global batches of rows of arrays in memory or in files."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import numpy as np

from mpistrat.arrays import Array
from mpistrat.errors import InvalidArgumentError
from mpistrat.inputs.distribute import DistributedDataset
from mpistrat.inputs.shard import shard_bounds
from mpistrat.strategy.base import Strategy
from mpistrat.structures import flatten, leaf_names, rebuild

__all__ = ["ArrayDataset"]


class ArrayDataset:
    """Cuts arrays into global batches along their first axis. It can be iterated again and again.

    Each iteration is an epoch. The order depends on `seed` and the epoch's number, never on the number of replicas, so any
    number of replicas sees the same global batches.

    Parameters
    ----------
    arrays : nest of array_like
        Equal extents along the first axis. Memory maps are read row by row, and by a replica only where the rows are its own.
    batch_size : int
        Rows of a global batch: of all replicas together.
    shuffle : bool
        Whether each epoch has another order.
    seed : int
        Not negative; the same on all ranks.
    drop_remainder : bool
        Whether a last batch with fewer rows is left out.

    Raises
    ------
    InvalidArgumentError
        If there are no arrays, one has no axis, the first extents differ, `batch_size` is less than 1 or `seed` negative.
    """

    def __init__(
        self, arrays: Any, batch_size: int, shuffle: bool = False, seed: int = 0, drop_remainder: bool = False
    ) -> None:
        leaves, self._structure = flatten(arrays)
        self._arrays = [np.asarray(leaf) for leaf in leaves]
        self._num_rows = _common_extent(self._arrays, leaf_names(arrays, "arrays"))
        self._batch_size = _integer(batch_size, "batch_size", 1)
        self._seed = _integer(seed, "seed", 0)
        self._shuffle = shuffle
        self._drop_remainder = drop_remainder
        self._epoch = 0

    @property
    def batch_size(self) -> int:
        """Rows of a global batch."""
        return self._batch_size

    def batches(self, epoch: int, replica: int = 0, num_replicas: int = 1) -> Iterator[Any]:
        """Yield a replica's share of each global batch of an epoch; only these rows are read.

        Parameters
        ----------
        epoch : int
            Which order to use, where the dataset is shuffled.
        replica, num_replicas : int
            Whose share; by default the whole batches.
        """
        order = np.random.default_rng((self._seed, epoch)).permutation(self._num_rows) if self._shuffle else None
        for first in range(0, len(self) * self._batch_size, self._batch_size):
            start, stop = shard_bounds(min(self._batch_size, self._num_rows - first), replica, num_replicas)
            rows = np.arange(first + start, first + stop) if order is None else order[first + start : first + stop]
            yield rebuild(self._structure, [_rows(array, rows) for array in self._arrays])

    def distribute(self, strategy: Strategy) -> DistributedDataset:
        """Return what ``strategy.experimental_distribute_dataset(dataset)`` returns."""
        return DistributedDataset(self, strategy)

    def describe(self) -> str:
        """Return what must be the same on all ranks: rows, batches, order, structure, shapes of a row and dtypes."""
        rows = ", ".join(f"{array.dtype} {array.shape[1:]}" for array in self._arrays)
        order = f"shuffled with seed {self._seed}" if self._shuffle else "in order"
        rest = ", remainder dropped" if self._drop_remainder else ""
        return f"{self._num_rows} rows of [{rows}] in {self._structure}, batches of {self._batch_size}, {order}{rest}"

    def __iter__(self) -> Iterator[Any]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        return self.batches(epoch)

    def __len__(self) -> int:
        """Return the number of global batches of an epoch."""
        whole, rest = divmod(self._num_rows, self._batch_size)
        return whole + (rest > 0 and not self._drop_remainder)

    def __repr__(self) -> str:
        return f"ArrayDataset({self._num_rows} rows, {len(self)} batches of {self._batch_size})"


def _rows(array: Array, rows: Array) -> Array:
    """Return these rows as an array of their own; of a memory map nothing else is read."""
    return np.asarray(array.take(rows, axis=0))


def _common_extent(arrays: list[Array], names: list[str]) -> int:
    if not arrays:
        raise InvalidArgumentError("a dataset needs at least one array; got an empty structure")
    for array, name in zip(arrays, names, strict=True):
        if array.ndim == 0:
            raise InvalidArgumentError(
                f"{name} is a scalar; a dataset cuts arrays along their first axis. A list counts as a structure: "
                "np.array(list) makes an array of it"
            )
    extents = [len(array) for array in arrays]
    if len(set(extents)) > 1:
        found = ", ".join(f"{name} has {extent}" for name, extent in zip(names, extents, strict=True))
        raise InvalidArgumentError(f"all arrays of a dataset need the same number of rows; {found}")
    return extents[0]


def _integer(value: int, argument: str, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{argument} must be an int; got {value!r}") from None
    if number < least:
        raise InvalidArgumentError(f"{argument} must be at least {least}; got {number}")
    return number
