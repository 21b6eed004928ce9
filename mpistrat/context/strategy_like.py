"""StrategyLike: the interface of strategies for the packages that `mpistrat.strategy` itself imports: variables, datasets."""

from __future__ import annotations

from typing import Any, Protocol

from mpistrat.communicator.interface import BaseCommunicator
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.reduction import ReduceOp

__all__ = ["ExtendedLike", "StrategyLike"]


class ExtendedLike(Protocol):
    """``strategy.extended``: see `mpistrat.StrategyExtended`."""

    communicator: BaseCommunicator

    def all_reduce(self, op: ReduceOp, arrays: list[Any], options: CommunicationOptions | None = None) -> list[Any]:
        """Reduce arrays over all ranks. A collective call."""


class StrategyLike(Protocol):
    """A strategy: see `mpistrat.Strategy`."""

    @property
    def extended(self) -> ExtendedLike:
        """The part that communicates."""

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas."""
