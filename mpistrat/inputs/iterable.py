"""IterableDataset: any iterable of global batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from itertools import chain, islice
from typing import Any, NoReturn

from mpistrat.errors import InvalidArgumentError
from mpistrat.inputs.array_spec import spec_of
from mpistrat.inputs.dataset import Dataset
from mpistrat.inputs.rebatch import share

__all__ = ["IterableDataset", "as_dataset"]


class IterableDataset(Dataset):
    """The batches of an iterable.

    Parameters
    ----------
    source : iterable
        Yields nests of arrays with equal extents along the first axis. An iterator, such as a generator, can be read only once.
    """

    def __init__(self, source: Iterable[Any]) -> None:
        self._source = source
        self._spec: Any = None
        # the batches of an iterator, until an epoch begins
        self._once: Iterator[Any] | None = source if isinstance(source, Iterator) else None

    @property
    def num_batches(self) -> int | None:
        """The length of the source; None if it has none."""
        try:
            return len(self._source) if isinstance(self._source, Sized) else None
        except TypeError:  # raised by sources that have a len() only sometimes, such as PyTorch's DataLoader
            return None

    @property
    def element_spec(self) -> Any:
        """The nest of `ArraySpec` that describes every batch; the first one is read for it."""
        if self._spec is None:
            batches = self._begin()
            first = list(islice(batches, 1))
            if isinstance(self._source, Iterator):
                self._once = chain(first, batches)
            if not first:
                raise InvalidArgumentError(f"the {self.describe()} yields no batches, so that its element_spec is unknown")
            self._spec = spec_of(first[0])
        return self._spec

    def batches(self, epoch: int, replica: int = 0, num_replicas: int = 1) -> Iterator[Any]:
        """Yield a replica's rows of each batch; all batches are read."""
        return self._shares(self._begin(), replica, num_replicas)

    def describe(self) -> str:
        """Return a description that must be the same on all ranks: the type of the source, and its length."""
        kind = type(self._source).__name__
        return kind if self.num_batches is None else f"{kind} of {self.num_batches} batches"

    def _begin(self) -> Iterator[Any]:
        if not isinstance(self._source, Iterator):
            return iter(self._source)
        if self._once is None:
            raise RuntimeError(
                f"the {type(self._source).__name__} can be iterated only once, so there is no second epoch.\n"
                "    incorrect:  strategy.experimental_distribute_dataset(generate())\n"
                "    correct:    distribute a new generator for each epoch, or an object whose __iter__ makes one"
            )
        batches, self._once = self._once, None
        return batches

    def _shares(self, batches: Iterator[Any], replica: int, num_replicas: int) -> Iterator[Any]:
        length, count = self.num_batches, 0
        for batch in batches:
            if count == length:
                self._refuse_length(length, "more")
            if self._spec is None:
                self._spec = spec_of(batch)
            count += 1
            yield share(batch, replica, num_replicas)
        if length not in (None, count):
            self._refuse_length(length, str(count))

    def _refuse_length(self, length: int | None, found: str) -> NoReturn:
        raise InvalidArgumentError(f"the {type(self._source).__name__} has a len() of {length} batches, but yields {found}")

    def _part(self, num_shards: int, index: int) -> NoReturn:
        raise InvalidArgumentError(
            f"a {type(self._source).__name__} of batches cannot be sharded, because its rows are batched already. "
            "ArrayDataset, MapDataset and FileDataset can; AutoShardPolicy.DATA splits each batch"
        )


def as_dataset(source: Any) -> Dataset:
    """Return `source` if it is a dataset, else a dataset of its batches.

    Raises
    ------
    TypeError
        If it does not yield batches.
    """
    if isinstance(source, Dataset):
        return source
    if isinstance(source, Iterable) and not isinstance(source, (str, bytes, Mapping)) and not hasattr(source, "shape"):
        return IterableDataset(source)
    accepted = (
        "a dataset is a mpistrat.ArrayDataset, MapDataset or FileDataset, or an iterable of batches, a list or a generator for "
        f"example; got {type(source).__name__}"
    )
    if hasattr(source, "shape") or isinstance(source, Mapping):
        raise TypeError(f"{accepted}. Arrays are cut into batches by mpistrat.ArrayDataset(arrays, batch_size)")
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        raise TypeError(f"{accepted}. Samples are collated into batches by mpistrat.MapDataset(samples, batch_size)")
    raise TypeError(accepted)
