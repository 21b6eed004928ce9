"""DistributedIterator: the batches of this replica, ending after the same number on all replicas."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from mpistrat.communicator.interface import BaseCommunicator
from mpistrat.context.stack import in_replica_context_of
from mpistrat.context.values import regroup
from mpistrat.device.binding import bound_device
from mpistrat.errors import InvalidArgumentError, OutOfRangeError
from mpistrat.inputs.input_options import InputOptions
from mpistrat.inputs.prefetch import Fetcher, Prefetcher
from mpistrat.inputs.rebatch import empty_like, spec_of
from mpistrat.reduction import ReduceOp

# the state of a replica; the maximum over all replicas decides
_ENDED, _GOES_ON, _FAILED = range(3)
_UNKNOWN = np.iinfo(np.int64).max


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


class EpochBatches(NamedTuple):
    """The batches of one replica in one epoch, from batch `first` on; how far it has come is told to the dataset."""

    batches: Iterator[Any]
    length: int | None
    is_agreed: bool
    epoch: int
    first: int
    reach: Callable[[int, int], None]
    end: Callable[[int], None]


class DistributedIterator(Iterator[Any]):
    """Yields the batches of this replica in one epoch, then batches of no rows until all replicas have had theirs.

    Created by iterating over a `DistributedDataset`. Taking an element is a collective call. If all replicas know their number
    of batches, they exchange it with the first element, or not at all if they have compared it before; otherwise they exchange
    a few numbers for each element. An error of one replica ends the iteration on all of them, and so does a replica at another
    element or in another epoch, because it left the loop early: at once if numbers are exchanged or MPISTRAT_STRICT is on, else
    with the next collective.
    """

    def __init__(self, strategy: Any, source: EpochBatches, options: InputOptions) -> None:
        self._strategy = strategy
        self._communicator: BaseCommunicator = strategy.extended.communicator
        self._batches = _prefetched(source.batches, options)
        self._length, self._epoch = source.length, source.epoch
        self._reach, self._end = source.reach, source.end
        # number of elements of every replica: known from the start, from the first exchange on, or never
        self._steps = source.length if source.is_agreed else None
        self._taken = source.first
        # an element that was read for element_spec, and has not been taken
        self._ahead: tuple[list[Any], Exception | None] | None = None
        self._empty: Any = None
        self._is_over = False

    @property
    def element_spec(self) -> Any:
        """The nest of `ArraySpec` that describes every element; the first one is read for it."""
        if self._empty is None:
            self._ahead = self._ahead or self._attempt()
            if self._ahead[1] is not None:
                raise self._ahead[1]
        if self._empty is None:
            raise InvalidArgumentError("this replica has no elements, and has not received their spec from another one")
        return spec_of(self._empty)

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
        self._is_over = True
        if isinstance(self._batches, (Fetcher, Prefetcher)):
            self._batches.close()
        self._batches, self._ahead = iter(()), None

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
        (shares, error), self._ahead = self._ahead or self._attempt(), None
        try:
            is_over = self._agree_on_end(bool(shares), error)
        except BaseException:
            self.close()
            raise
        if is_over:
            self.close()
            self._end(self._epoch)
            return []
        self._taken += 1
        self._reach(self._epoch, self._taken)
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

    def _agree_on_end(self, has_share: bool, error: Exception | None) -> bool:
        """Return whether all replicas are at the end; raise if one has failed."""
        communicator = self._communicator
        if communicator.is_strict:
            communicator.agree(self._call, error)
        if self._steps is None and communicator.size > 1:
            return self._exchange(communicator, has_share, error)
        if error is not None:
            communicator.refuse(self._call, error)
        if not communicator.is_strict:
            communicator.note(self._call)
        return not has_share if self._steps is None else self._taken >= self._steps

    def _exchange(self, communicator: BaseCommunicator, has_share: bool, error: Exception | None) -> bool:
        state = _FAILED if error is not None else _GOES_ON if has_share else _ENDED
        length = _UNKNOWN if self._length is None else self._length
        knows = self._empty is not None
        place = (self._epoch << 32) + self._taken
        source = -communicator.rank if knows else -communicator.size
        mine = np.array([state, length, not knows, source, place, -place], np.int64)
        [found] = communicator.all_reduce(ReduceOp.MAX, [mine])
        state, length, lacks_spec, source, last_place, first_place = found.tolist()
        if state == _FAILED or last_place != -first_place:
            communicator.agree(self._call, error)  # raises on all: they pass different texts or an error
            raise error or AssertionError("replicas have failed or are out of step, but their texts do not differ")
        if state == _GOES_ON and lacks_spec:
            self._learn(communicator, -source)
        if length != _UNKNOWN:
            self._steps = length
        return bool(state == _ENDED)

    def _learn(self, communicator: BaseCommunicator, root: int) -> None:
        """Broadcast a batch of no rows from replica `root`, for replicas that have had no element."""
        received = communicator.broadcast(np.frombuffer(pickle.dumps(self._empty), np.uint8), root)
        if self._empty is None:
            self._empty = pickle.loads(received.tobytes())

    @property
    def _call(self) -> str:
        return f"the next element of a DistributedIterator (number {self._taken} of epoch {self._epoch})"


def _prefetched(batches: Iterator[Any], options: InputOptions) -> Iterator[Any]:
    device, buffer_size = bound_device(), options.experimental_per_replica_buffer_size
    if device is not None:
        return Fetcher(batches, buffer_size, device, lifts=options.experimental_fetch_to_device is not False)
    return Prefetcher(batches, buffer_size) if buffer_size else batches
