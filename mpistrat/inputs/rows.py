"""RowDataset: base of datasets whose rows can be read in any order."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat.arrays import Array
from mpistrat.inputs.checks import checked_int
from mpistrat.inputs.dataset import Dataset
from mpistrat.inputs.rebatch import shard_bounds

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["RowDataset"]


class RowDataset(Dataset):
    """Batches indexed rows. It can be iterated again and again.

    Parameters
    ----------
    num_rows : int
        The number of rows.
    batch_size, shuffle, seed, drop_remainder : int, bool, int, bool
        As for `ArrayDataset`.
    """

    def __init__(self, num_rows: int, batch_size: int, shuffle: bool, seed: int, drop_remainder: bool) -> None:
        self._rows = range(num_rows)
        self._batch_size = checked_int(batch_size, "batch_size", 1)
        self._seed = checked_int(seed, "seed", 0)
        self._shuffle = shuffle
        self._drop_remainder = drop_remainder

    @property
    def batch_size(self) -> int:
        """Rows of a global batch."""
        return self._batch_size

    @property
    def num_batches(self) -> int:
        """The number of global batches of an epoch."""
        return len(self)

    @property
    def num_rows(self) -> int:
        """The number of rows of an epoch."""
        return min(len(self) * self._batch_size, len(self._rows))

    def batches(self, epoch: int, replica: int = 0, num_replicas: int = 1) -> Iterator[Any]:
        """Yield a replica's rows of each global batch of an epoch; only these are read."""
        order = np.random.default_rng((self._seed, epoch)).permutation(len(self._rows)) if self._shuffle else None
        for first in range(0, len(self) * self._batch_size, self._batch_size):
            start, stop = shard_bounds(min(self._batch_size, len(self._rows) - first), replica, num_replicas)
            places = slice(first + start, first + stop)
            yield self._read(
                _numbers(self._rows[places]) if order is None else self._rows.start + self._rows.step * order[places]
            )

    def describe(self) -> str:
        """Return a description that must be the same on all ranks: rows, batches and order."""
        order = f"shuffled with seed {self._seed}" if self._shuffle else "in order"
        rest = ", remainder dropped" if self._drop_remainder else ""
        return f"{len(self._rows)} rows of {self._describe_row()}, batches of {self._batch_size}, {order}{rest}"

    @abstractmethod
    def _read(self, rows: Array) -> Any:
        """Return a batch of the rows with these indices."""

    @abstractmethod
    def _describe_row(self) -> str:
        """Return dtypes and shapes of a row."""

    def _part(self, num_shards: int, index: int) -> Self:
        part = self._copy()
        part._rows = self._rows[index::num_shards]
        return part

    def __len__(self) -> int:
        """Return the number of global batches of an epoch."""
        whole, rest = divmod(len(self._rows), self._batch_size)
        return whole + (rest > 0 and not self._drop_remainder)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._rows)} rows, {len(self)} batches of {self._batch_size})"


def _numbers(rows: range) -> Array:
    return np.arange(rows.start, rows.stop, rows.step)
