"""DistributedDataset: global batches in, this replica's rows of each out, the same number of batches on all replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any
from zlib import crc32

import numpy as np

from mpistrat.communicator.interface import BaseCommunicator
from mpistrat.context.stack import default_mode, in_replica_context_of
from mpistrat.context.values import regroup
from mpistrat.device.binding import bound_device, own_device
from mpistrat.errors import InvalidArgumentError, OutOfRangeError
from mpistrat.inputs.input_options import AutoShardPolicy, InputContext, InputOptions, InputReplicationMode, read_options
from mpistrat.inputs.prefetch import fetched, prefetched
from mpistrat.inputs.rebatch import batched, empty_like, num_rows, own_parts, share_sizes, shares, spec_of
from mpistrat.inputs.sources import Dataset, DatasetIterator, Resumable, RowDataset, as_dataset
from mpistrat.reduction import ReduceOp

OFF, AUTO, FILE, DATA, HINT = AutoShardPolicy

# the state of a replica; the maximum over all replicas decides
_ENDED, _HAS_NO_ROWS, _GOES_ON, _FAILED = range(4)


class DistributedDataset(Resumable):
    """The batches of this rank's replica.

    Made by ``strategy.experimental_distribute_dataset`` and ``strategy.distribute_datasets_from_function``.

    Its elements are nests of per-replica values, which ``strategy.run(fn, args=(element,))`` turns into arrays; with one
    replica they are nests of arrays. Every replica gets the same number of elements: one without rows, as its data has ended or
    a batch is small, gets arrays of no rows; but no element is without rows on all replicas, unless a batch has none.

    Each iteration is an epoch. Ranks must start the same number of iterations.
    """

    def __init__(self, strategy: Any, dataset: Dataset, policy: AutoShardPolicy | None, options: InputOptions) -> None:
        self._strategy = strategy
        self._communicator: BaseCommunicator = strategy.extended.communicator
        self._dataset = dataset
        self.is_repeatable = dataset.is_repeatable
        self._policy = policy
        self._options = options
        self._described = self._own_contents() if policy is not DATA else dataset._contents()

    @property
    def element_spec(self) -> Any:
        """The nest of `ArraySpec` that describes every element; the first batch is read for it if necessary."""
        return self._dataset.element_spec

    def __iter__(self) -> DistributedIterator:
        return DistributedIterator(self)

    def __len__(self) -> int:
        """Return the number of elements of an epoch; a TypeError for files and generators, and batches of each rank's own."""
        if self._length is None:
            raise TypeError(f"the length of {self!r} is known only after iterating over it")
        return self._length

    def __repr__(self) -> str:
        return f"DistributedDataset({self._dataset!r}, replica={self._communicator.rank}({self._communicator.size}))"

    @property
    def _length(self) -> int | None:
        """The number of elements of an epoch, if all replicas know it."""
        return self._dataset.num_batches if self._policy is DATA else None

    def _contents(self) -> tuple[str, int | None, int | None]:
        return self._described

    def _own_contents(self) -> tuple[str, int | None, int | None]:
        """Return what this rank reads by itself; or what all ranks read, if this is the shard of its number."""
        data, rank, size = self._dataset, self._communicator.rank, self._communicator.size
        whole = data.whole(size, rank) if self._policy is None and isinstance(data, RowDataset) else None
        if whole is not None:
            return whole._contents()
        return f"{data.describe()}, which rank {rank} of {size} ranks {'cuts' if self._policy else 'reads'} itself", None, None

    def _batches(self, epoch: int, first: int) -> Iterator[Any]:
        rank, size = self._communicator.rank, self._communicator.size
        if self._policy is DATA:
            count = self._options.virtual_replicas or size
            parts = own_parts(count, rank, size)
            return self._dataset.batches(epoch, parts.start, count, len(parts), first)
        own, batch_size = self._dataset.batches(epoch), self._dataset.batch_size
        if self._policy is OFF and batch_size is not None:
            own = batched(own, share_sizes(batch_size, rank, size), drop_remainder=False)
        elif self._policy is OFF:
            own = (part for batch in own for part in shares(batch, rank, size))
        return islice(own, first, None)


class OptionalElement:
    """An element, or none at the end of the data."""

    def __init__(self, *element: Any) -> None:
        self._element = element

    def has_value(self) -> bool:
        """Return whether there is an element."""
        return bool(self._element)

    def get_value(self) -> Any:
        """Return the element; an InvalidArgumentError if there is none."""
        if not self._element:
            raise InvalidArgumentError("there is no element, because the data has ended; call has_value() first")
        return self._element[0]

    def __repr__(self) -> str:
        return f"OptionalElement({', '.join(map(repr, self._element))})"


class DistributedIterator(DatasetIterator):
    """Yields the batches of this replica in one epoch, then batches of no rows until all replicas have had theirs.

    Created by iterating over a `DistributedDataset`. Taking an element is a collective call, in which replicas exchange a few
    numbers, unless they share batches whose number is known. An error of one replica ends the iteration on all of them, and so
    does a replica at another element or in another epoch, because it left the loop early: at once if numbers are exchanged or
    MPISTRAT_STRICT is on, else with the next collective.
    """

    def __init__(self, dataset: DistributedDataset) -> None:
        self._batches: Iterator[Any] = iter(())
        self._strategy, self._communicator = dataset._strategy, dataset._communicator
        self._empty: Any = None
        super().__init__(dataset)

    def _begin(self, epoch: int, first: int) -> None:
        self.close()
        dataset, device, options = self.dataset, bound_device(), self.dataset._options
        # what comes first: an element that was read for element_spec, or the error of the iterable's __iter__
        self._ahead: tuple[list[Any], Exception | None] | None = None
        try:
            batches = dataset._batches(epoch, first)
        except Exception as error:
            batches, self._ahead = iter(()), ([], error)
        buffer_size = options.experimental_per_replica_buffer_size
        if device is not None:
            self._batches = fetched(batches, buffer_size, device, options.experimental_fetch_to_device is not False)
        else:
            self._batches = prefetched(batches, buffer_size) if buffer_size else batches
        self._epoch, self._taken, self._length, self._is_over = epoch, first, dataset._length, False

    @property
    def element_spec(self) -> Any:
        """The nest of `ArraySpec` that describes every element; the first one is read for it."""
        if self._empty is None:
            self._ahead = self._ahead or self._attempt()
            if self._ahead[1] is not None:
                raise self._ahead[1]
        if self._empty is not None:
            return spec_of(self._empty)
        try:
            return self.dataset.element_spec
        except (InvalidArgumentError, RuntimeError):
            why = "this replica has no elements, and has not received their spec from another one"
            raise InvalidArgumentError(why) from None

    def get_next(self) -> Any:
        """Return the next element: a nest of per-replica values, or of arrays where there is one replica. A collective call.

        Raises
        ------
        OutOfRangeError
            At the end of the data of all replicas. It is a StopIteration.
        AgreementError
            If another replica failed to read its element.
        """
        for element in self._step():
            return element
        raise OutOfRangeError(f"the data has ended, after {self._taken} elements")

    def get_next_as_optional(self) -> OptionalElement:
        """Return the next element as an OptionalElement, which is empty at the end of the data. A collective call."""
        return OptionalElement(*self._step())

    def close(self) -> None:
        """End the iteration and the prefetching thread. All replicas must do it."""
        self._is_over, self._batches, self._ahead = True, iter(()), None

    def __next__(self) -> Any:
        return self.get_next()

    def _step(self) -> list[Any]:
        """Return the next element in a list, or an empty list at the end."""
        if in_replica_context_of(self._strategy, "next(iterator)"):
            refusal = InvalidArgumentError(
                "next(iterator) must be called outside strategy.run, which hands each replica its part of an element.\n"
                "    incorrect:  def step(): batch = next(iterator)\n"
                "    correct:    def step(batch): …, then strategy.run(step, args=(next(iterator),))"
            )
            self._communicator.refuse(self._call, refusal)
        if self._is_over:
            return []
        state = _HAS_NO_ROWS
        while state == _HAS_NO_ROWS:
            try:
                (shares, error), self._ahead = self._ahead or self._attempt(), None
                state = self._agree_on_state(shares, error)
            except BaseException:
                self.close()
                raise
            if state == _ENDED:
                self.close()
                self.dataset._end_epoch(self._epoch)
                return []
            self._taken += 1
        self.dataset._reach(self._epoch, self._taken)
        return [regroup(share, self._communicator.size) for share in shares or [self._empty]]

    def _attempt(self) -> tuple[list[Any], Exception | None]:
        """Return the next batch in a list, which is empty at the end, and the error if there was one."""
        try:
            shares = list(islice(self._batches, 1))
            if self._empty is None and shares:
                self._empty = empty_like(shares[0])
        except Exception as error:
            return [], error
        return shares, None

    def _agree_on_state(self, shares: list[Any], error: Exception | None) -> int:
        """Return what the replica does that is furthest from the end; raise if one has failed."""
        communicator = self._communicator
        if communicator.is_strict:
            communicator.agree(self._call, error)
        if self._length is None and communicator.size > 1:
            return self._exchange(communicator, shares, error)
        if error is not None:
            communicator.refuse(self._call, error)
        if not communicator.is_strict:
            communicator.note(self._call)
        goes_on = bool(shares) if self._length is None else self._taken < self._length
        return _GOES_ON if goes_on else _ENDED

    def _exchange(self, communicator: BaseCommunicator, shares: list[Any], error: Exception | None) -> int:
        state = _FAILED if error is not None else _GOES_ON if shares else _ENDED
        if shares and self.dataset._policy is OFF and not num_rows(shares[0]):
            state = _HAS_NO_ROWS
        knows = self._empty is not None
        place = (self._epoch << 32) + self._taken
        source = -communicator.rank if knows else -communicator.size
        mine = np.array([state, not knows, source, place, -place], np.int64)
        [found] = communicator.all_reduce(ReduceOp.MAX, [mine])
        state, lacks_spec, source, last_place, first_place = found.tolist()
        if state == _FAILED or last_place != -first_place:
            communicator.agree(self._call, error)  # raises on all: they pass different texts or an error
            raise error or AssertionError("replicas have failed or are out of step, but their texts do not differ")
        if state == _GOES_ON and lacks_spec:
            known = communicator.broadcast_object(self._empty, -source)
            self._empty = known if self._empty is None else self._empty
        return int(state)

    @property
    def _call(self) -> str:
        return f"the next element of a DistributedIterator (number {self._taken} of epoch {self._epoch})"


_Made = tuple[Iterable[Any], Dataset | None]
"""What a call returns, and the dataset that it distributes; None under the default strategy, which returns that as it is."""


def _described(dataset: Iterable[Any], source: Dataset | None) -> Iterable[Any]:
    """Return a dataset after all ranks have agreed on what describes the data that each reads by itself. A collective call."""
    if source is not None:
        source.is_distributed = True
    if isinstance(dataset, DistributedDataset) and dataset._policy is not DATA:
        communicator = dataset._communicator
        found = communicator.broadcast_object(communicator.gather_objects(dataset._described))
        if len({*found}) > 1:
            dataset._described = f"{found[0][0]}, and others (checksum {crc32(repr(found).encode()):08x})", None, None
    return dataset


def distribute_dataset(strategy: Any, dataset: Any, options: InputOptions | None = None) -> Iterable[Any]:
    """Return what ``strategy.experimental_distribute_dataset(dataset, options)`` returns. A collective call."""
    communicator: BaseCommunicator = strategy.extended.communicator
    call = "experimental_distribute_dataset"

    def make() -> tuple[_Made, str]:
        wanted = read_options(options)
        _refuse_per_replica(strategy, call, wanted)
        if default_mode().strategy is strategy:
            return (dataset, None), ""
        source = as_dataset(dataset)
        part, policy = _part_of(source, wanted.auto_shard_policy, communicator.rank, communicator.size)
        if wanted.virtual_replicas is not None:
            own_parts(wanted.virtual_replicas, communicator.rank, communicator.size)
            if policy is not DATA:
                raise InvalidArgumentError(
                    "virtual_replicas are parts of batches that ranks share, and with auto_shard_policy="
                    f"{wanted.auto_shard_policy.name} each rank reads other data: use AutoShardPolicy.DATA"
                )
        shared = "data of each rank's own" if wanted.auto_shard_policy is OFF else source.describe()
        text = f"{shared}, auto_shard_policy={wanted.auto_shard_policy.name}, virtual_replicas={wanted.virtual_replicas}"
        return (DistributedDataset(strategy, part, policy, wanted), source), text

    return _described(*communicator.agree_on(call, make))


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

    def make() -> tuple[_Made, str]:
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
            return (dataset_fn(InputContext()), None), ""
        made = as_dataset(dataset_fn(InputContext(communicator.size, communicator.rank, communicator.size)))
        part, _ = _part_of(made, OFF, communicator.rank, communicator.size)
        return (DistributedDataset(strategy, part, None, wanted), made), ""

    return _described(*communicator.agree_on(call, make))


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
        raise InvalidArgumentError(f"a dataset sharded by SHARD_HINT waits for AutoShardPolicy.HINT; got {policy.name}")
    if policy is HINT and not dataset.is_hinted:
        raise InvalidArgumentError(
            f"AutoShardPolicy.HINT puts numbers in place of SHARD_HINT, and {dataset!r} was not sharded by it.\n"
            "    incorrect:  strategy.experimental_distribute_dataset(dataset, options)\n"
            "    correct:    strategy.experimental_distribute_dataset(dataset.shard(SHARD_HINT, SHARD_HINT), options)"
        )
    if policy is FILE and not dataset.is_file_based:
        raise InvalidArgumentError(
            f"AutoShardPolicy.FILE shards files, and {dataset!r} has none; use AutoShardPolicy.DATA, or a mpistrat.FileDataset"
        )
    return (dataset.shard(num_pipelines, pipeline), OFF) if policy in (FILE, HINT) else (dataset, policy)
