"""StrategyLike: what variables, datasets and replica contexts need of their strategy, whose package imports theirs."""

from __future__ import annotations

from typing import Any, Protocol

from mpistrat.communicator.interface import BaseCommunicator
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.reduction import ReduceOp

__all__ = ["ExtendedLike", "StrategyLike"]


class ExtendedLike(Protocol):
    """The extended part of a strategy: see `mpistrat.StrategyExtended`."""

    communicator: BaseCommunicator

    def all_reduce(self, op: ReduceOp, arrays: list[Any], options: CommunicationOptions | None = None) -> list[Any]:
        """Combine arrays of this rank with those of the others. A collective call."""


class StrategyLike(Protocol):
    """A strategy: see `mpistrat.Strategy`."""

    @property
    def extended(self) -> ExtendedLike:
        """How the strategy communicates; its communicator is closed with the strategy."""

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas whose values are combined."""
