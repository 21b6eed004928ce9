"""Dataset: the interface of all datasets."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mpistrat.errors import InvalidArgumentError
from mpistrat.inputs.checks import checked_int
from mpistrat.inputs.input_options import SHARD_HINT

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Dataset"]


class Dataset(ABC):
    """A source of batches. Each iteration over it is an epoch.

    Attributes
    ----------
    is_file_based : bool
        Whether it consists of files, so that each input pipeline can read its own.
    is_hinted : bool
        Whether it was sharded by `SHARD_HINT`, whose numbers are filled in later.
    """

    is_file_based: bool = False
    is_hinted: bool = False
    _epoch: int = 0

    @abstractmethod
    def batches(self, epoch: int, replica: int = 0, num_replicas: int = 1) -> Iterator[Any]:
        """Yield a replica's share of each batch of an epoch.

        Parameters
        ----------
        epoch : int
            The number of the epoch, which determines the order if the dataset is shuffled.
        replica, num_replicas : int
            Whose rows; by default all.
        """

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

        Raises
        ------
        TypeError
            If a number is not an int.
        InvalidArgumentError
            If there is no such shard, or the dataset cannot be sharded.
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
        epoch, self._epoch = self._epoch, self._epoch + 1
        return self.batches(epoch)
