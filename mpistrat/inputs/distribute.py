"""DistributedDataset: global batches in, this replica's share of each out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from mpistrat.context.values import regroup
from mpistrat.strategy.base import Strategy

__all__ = ["BatchSource", "DistributedDataset"]


class BatchSource(Protocol):
    """A dataset that can hand out one replica's share of its global batches."""

    def batches(self, epoch: int, replica: int = 0, num_replicas: int = 1) -> Iterator[Any]:
        """Yield a replica's share of each global batch of an epoch."""

    def __len__(self) -> int:
        """Return the number of global batches of an epoch."""

    def describe(self) -> str:
        """Return what must be the same on all ranks: sizes, dtypes, order."""


class DistributedDataset:
    """The share of this rank's replica of each global batch. Made by ``strategy.experimental_distribute_dataset``.

    Making one is a collective call: all ranks must describe the same data, or they would not end together.

    Its elements are nests of per-replica values, which ``strategy.run(fn, args=(element,))`` turns into arrays; with one
    replica they are nests of arrays. Every replica sees the same number of elements: where a batch has fewer rows than
    there are replicas, the last ones get arrays of no rows.

    Each iteration is an epoch, counted here: ranks stay in step as long as they start the same number of iterations.
    """

    def __init__(self, source: BatchSource, strategy: Strategy) -> None:
        self._source = source
        strategy.extended.collectives.agree(f"experimental_distribute_dataset({source.describe()})")
        self._replica = strategy.extended.collectives.rank
        self._num_replicas = strategy.num_replicas_in_sync
        self._epoch = 0

    def __iter__(self) -> Iterator[Any]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        return (regroup(share, self._num_replicas) for share in self._source.batches(epoch, self._replica, self._num_replicas))

    def __len__(self) -> int:
        """Return the number of global batches of an epoch."""
        return len(self._source)

    def __repr__(self) -> str:
        return f"DistributedDataset({self._source!r}, replica={self._replica}({self._num_replicas}))"
