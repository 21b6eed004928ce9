"""Positions in data: an epoch, and a batch of it; and how an iteration goes on there, perhaps with batches of another size."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from mpistrat.communicator.validate import checked_int
from mpistrat.errors import InvalidArgumentError


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
