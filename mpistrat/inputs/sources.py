"""Datasets of arrays, indexed samples, files, and any iterable of batches; their positions, and how iterations go on there."""

from __future__ import annotations

import copy
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol
from zlib import crc32

import numpy as np

from mpistrat.arrays import Array, as_array, like
from mpistrat.communicator.validate import checked_index, checked_int
from mpistrat.errors import InvalidArgumentError
from mpistrat.inputs.input_options import SHARD_HINT
from mpistrat.inputs.rebatch import batched, num_rows, readable, shard_bounds, share, spec_of
from mpistrat.structures import flatten, leaf_names, map_leaves

if TYPE_CHECKING:
    from typing_extensions import Self


class Resumable(ABC):
    """What remembers its position: the epoch, and the batch in it, at which its newest iteration is."""

    _next: tuple[int, int] = (0, 0)  # where the next iteration begins
    _now: tuple[int, int] = (0, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the position: the epoch, how many of its batches have been taken, and what they were batches of."""
        order, batch_size, _ = self._contents()
        return {"epoch": self._now[0], "batch": self._now[1], "batch_size": batch_size, "order": order}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next iteration begin at a position, in the middle of an epoch too; the one after it is a whole epoch.

        Batches of another size begin at the same row. At the beginning of an epoch the data may be others too.

        Raises
        ------
        InvalidArgumentError
            If `state` is not what `state_dict` returns, or in the middle of an epoch of other data or another order, or at a
            row at which no batch begins.
        """
        batch = self.check_position(state)
        self._now = self._next = state["epoch"], batch

    @abstractmethod
    def _contents(self) -> tuple[str, int | None, int | None]:
        """Return what describes the rows of an epoch and their order, the batch size, and the number of rows; None: unknown."""

    def check_position(self, state: Mapping[str, Any]) -> int:
        """Return the number of the batch that begins at a position; raise as `load_state_dict` if there is none."""
        order, batch_size, num_rows = self._contents()
        try:
            checked_int(state["epoch"], "epoch", 0)
            batch = checked_int(state["batch"], "batch", 0)
            there, size = (state["order"], state["batch_size"]) if batch else (order, batch_size)
            row = batch * (1 if size is None else checked_int(size, "batch_size", 1))
        except (KeyError, TypeError) as error:
            why = f"state must have an epoch, a batch, its batch_size and order, as state_dict() returns; got {state!r}"
            raise InvalidArgumentError(why) from error
        if (there, size) == (order, batch_size):
            return batch
        is_end = num_rows is not None and row >= num_rows
        if there != order or size is None or batch_size is None or (row % batch_size and not is_end):
            raise InvalidArgumentError(
                f"batch {batch} of an epoch cannot be found again: it was one of {described(there, size)}, and now they are "
                f"those of {described(order, batch_size)}. Save at the end of an epoch to change this; to change the number "
                "of ranks, share batches (AutoShardPolicy.DATA), or have each rank read its shard of rows that are not shuffled"
            )
        return -(-row // batch_size)

    def _begin_epoch(self) -> tuple[int, int]:
        """Return epoch and first batch of an iteration that begins."""
        began = self._now = self._next
        self._next = began[0] + 1, 0
        return began

    def _reach(self, epoch: int, batch: int) -> None:
        """Record the position of an iteration, unless another one has begun since."""
        if self._next[0] == epoch + 1:
            self._now = epoch, batch

    def _end_epoch(self, epoch: int) -> None:
        """Record that an iteration has ended."""
        if self._next[0] == epoch + 1:
            self._now = self._next


def described(order: str, batch_size: int | None) -> str:
    """Return a description of batches."""
    return f"{order}, batches of {batch_size}" if batch_size else order


class DatasetIterator(Iterator[Any], ABC):
    """Iterates over an epoch of a dataset. Its state is the position of the dataset's newest iteration."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._begin(*dataset._begin_epoch())

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the dataset: see `Resumable.state_dict`."""
        return dict(self.dataset.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a position, and have the next iteration over the dataset begin with the epoch after it."""
        self.check_position(state)
        self.dataset.load_state_dict(state)
        self._begin(*self.dataset._begin_epoch())

    def check_position(self, state: Mapping[str, Any]) -> None:
        """Check that this iterator can go on at a position."""
        self.dataset.check_position(state)
        if not self.dataset.is_repeatable:
            why = "its batches come from an iterator, which cannot begin again: save the dataset, and restore before iterating"
            raise InvalidArgumentError(why)

    @abstractmethod
    def _begin(self, epoch: int, first: int) -> None:
        """Have the next batch be that with number `first` of an epoch."""


class Dataset(Resumable):
    """A source of batches. Each iteration over it is an epoch."""

    batch_size: int | None = None  # rows of a global batch, except the last one; None if batches may have any number
    is_file_based: bool = False  # so that each input pipeline can read files of its own
    is_hinted: bool = False  # sharded by `SHARD_HINT`, whose numbers are filled in later
    is_distributed: bool = False  # its position is that of what was distributed
    is_repeatable: bool = True  # unless its batches come from an iterator

    @abstractmethod
    def batches(self, epoch: int, replica: int = 0, num_replicas: int = 1, count: int = 1, first: int = 0) -> Iterator[Any]:
        """Yield the rows of `count` replicas, by default all, in each batch of an epoch from number `first` on.

        The number of the epoch determines the order.
        """

    @property
    def num_batches(self) -> int | None:
        """The number of batches of an epoch; None if unknown before it was iterated."""
        return len(self) if isinstance(self, Sized) else None

    @property
    def num_rows(self) -> int | None:
        """The number of rows of an epoch; None if unknown before it was iterated."""
        return None

    @property
    @abstractmethod
    def element_spec(self) -> Any:
        """The nest of `ArraySpec` that describes every batch."""

    @abstractmethod
    def describe_order(self) -> str:
        """Return a description of the rows of an epoch and their order, whatever batches they are cut into: sizes, dtypes."""

    def describe(self) -> str:
        """Return a description that must be the same on all ranks that share the batches."""
        return described(self.describe_order(), self.batch_size)

    def _contents(self) -> tuple[str, int | None, int | None]:
        return self.describe_order(), self.batch_size, self.num_rows

    def shard(self, num_shards: int, index: int) -> Self:
        """Return the dataset of every `num_shards`-th row, sample or file, from number `index` on.

        Parameters
        ----------
        num_shards : int
            Number of shards, for example ``context.num_input_pipelines``.
        index : int
            Which shard: ``context.input_pipeline_id``. `SHARD_HINT` for both leaves the numbers to ``AutoShardPolicy.HINT``.
        """
        if num_shards == index == SHARD_HINT:
            hinted = copy.copy(self)
            hinted.is_hinted = True
            return hinted
        num_shards = checked_int(num_shards, "num_shards", 1)
        part = self._part(num_shards, checked_index(index, "index", num_shards))
        part.is_hinted = part.is_distributed = False
        return part

    @abstractmethod
    def _part(self, num_shards: int, index: int) -> Self:
        """Return a shard; the numbers have been checked."""

    def __iter__(self) -> Iterator[Any]:
        if self.is_hinted:
            raise InvalidArgumentError(
                "the dataset was sharded by SHARD_HINT, which waits for the numbers of an input pipeline: distribute it with "
                "InputOptions(auto_shard_policy=AutoShardPolicy.HINT), or shard it by numbers"
            )
        return _LocalIterator(self)


class _LocalIterator(DatasetIterator):
    def _begin(self, epoch: int, first: int) -> None:
        self._batches = self._counted(self.dataset.batches(epoch, first=first), epoch, first)

    def __next__(self) -> Any:
        return next(self._batches)

    def _counted(self, batches: Iterator[Any], epoch: int, first: int) -> Iterator[Any]:
        for number, batch in enumerate(batches, first + 1):
            self.dataset._reach(epoch, number)
            yield batch
        self.dataset._end_epoch(epoch)


class BatchedDataset(Dataset):
    """Cuts rows into global batches of one size, in another order in each epoch if it shuffles."""

    batch_size: int

    def __init__(self, batch_size: int, shuffle: bool, seed: int, drop_remainder: bool) -> None:
        self.batch_size, self._seed = checked_int(batch_size, "batch_size", 1), checked_int(seed, "seed", 0)
        self._shuffle, self._drop_remainder = shuffle, drop_remainder

    def describe(self) -> str:
        return super().describe() + (", remainder dropped" if self._drop_remainder else "")

    def describe_order(self) -> str:
        order = f"shuffled with seed {self._seed}" if self._shuffle else "in order"
        return f"{self._describe_source()}, {order}"

    @abstractmethod
    def _describe_source(self) -> str: ...


def _step_of(places: range) -> str:
    """Return a text that tells which rows or files a shard has."""
    return f", every {places.step}th from number {places.start} on" if places.step > 1 else ""


class RowDataset(BatchedDataset):
    """Batches indexed rows. It can be iterated again and again."""

    def __init__(self, num_rows: int, batch_size: int, shuffle: bool, seed: int, drop_remainder: bool) -> None:
        super().__init__(batch_size, shuffle, seed, drop_remainder)
        self._rows = range(num_rows)

    @property
    def num_rows(self) -> int:
        return min(len(self) * self.batch_size, len(self._rows))

    def batches(self, epoch: int, replica: int = 0, num_replicas: int = 1, count: int = 1, first: int = 0) -> Iterator[Any]:
        order = np.random.default_rng((self._seed, epoch)).permutation(len(self._rows)) if self._shuffle else None
        for begin in range(first * self.batch_size, len(self) * self.batch_size, self.batch_size):
            start, stop = shard_bounds(min(self.batch_size, len(self._rows) - begin), replica, num_replicas, count)
            places = np.arange(begin + start, begin + stop)
            yield self._read(self._rows.start + self._rows.step * (places if order is None else order[places]))

    def whole(self, num_shards: int, index: int) -> Self | None:
        """Return the dataset whose batches are those of all shards like this one together; None if there is none."""
        is_one_of_all = (self._rows.start, self._rows.step) == (index, num_shards)
        # where each shard drops what does not fill its last batch, the joint batches are not those of one dataset
        drops = self._drop_remainder and self._rows.stop % (num_shards * self.batch_size)
        if self._shuffle or drops or not is_one_of_all:
            return None
        found = copy.copy(self)
        found._rows, found.batch_size = range(self._rows.stop), num_shards * self.batch_size
        return found

    @abstractmethod
    def _read(self, rows: Array) -> Any:
        """Return a batch of the rows with these indices."""

    def _part(self, num_shards: int, index: int) -> Self:
        part = copy.copy(self)
        part._rows = self._rows[index::num_shards]
        return part

    def __len__(self) -> int:
        """Return the number of global batches of an epoch."""
        whole, rest = divmod(len(self._rows), self.batch_size)
        return whole + (rest > 0 and not self._drop_remainder)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._rows)} rows, {len(self)} batches of {self.batch_size})"


class ArrayDataset(RowDataset):
    """Cuts arrays into global batches along their first axis. It can be iterated again and again.

    Each iteration is an epoch. The order depends on `seed` and the epoch's number, never on the number of replicas, so any
    number of replicas sees the same global batches.

    Parameters
    ----------
    arrays : nest of array_like
        Equal extents along the first axis; batches are arrays of the same kinds. Of a memory map, a replica reads its own rows.
    batch_size : int
        Rows of a global batch: of all replicas together.
    shuffle : bool
        Whether each epoch has another order.
    seed : int
        Not negative; the same on all ranks.
    drop_remainder : bool
        Whether a last batch with fewer rows is left out.
    """

    def __init__(
        self, arrays: Any, batch_size: int, shuffle: bool = False, seed: int = 0, drop_remainder: bool = False
    ) -> None:
        self._given, self._structure = flatten(arrays)
        self._arrays = [readable(leaf) for leaf in self._given]
        num_rows = _common_extent(self._arrays, leaf_names(arrays, "arrays"))
        super().__init__(num_rows, batch_size, shuffle, seed, drop_remainder)

    @property
    def element_spec(self) -> Any:
        return spec_of(self._structure.unflatten(list(self._arrays)))

    def _read(self, rows: Array) -> Any:
        # not array.take, which first copies the whole of an array that is not contiguous
        taken = [like(array[rows], given) for array, given in zip(self._arrays, self._given, strict=True)]
        return self._structure.unflatten(taken)

    def _describe_source(self) -> str:
        row = ", ".join(f"{array.dtype} {array.shape[1:]}" for array in self._arrays)
        return f"{len(self._rows)} rows of [{row}] in {self._structure}{_step_of(self._rows)}"


def _common_extent(arrays: list[Array], names: list[str]) -> int:
    if not arrays:
        raise InvalidArgumentError("a dataset needs at least one array; got an empty structure")
    for array, name in zip(arrays, names, strict=True):
        if array.ndim == 0:
            raise InvalidArgumentError(
                f"{name} is a scalar; arrays are cut along their first axis. A list counts as a structure: pass np.array(list)"
            )
    extents = [len(array) for array in arrays]
    if len(set(extents)) > 1:
        found = ", ".join(f"{name} has {extent}" for name, extent in zip(names, extents, strict=True))
        raise InvalidArgumentError(f"all arrays of a dataset need the same number of rows; {found}")
    return extents[0]


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
    batch_size, shuffle, seed, drop_remainder : int, bool, int, bool
        As for `ArrayDataset`.
    collate_fn : callable, optional
        Makes a batch, in memory of its own, of a list of samples; by default it stacks them.
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
            wanted = "__getitem__(number) and __len__(), as a torch.utils.data.Dataset or a list has"
            raise TypeError(f"samples must have {wanted}; got {type(samples).__name__}")
        super().__init__(len(samples), batch_size, shuffle, seed, drop_remainder)
        self._samples = samples
        self._collate = collate_fn or stack

    @property
    def element_spec(self) -> Any:
        return spec_of(self._first)

    @cached_property
    def _first(self) -> Any:
        if not len(self._samples):
            raise InvalidArgumentError("a dataset without samples has no element_spec")
        return self._collate([self._samples[0]])

    def _read(self, rows: Array) -> Any:
        if rows.size == 0:
            return map_leaves(lambda leaf: leaf[:0], self._first)
        return self._collate([self._samples[int(row)] for row in rows])

    def _describe_source(self) -> str:
        return f"{len(self._rows)} rows of {type(self._samples).__name__}{_step_of(self._rows)}"


def stack(samples: list[Any]) -> Any:
    """Return a batch of samples: a nest of arrays with one row per sample."""
    try:
        return map_leaves(lambda *leaves: like(np.stack(list(map(as_array, leaves))), leaves[0]), *samples)
    except ValueError as error:
        raise InvalidArgumentError(
            f"samples of different shapes or structures cannot be stacked: {error}. Pad them, or pass a collate_fn that does"
        ) from None


class FileDataset(BatchedDataset):
    """Cuts the rows of files, one file after another, into global batches. It can be iterated again and again.

    Distributed, each rank reads every num_replicas_in_sync-th file (``AutoShardPolicy.FILE``, which AUTO stands for here);
    with ``AutoShardPolicy.DATA`` each rank reads all files and keeps its share of every batch.

    Parameters
    ----------
    files : sequence of path
        In the same order on all ranks; folders may differ, as for node-local disks.
    read_fn : callable
        Of a path, returns the rows: a nest of arrays with equal extents along the first axis, or an iterator of such parts.
    batch_size, seed, drop_remainder : int, int, bool
        As for `ArrayDataset`.
    shuffle : bool
        Whether each epoch has another order of files, and of the rows in each part, whatever the number of replicas.
    """

    is_file_based = True

    def __init__(
        self,
        files: Sequence[str | os.PathLike[str]],
        read_fn: Callable[[Any], Any],
        batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        drop_remainder: bool = False,
    ) -> None:
        if isinstance(files, (str, bytes, os.PathLike)):
            raise TypeError(f"files must be a sequence of paths, sorted(glob.glob(pattern)) for example; got {files!r}")
        if not callable(read_fn):
            raise TypeError(f"read_fn must be a function of a path, numpy.load for example; got {read_fn!r}")
        self._files = list(files)
        if not self._files:
            raise InvalidArgumentError("a dataset needs at least one file; got none")
        super().__init__(batch_size, shuffle, seed, drop_remainder)
        self._read_fn, self._places = read_fn, range(len(self._files))
        self._spec: Any = None

    @property
    def element_spec(self) -> Any:
        if self._spec is None:
            next(self._parts(0), None)
        if self._spec is None:
            raise InvalidArgumentError(f"{self!r} has no rows, so that its element_spec is unknown")
        return self._spec

    def batches(self, epoch: int, replica: int = 0, num_replicas: int = 1, count: int = 1, first: int = 0) -> Iterator[Any]:
        whole = batched(self._parts(epoch), [self.batch_size], self._drop_remainder)
        return (share(batch, replica, num_replicas, count) for batch in islice(whole, first, None))

    def _describe_source(self) -> str:
        names = [Path(file).name for file in self._files]
        checksum = f"(checksum {crc32(repr(names).encode()):08x})"
        return f"{len(names)} files from {names[0]} to {names[-1]} {checksum}{_step_of(self._places)}"

    def _part(self, num_shards: int, index: int) -> Self:
        if num_shards > len(self._places):
            raise InvalidArgumentError(
                f"{len(self._places)} files cannot be shared by {num_shards} input pipelines: some would have none. Write more "
                "files, or let each pipeline read all of them: InputOptions(auto_shard_policy=AutoShardPolicy.DATA)"
            )
        part = copy.copy(self)
        part._places = self._places[index::num_shards]
        return part

    def _parts(self, epoch: int) -> Iterator[Any]:
        """Yield the parts of this shard's files, in the order of an epoch."""
        order: Array = np.arange(len(self._files))
        if self._shuffle:
            order = np.random.default_rng((self._seed, epoch)).permutation(order)
        for number in (int(order[place]) for place in self._places):
            found = self._read_fn(self._files[number])
            rng = np.random.default_rng((self._seed, epoch, number))
            for part in found if isinstance(found, Iterator) else (found,):
                yield self._checked(map_leaves(readable, part), self._files[number], rng)

    def _checked(self, part: Any, file: Any, rng: np.random.Generator) -> Any:
        """Return a part, shuffled if asked for, after checking that its spec equals that of the parts before."""
        spec = spec_of(part)
        if self._spec is None:
            self._spec = spec
        elif spec != self._spec:
            raise InvalidArgumentError(f"all files of a dataset must be alike; {file} has {spec}, others have {self._spec}")
        if not self._shuffle:
            return part
        order = rng.permutation(num_rows(part))
        return map_leaves(lambda leaf: leaf[order], part)

    def __repr__(self) -> str:
        return f"FileDataset({len(self._places)} files, batches of {self.batch_size})"


class IterableDataset(Dataset):
    """The batches of an iterable."""

    def __init__(self, source: Iterable[Any]) -> None:
        self._source = source
        self._spec: Any = None
        # the batches of an iterator, until an epoch begins
        self._once: Iterator[Any] | None = source if isinstance(source, Iterator) else None
        self.is_repeatable = self._once is None

    @property
    def num_batches(self) -> int | None:
        try:
            return len(self._source) if isinstance(self._source, Sized) else None
        except TypeError:  # raised by sources that have a len() only sometimes, such as PyTorch's DataLoader
            return None

    @property
    def element_spec(self) -> Any:
        if self._spec is None:
            batches = self._begin()
            first = list(islice(batches, 1))
            if isinstance(self._source, Iterator):
                self._once = chain(first, batches)
            if not first:
                raise InvalidArgumentError(f"the {self.describe()} yields no batches, so that its element_spec is unknown")
            self._spec = spec_of(first[0])
        return self._spec

    def batches(self, epoch: int, replica: int = 0, num_replicas: int = 1, count: int = 1, first: int = 0) -> Iterator[Any]:
        whole = self._counted(self._begin())
        return (share(batch, replica, num_replicas, count) for batch in islice(whole, first, None))

    def describe_order(self) -> str:
        kind = type(self._source).__name__
        return kind if self.num_batches is None else f"{kind} of {self.num_batches} batches"

    def __repr__(self) -> str:
        return f"IterableDataset({self.describe_order()})"

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

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield batches whose number is that which the source has told."""
        length, found = self.num_batches, 0
        for batch in batches:
            if found == length:
                self._refuse_length(length, "more")
            if self._spec is None:
                self._spec = spec_of(batch)
            found += 1
            yield batch
        if length not in (None, found):
            self._refuse_length(length, str(found))

    def _refuse_length(self, length: int | None, found: str) -> NoReturn:
        raise InvalidArgumentError(f"the {type(self._source).__name__} has a len() of {length} batches, but yields {found}")

    def _part(self, num_shards: int, index: int) -> NoReturn:
        raise InvalidArgumentError(
            f"a {type(self._source).__name__} of batches cannot be sharded, because its rows are batched already. "
            "ArrayDataset, MapDataset and FileDataset can; AutoShardPolicy.DATA splits each batch"
        )


def as_dataset(source: Any) -> Dataset:
    """Return `source` if it is a dataset, else a dataset of its batches."""
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
