"""MapDataset: global batches of indexed samples, like PyTorch's map-style datasets."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from mpistrat.arrays import Array, as_array, like
from mpistrat.errors import InvalidArgumentError
from mpistrat.inputs.array_spec import spec_of
from mpistrat.inputs.rows import RowDataset
from mpistrat.structures import map_leaves

__all__ = ["MapDataset", "Samples", "stack"]


class Samples(Protocol):
    """Indexed samples."""

    def __getitem__(self, index: int, /) -> Any:
        """Return the sample with this index: a nest of arrays and numbers."""

    def __len__(self) -> int:
        """Return the number of samples."""


class MapDataset(RowDataset):
    """Collates indexed samples into global batches. It can be iterated again and again.

    Each iteration is an epoch. The order depends on `seed` and the epoch's number, never on the number of replicas. A replica
    reads only its own samples; if it gets none of a batch, it reads the first sample for the shapes.

    Parameters
    ----------
    samples : Samples
        Anything with ``__getitem__`` and ``__len__``, a ``torch.utils.data.Dataset`` for example.
    batch_size : int
        Samples of a global batch: of all replicas together.
    shuffle : bool
        Whether each epoch has another order.
    seed : int
        Not negative; the same on all ranks.
    drop_remainder : bool
        Whether a last batch with fewer samples is left out.
    collate_fn : callable, optional
        Makes a batch, in memory of its own, of a list of samples; by default `stack`.

    Raises
    ------
    TypeError
        If the samples lack ``__getitem__`` or ``__len__``, or `batch_size` or `seed` is not an int.
    InvalidArgumentError
        If `batch_size` is less than 1 or `seed` negative.
    """

    def __init__(
        self,
        samples: Samples,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        drop_remainder: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        if isinstance(samples, dict) or not (hasattr(samples, "__getitem__") and hasattr(samples, "__len__")):
            raise TypeError(
                "samples must have __getitem__(number) and __len__(), as a torch.utils.data.Dataset or a list has; "
                f"got {type(samples).__name__}"
            )
        super().__init__(len(samples), batch_size, shuffle, seed, drop_remainder)
        self._samples = samples
        self._collate = collate_fn or stack

    @property
    def element_spec(self) -> Any:
        """The nest of `ArraySpec` that describes every batch; the first sample is read for it."""
        return spec_of(self._first)

    @cached_property
    def _first(self) -> Any:
        """A batch of the first sample."""
        if not len(self._samples):
            raise InvalidArgumentError("a dataset without samples has no element_spec")
        return self._collate([self._samples[0]])

    def _read(self, rows: Array) -> Any:
        if rows.size == 0:
            return map_leaves(lambda leaf: leaf[:0], self._first)
        return self._collate([self._samples[int(row)] for row in rows])

    def _describe_row(self) -> str:
        return type(self._samples).__name__


def stack(samples: list[Any]) -> Any:
    """Return a batch of samples: a nest of arrays with one row per sample.

    Raises
    ------
    InvalidArgumentError
        If samples have different shapes or structures.
    """
    try:
        return map_leaves(_stack, *samples)
    except ValueError as error:
        raise InvalidArgumentError(
            f"samples of different shapes or structures cannot be stacked: {error}. Pad them, or pass a collate_fn that does"
        ) from None


def _stack(*leaves: Any) -> Any:
    return like(np.stack([as_array(leaf) for leaf in leaves]), leaves[0])
