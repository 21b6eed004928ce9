"""Destinations: the ranks that receive the result of a reduction, and the value that the others hold."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from mpistrat.arrays import Array, as_array
from mpistrat.communicator.interface import BaseCommunicator
from mpistrat.communicator.sparse import IndexedSlices
from mpistrat.context.values import DistributedValues, Mirrored
from mpistrat.errors import InvalidArgumentError
from mpistrat.text import ranks_text
from mpistrat.topology.devices import ranks_of

__all__ = ["OnSomeReplicas", "deliver", "resolve"]

_ACCEPTED = (
    "accepted are a distributed value, a variable or an array (the replicas that hold it), a device string such as 'rank:0', a "
    "rank, and a set of ranks and device strings"
)
_ARRAY_PROTOCOLS = ("__array__", "__array_interface__", "__cuda_array_interface__", "__dlpack__")


class OnSomeReplicas(DistributedValues):
    """A value that only some ranks hold: the destinations of a reduction.

    Parameters
    ----------
    component : ndarray or IndexedSlices
        The component of this rank; on a rank that has none an empty placeholder, which users never see.
    ranks : tuple of int
        The ranks that hold the value, in increasing order.
    rank : int
        This rank.
    """

    def __init__(self, component: Any, ranks: tuple[int, ...], rank: int) -> None:
        super().__init__(component)
        self.ranks = ranks
        self._rank = rank

    @property
    def is_here(self) -> bool:
        """Whether this rank has a component."""
        return self._rank in self.ranks

    @property
    def values(self) -> tuple[Any, ...]:
        """The components that this rank holds: a tuple of one, or of none."""
        return super().values if self.is_here else ()

    def in_replica(self) -> Any:
        """Return the component; on a rank that has none, this value itself, which cannot be read there."""
        return self._component if self.is_here else self

    def read(self) -> Array:
        """Return the component.

        Raises
        ------
        InvalidArgumentError
            On a rank that has none.
        """
        if not self.is_here:
            raise InvalidArgumentError(
                f"rank {self._rank}: this value was reduced to {ranks_text(self.ranks)} and cannot be read on this rank.\n"
                '    incorrect:  total = ops.reduce("sum", value, "rank:0"); print(np.asarray(total)), on all ranks\n'
                "    correct:    if total.is_here: print(np.asarray(total))\n"
                '    correct:    total = ops.reduce("sum", value, value), to have it on all ranks'
            )
        return as_array(self._component)

    def stand_in(self) -> Any:
        """Return the component, or its placeholder."""
        return self._component

    def __repr__(self) -> str:
        held = repr(self._component) if self.is_here else "not here"
        return f"OnSomeReplicas({held}, on {ranks_text(self.ranks)})"


def resolve(destinations: Any, communicator: BaseCommunicator) -> tuple[int, ...]:
    """Return the ranks that `destinations` stands for, in increasing order.

    A value stands for the ranks that hold it, a device string for the ranks that have the device.

    Raises
    ------
    InvalidArgumentError
        If `destinations` is of an unsupported type, is empty, or names a rank or device that does not exist.
    """
    if isinstance(destinations, (set, frozenset, str)) and not destinations:
        raise InvalidArgumentError(f"destinations must not be empty; {_ACCEPTED}")
    items = destinations if isinstance(destinations, (set, frozenset)) else (destinations,)
    return tuple(sorted({rank for item in items for rank in _ranks(item, communicator)}))


def deliver(result: Any, ranks: tuple[int, ...], communicator: BaseCommunicator) -> Any:
    """Return a result, which all ranks have, as a value that only `ranks` hold; with one replica, the result itself."""
    if communicator.size == 1:
        return result
    if len(ranks) == communicator.size:
        return Mirrored(result)
    return OnSomeReplicas(result if communicator.rank in ranks else _empty(result), ranks, communicator.rank)


def _ranks(destination: Any, communicator: BaseCommunicator) -> Collection[int]:
    """Return the ranks that one destination stands for."""
    if isinstance(destination, OnSomeReplicas):
        return destination.ranks
    if isinstance(destination, str):
        return ranks_of(destination, communicator.world)
    if isinstance(destination, (int, np.integer)) and not isinstance(destination, bool):
        return ranks_of(f"rank:{destination}", communicator.world)
    held = isinstance(destination, (DistributedValues, IndexedSlices))
    if held or any(hasattr(destination, protocol) for protocol in _ARRAY_PROTOCOLS):
        return range(communicator.size)
    advice = ": pass a set to name several ranks" if isinstance(destination, (list, tuple)) else ""
    raise InvalidArgumentError(f"destinations cannot be {destination!r}{advice}; {_ACCEPTED}")


def _empty(result: Any) -> Any:
    """Return an empty placeholder of the type of `result`, so that the memory of `result` can be freed."""
    if isinstance(result, IndexedSlices):
        return IndexedSlices(result.values[:0].copy(), result.indices[:0].copy(), result.dense_shape)
    return as_array(result).reshape(-1)[:0].copy()
