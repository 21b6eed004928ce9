"""How data reaches the replicas: what a strategy says about it, before the inputs layer does it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from mpistrat.context.input_context import InputContext, ValueContext
from mpistrat.context.stack import default_mode
from mpistrat.context.values import regroup

if TYPE_CHECKING:
    from mpistrat.strategy.extended import StrategyExtended

__all__ = ["Distributable", "DistributeDataset", "DistributeFromFunction", "Feeding", "register_inputs"]

DistributeDataset = Callable[[Any, Any, Any], Iterable[Any]]
DistributeFromFunction = Callable[[Any, Callable[[InputContext], Any], Any], Iterable[Any]]

_registered: tuple[DistributeDataset, DistributeFromFunction]


class Distributable(Protocol):
    """A dataset that shares itself out, in place of the inputs layer."""

    def distribute(self, strategy: Any, options: Any) -> Iterable[Any]:
        """Return the elements of this rank's replica, as distributed values of `strategy`."""


def register_inputs(distribute_dataset: DistributeDataset, distribute_from_function: DistributeFromFunction) -> None:
    """Set what distributes a dataset, and what a function that makes one: ``(strategy, what, options)`` each."""
    global _registered
    _registered = distribute_dataset, distribute_from_function


class Feeding:
    """The methods of a strategy that feed its replicas."""

    if TYPE_CHECKING:

        @property
        def extended(self) -> StrategyExtended:
            """What the strategy brings along."""

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Iterable[Any]:
        """Return the dataset whose elements are split over the replicas: global batches in, per-replica batches out.

        A collective call: all ranks must describe the same data, or they would not end together.

        Parameters
        ----------
        dataset : ArrayDataset or iterable
            Batched with the global batch size. The default strategy returns it as it is.
        options : InputOptions, optional
            How it is shared out, and how far to read ahead.

        Raises
        ------
        RuntimeError
            If called inside `run`, or in the scope of another strategy.
        TypeError
            If it is not a dataset.
        NotImplementedError
            If the options ask for replication PER_REPLICA.
        """
        self.extended.require_cross_replica("strategy.experimental_distribute_dataset")
        if hasattr(dataset, "distribute") and default_mode().strategy is not self:
            shared: Iterable[Any] = dataset.distribute(self, options)
            return shared
        return _inputs()[0](self, dataset, options)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: Any = None
    ) -> Iterable[Any]:
        """Return the dataset whose elements are those of ``dataset_fn(context)``, which every rank calls once.

        A collective call. Nothing is split: the function batches with the size of a replica's batch, and takes its shard.

        Parameters
        ----------
        dataset_fn : callable
            Takes an `InputContext`, which says which input pipeline it makes and for how many replicas; returns a dataset.
        options : InputOptions, optional
            How far to read ahead.

        Raises
        ------
        RuntimeError
            If called inside `run`, or in the scope of another strategy.
        TypeError
            If the function does not return a dataset.
        NotImplementedError
            If the options ask for replication PER_REPLICA, and this is not a MirroredStrategy.
        """
        self.extended.require_cross_replica("strategy.distribute_datasets_from_function")
        return _inputs()[1](self, dataset_fn, options)

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Return per-replica values whose components ``value_fn(context)`` returns, which every rank calls once.

        Parameters
        ----------
        value_fn : callable
            Takes a `ValueContext`, which says for which replica it is called; returns a nest.

        Returns
        -------
        nest
            Each leaf a per-replica value; with one replica, just what `value_fn` returned.

        Raises
        ------
        RuntimeError
            If called inside `run`, or in the scope of another strategy.
        """
        self.extended.require_cross_replica("strategy.experimental_distribute_values_from_function")
        communicator = self.extended.communicator
        return regroup(value_fn(ValueContext(communicator.rank, communicator.size)), communicator.size)


def _inputs() -> tuple[DistributeDataset, DistributeFromFunction]:
    """Return what the inputs layer has registered. It lies above this one, so it is imported by name, when it is needed."""
    importlib.import_module("mpistrat.inputs.distribute")
    return _registered
