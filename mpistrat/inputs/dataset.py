"""Dataset: the interface of all datasets, and RowDataset, the base of those whose rows can be read in any order."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat.arrays import Array
from mpistrat.errors import InvalidArgumentError
from mpistrat.inputs.input_options import SHARD_HINT, checked_int
from mpistrat.inputs.rebatch import shard_bounds

if TYPE_CHECKING:
    from typing_extensions import Self


class Resumable:
    """What remembers its position: the epoch, and the batch in it, at which its newest iteration is."""

    _next: tuple[int, int] = (0, 0)  # where the next iteration begins
    _now: tuple[int, int] = (0, 0)
    _num_replicas = 1

    def state_dict(self) -> dict[str, int]:
        """Return the position: the epoch, and how many of its batches have been taken."""
        return {"epoch": self._now[0], "batch": self._now[1]}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Have the next iteration begin at a position, in the middle of an epoch too; the one after it is a whole epoch.

        Raises
        ------
        InvalidArgumentError
            If `state` is not what `state_dict` returns, or in the middle of an epoch in which each of another number of ranks
            read data of its own.
        """
        self.check_position(state)
        self._now = self._next = state["epoch"], state["batch"]

    def check_position(self, state: Mapping[str, int]) -> None:
        """Check that iterations can begin at a position: see `load_state_dict`."""
        try:
            checked_int(state["epoch"], "epoch", 0), checked_int(state["batch"], "batch", 0)
        except (KeyError, TypeError) as error:
            why = f"state must have an epoch and a batch, as state_dict() returns; got {state!r}"
            raise InvalidArgumentError(why) from error
        count = state.get("num_replicas", self._num_replicas)
        if state["batch"] and count != self._num_replicas:
            raise InvalidArgumentError(
                f"batch {state['batch']} of an epoch cannot be found again: {count} ranks read data of their own, and now "
                f"{self._num_replicas} do. Save at the end of an epoch, or share batches: AutoShardPolicy.DATA"
            )

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


class Dataset(Resumable, ABC):
    """A source of batches. Each iteration over it is an epoch."""

    is_file_based: bool = False  # so that each input pipeline can read files of its own
    is_hinted: bool = False  # sharded by `SHARD_HINT`, whose numbers are filled in later

    @abstractmethod
    def batches(self, epoch: int, replica: int = 0, num_replicas: int = 1) -> Iterator[Any]:
        """Yield a replica's share of each batch of an epoch, whose number determines the order; by default all rows."""

    def batches_from(self, first: int, epoch: int, replica: int = 0, num_replicas: int = 1) -> Iterator[Any]:
        """Yield what `batches` does, without the first ones of the epoch."""
        return islice(self.batches(epoch, replica, num_replicas), first, None)

    @property
    @abstractmethod
    def num_batches(self) -> int | None:
        """The number of batches of an epoch; None if unknown before it was iterated."""

    @property
    def batch_size(self) -> int | None:
        """Rows of a global batch, except the last one; None if batches may have any number."""
        return None

    @property
    def num_rows(self) -> int | None:
        """The number of rows of an epoch; None if unknown before it was iterated."""
        return None

    @property
    @abstractmethod
    def element_spec(self) -> Any:
        """The nest of `ArraySpec` that describes every batch."""

    @abstractmethod
    def describe(self) -> str:
        """Return a description that must be the same on all ranks that share the batches: sizes, dtypes, order."""

    def shard(self, num_shards: int, index: int) -> Self:
        """Return the dataset of every `num_shards`-th row, sample or file, from number `index` on.

        Parameters
        ----------
        num_shards : int
            Number of shards, for example ``context.num_input_pipelines``.
        index : int
            Which shard, for example ``context.input_pipeline_id``. `SHARD_HINT` for both leaves the numbers to
            ``AutoShardPolicy.HINT``.
        """
        if num_shards == index == SHARD_HINT:
            hinted = self._copy()
            hinted.is_hinted = True
            return hinted
        num_shards = checked_int(num_shards, "num_shards", 1)
        if checked_int(index, "index", 0) >= num_shards:
            raise InvalidArgumentError(f"index must be one of 0 to {num_shards - 1}; got {index}")
        return self._part(num_shards, index)

    def settled(self, num_shards: int, index: int) -> Self:
        """Return the dataset sharded by these numbers, in place of `SHARD_HINT`."""
        hinted = self._copy()
        hinted.is_hinted = False
        return hinted.shard(num_shards, index)

    @abstractmethod
    def _part(self, num_shards: int, index: int) -> Self:
        """Return a shard; the numbers have been checked."""

    def _copy(self) -> Self:
        return copy.copy(self)

    def __iter__(self) -> Iterator[Any]:
        if self.is_hinted:
            raise InvalidArgumentError(
                "the dataset was sharded by SHARD_HINT, which waits for the numbers of an input pipeline: distribute it with "
                "InputOptions(auto_shard_policy=AutoShardPolicy.HINT), or shard it by numbers"
            )
        epoch, first = self._begin_epoch()
        return self._counted(self.batches_from(first, epoch), epoch, first)

    def _counted(self, batches: Iterator[Any], epoch: int, first: int) -> Iterator[Any]:
        for number, batch in enumerate(batches, first + 1):
            self._reach(epoch, number)
            yield batch
        self._end_epoch(epoch)


class BatchedDataset(Dataset):
    """Cuts rows into global batches of one size, in another order in each epoch if it shuffles."""

    def __init__(self, batch_size: int, shuffle: bool, seed: int, drop_remainder: bool) -> None:
        self._batch_size, self._seed = checked_int(batch_size, "batch_size", 1), checked_int(seed, "seed", 0)
        self._shuffle, self._drop_remainder = shuffle, drop_remainder

    @property
    def batch_size(self) -> int:
        return self._batch_size

    def describe(self) -> str:
        order = f"shuffled with seed {self._seed}" if self._shuffle else "in order"
        rest = ", remainder dropped" if self._drop_remainder else ""
        return f"{self._describe_source()}, batches of {self._batch_size}, {order}{rest}"

    @abstractmethod
    def _describe_source(self) -> str: ...


class RowDataset(BatchedDataset):
    """Batches indexed rows. It can be iterated again and again."""

    def __init__(self, num_rows: int, batch_size: int, shuffle: bool, seed: int, drop_remainder: bool) -> None:
        super().__init__(batch_size, shuffle, seed, drop_remainder)
        self._rows = range(num_rows)

    @property
    def num_batches(self) -> int:
        return len(self)

    @property
    def num_rows(self) -> int:
        return min(len(self) * self._batch_size, len(self._rows))

    def batches(self, epoch: int, replica: int = 0, num_replicas: int = 1) -> Iterator[Any]:
        """Yield a replica's rows of each global batch of an epoch; only these are read."""
        return self.batches_from(0, epoch, replica, num_replicas)

    def batches_from(self, first: int, epoch: int, replica: int = 0, num_replicas: int = 1) -> Iterator[Any]:
        order = np.random.default_rng((self._seed, epoch)).permutation(len(self._rows)) if self._shuffle else None
        for begin in range(first * self._batch_size, len(self) * self._batch_size, self._batch_size):
            start, stop = shard_bounds(min(self._batch_size, len(self._rows) - begin), replica, num_replicas)
            places = np.arange(begin + start, begin + stop)
            yield self._read(self._rows.start + self._rows.step * (places if order is None else order[places]))

    def _describe_source(self) -> str:
        return f"{len(self._rows)} rows of {self._describe_row()}"

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
