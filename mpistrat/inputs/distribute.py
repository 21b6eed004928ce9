"""DistributedDataset: global batches in, this replica's rows of each out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, cast

from mpistrat.communicator.interface import BaseCommunicator
from mpistrat.context.stack import default_mode
from mpistrat.device.binding import bound_device, own_device
from mpistrat.errors import InvalidArgumentError
from mpistrat.inputs.dataset import Dataset, Resumable
from mpistrat.inputs.input_options import AutoShardPolicy, InputContext, InputOptions, InputReplicationMode, read_options
from mpistrat.inputs.iterator import DistributedIterator, EpochBatches
from mpistrat.inputs.rebatch import batched, num_batches_of, share_sizes, shares
from mpistrat.inputs.sources import as_dataset

OFF, AUTO, FILE, DATA, HINT = AutoShardPolicy


class DistributedDataset(Resumable):
    """The batches of this rank's replica.

    Made by ``strategy.experimental_distribute_dataset`` and ``strategy.distribute_datasets_from_function``.

    Its elements are nests of per-replica values, which ``strategy.run(fn, args=(element,))`` turns into arrays; with one
    replica they are nests of arrays. Every replica gets the same number of elements: one without rows, because its data
    has ended or a batch is small, gets arrays of no rows.

    Each iteration is an epoch. Ranks must start the same number of iterations.
    """

    def __init__(self, strategy: Any, dataset: Dataset, policy: AutoShardPolicy | None, options: InputOptions) -> None:
        self._strategy = strategy
        self._communicator: BaseCommunicator = strategy.extended.communicator
        self._num_replicas = self._communicator.size
        self._dataset = dataset
        self._policy = policy
        self._options = options

    @property
    def element_spec(self) -> Any:
        """The nest of `ArraySpec` that describes every element; the first batch is read for it if necessary."""
        return self._dataset.element_spec

    def __iter__(self) -> DistributedIterator:
        epoch, first = self._begin_epoch()
        is_agreed = self._policy is DATA and self._length is not None
        source = EpochBatches(self._batches(epoch, first), self._length, is_agreed, epoch, first, self._reach, self._end_epoch)
        return DistributedIterator(self._strategy, source, self._options)

    def __len__(self) -> int:
        """Return the number of elements of an epoch; a TypeError for files and generators, and batches of each rank's own."""
        if self._length is None or self._policy is not DATA:
            raise TypeError(f"the length of {self!r} is known only after iterating over it")
        return self._length

    def __repr__(self) -> str:
        return f"DistributedDataset({self._dataset!r}, replica={self._communicator.rank}({self._communicator.size}))"

    @property
    def _length(self) -> int | None:
        """The number of batches that this replica gets from its own dataset; None if unknown."""
        count = self._dataset.num_batches
        if count is None or self._policy is not OFF:
            return count
        sizes = self._sizes
        if sizes is None:
            return count * self._communicator.size
        rows = self._dataset.num_rows
        return None if rows is None else num_batches_of(rows, sizes)

    @property
    def _sizes(self) -> list[int] | None:
        """The numbers of rows of this replica's batches, repeated cyclically; None if batches may have any number."""
        batch_size = self._dataset.batch_size
        return None if batch_size is None else share_sizes(batch_size, self._communicator.rank, self._communicator.size)

    def state_dict(self) -> dict[str, int]:
        """Return the position, of all replicas; and their number, if batches are those of each rank's own data."""
        position = super().state_dict()
        return position if self._policy is DATA else {**position, "num_replicas": self._num_replicas}

    def _batches(self, epoch: int, first: int) -> Iterator[Any]:
        if self._policy is DATA:
            return self._dataset.batches_from(first, epoch, self._communicator.rank, self._communicator.size)
        return islice(self._own_batches(epoch), first, None)

    def _own_batches(self, epoch: int) -> Iterator[Any]:
        whole = self._dataset.batches(epoch)
        if self._policy is None:
            return whole
        sizes = self._sizes
        if sizes is not None:
            return batched(whole, sizes, drop_remainder=False)
        return (part for batch in whole for part in shares(batch, self._communicator.rank, self._communicator.size))


def distribute_dataset(strategy: Any, dataset: Any, options: InputOptions | None = None) -> Iterable[Any]:
    """Return what ``strategy.experimental_distribute_dataset(dataset, options)`` returns. A collective call."""
    communicator: BaseCommunicator = strategy.extended.communicator
    call = "experimental_distribute_dataset"

    def make() -> tuple[Iterable[Any], str]:
        wanted = read_options(options)
        _refuse_per_replica(strategy, call, wanted)
        if default_mode().strategy is strategy:
            return cast("Iterable[Any]", dataset), ""
        source = as_dataset(dataset)
        part, policy = _part_of(source, wanted.auto_shard_policy, communicator.rank, communicator.size)
        shared = "of each rank's own" if wanted.auto_shard_policy is OFF else source.describe()
        text = f"{shared}, auto_shard_policy={wanted.auto_shard_policy.name}"
        return DistributedDataset(strategy, part, policy, wanted), text

    return communicator.agree_on(call, make)


def distribute_from_function(
    strategy: Any,
    dataset_fn: Callable[[InputContext], Any],
    options: InputOptions | None = None,
    *,
    accepts_per_replica: bool = False,
) -> Iterable[Any]:
    """Return what ``strategy.distribute_datasets_from_function(dataset_fn, options)`` returns. A collective call."""
    communicator: BaseCommunicator = strategy.extended.communicator
    call = "distribute_datasets_from_function"

    def make() -> tuple[Iterable[Any], str]:
        wanted = read_options(options)
        if not accepts_per_replica:
            _refuse_per_replica(strategy, call, wanted)
        if wanted.experimental_place_dataset_on_device and bound_device() is not None:
            raise NotImplementedError(
                "experimental_place_dataset_on_device=True: datasets are in host memory, and this replica is on "
                f"{own_device()}.\n"
                "    incorrect:  InputOptions(False, InputReplicationMode.PER_REPLICA, True)\n"
                "    correct:    InputOptions(None, InputReplicationMode.PER_REPLICA), which copies elements there ahead"
            )
        if not callable(dataset_fn):
            raise TypeError(f"dataset_fn must be a function of an InputContext that returns a dataset; got {dataset_fn!r}")
        if default_mode().strategy is strategy:
            return cast("Iterable[Any]", dataset_fn(InputContext())), ""
        made = dataset_fn(InputContext(communicator.size, communicator.rank, communicator.size))
        part, _ = _part_of(as_dataset(made), OFF, communicator.rank, communicator.size)
        return DistributedDataset(strategy, part, None, wanted), ""

    return communicator.agree_on(call, make)


def _refuse_per_replica(strategy: Any, call: str, options: InputOptions) -> None:
    if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
        raise NotImplementedError(
            "InputReplicationMode.PER_REPLICA is for MirroredStrategy.distribute_datasets_from_function only; got "
            f"{type(strategy).__name__}.{call}. PER_WORKER too makes one input pipeline for each replica: a rank is one"
        )


def _part_of(dataset: Dataset, policy: AutoShardPolicy, pipeline: int, num_pipelines: int) -> tuple[Dataset, AutoShardPolicy]:
    """Return the dataset of an input pipeline, and whether a replica takes its rows of each batch (DATA) or all rows (OFF)."""
    if policy is AUTO:
        policy = FILE if dataset.is_file_based else DATA
    if dataset.is_hinted and policy is not HINT:
        raise InvalidArgumentError(
            f"the dataset was sharded by SHARD_HINT, which waits for auto_shard_policy=AutoShardPolicy.HINT; got {policy.name}"
        )
    if policy is HINT and not dataset.is_hinted:
        raise InvalidArgumentError(
            f"AutoShardPolicy.HINT puts numbers in place of SHARD_HINT, and {dataset!r} was not sharded by it.\n"
            "    incorrect:  strategy.experimental_distribute_dataset(dataset, options)\n"
            "    correct:    strategy.experimental_distribute_dataset(dataset.shard(SHARD_HINT, SHARD_HINT), options)"
        )
    if policy is FILE and not dataset.is_file_based:
        raise InvalidArgumentError(
            f"AutoShardPolicy.FILE shards files, and {dataset!r} has none; use AutoShardPolicy.DATA for it, or a "
            "mpistrat.FileDataset"
        )
    if policy is HINT:
        return dataset.settled(num_pipelines, pipeline), OFF
    return (dataset.shard(num_pipelines, pipeline), OFF) if policy is FILE else (dataset, policy)
