"""Declaration: what a variable was made with, and which ranks take part when it is used somewhere in the program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

import numpy as np

from mpistrat.arrays import Array, as_array, to_host
from mpistrat.communicator.interface import BaseCommunicator
from mpistrat.context.assignment import converted
from mpistrat.context.stack import default_mode, get_update_replica_id, in_replica_context_of
from mpistrat.context.strategy_like import StrategyLike
from mpistrat.errors import InvalidArgumentError
from mpistrat.state.aggregation import (
    VariableAggregation,
    VariableSynchronization,
    checked_aggregation,
    checked_synchronization,
)

__all__ = ["Declaration", "UpdateScope", "initial_array"]


class UpdateScope(Enum):
    """The ranks that take part in a call of a variable: this one only, the replicas inside ``run``, or all ranks outside it."""

    HERE = 0
    IN_RUN = 1
    OUTSIDE = 2


@dataclass(frozen=True)
class Declaration:
    """The checked parameters of a `mpistrat.Variable`.

    Attributes
    ----------
    strategy : Strategy
        The strategy in whose scope it was created.
    name : str
        Its name in errors.
    trainable : bool
        Whether an optimiser should change it.
    constraint : callable or None
        A function for optimisers to apply to a new value.
    synchronization : VariableSynchronization
        ON_WRITE or ON_READ.
    aggregation : VariableAggregation
        How the values of the replicas are combined.
    """

    strategy: StrategyLike
    name: str
    trainable: bool
    constraint: Callable[[Any], Any] | None
    synchronization: VariableSynchronization
    aggregation: VariableAggregation

    @classmethod
    def checked(
        cls,
        strategy: StrategyLike,
        name: str,
        trainable: bool | None,
        constraint: Any,
        synchronization: object,
        aggregation: object,
    ) -> Declaration:
        """Return the declaration of a variable, each parameter as `mpistrat.Variable` takes it.

        Raises
        ------
        InvalidArgumentError
            If one of them is not accepted.
        """
        kind, combined = checked_synchronization(synchronization), checked_aggregation(aggregation)
        is_trainable = kind is not VariableSynchronization.ON_READ if trainable is None else bool(trainable)
        if not (constraint is None or callable(constraint)):
            raise InvalidArgumentError(f"{name}: constraint must be None or a function of the new value; got {constraint!r}")
        return cls(strategy, name, is_trainable, constraint, kind, combined)

    def __str__(self) -> str:
        return f"{self.synchronization.name}, {self.aggregation.name}, trainable={self.trainable}"

    @property
    def communicator(self) -> BaseCommunicator:
        """The present communicator of the strategy, which changes when the strategy is closed."""
        return self.strategy.extended.communicator

    @cached_property
    def root(self) -> int | None:
        """The rank that keeps the array, under central storage; else None."""
        extended: Any = self.strategy.extended
        return extended.root if getattr(extended, "is_central", False) else None

    @cached_property
    def is_on_read(self) -> bool:
        """Whether each replica has its own array, and reading combines them."""
        return self.synchronization is VariableSynchronization.ON_READ and self.root is None

    @cached_property
    def needs_aggregation(self) -> bool:
        """Whether replicas cannot assign, because it has no aggregation under central storage."""
        return self.root is not None and self.aggregation is VariableAggregation.NONE

    def is_combined_here(self) -> bool:
        """Return whether reading the variable in the present context is a collective."""
        if self.strategy is default_mode().strategy:
            return False
        return self.update_scope("reading a variable") is UpdateScope.OUTSIDE and self.is_on_read

    def update_scope(self, call: str) -> UpdateScope:
        """Return the ranks that take part in a call in the present context.

        Raises
        ------
        RuntimeError
            If another strategy is current; the message names the `call`.
        """
        inside = in_replica_context_of(self.strategy, call)
        if self.strategy is default_mode().strategy or get_update_replica_id() is not None:
            return UpdateScope.HERE
        return UpdateScope.IN_RUN if inside else UpdateScope.OUTSIDE


def initial_array(given: Any, dtype: Any, shape: Sequence[int] | None, name: str) -> Array:
    """Return an initial value, or the result of the function given as one, in host memory and the given dtype.

    Raises
    ------
    InvalidArgumentError
        If it does not have the given shape, or an integer is out of range for the dtype.
    UnsupportedDtypeError
        If it is not an array of numbers, or the dtype cannot hold its kind of number.
    """
    value = to_host(as_array(given() if callable(given) else given, name))
    if shape is not None and value.shape != tuple(shape):
        raise InvalidArgumentError(
            f"{name} must have shape {tuple(shape)}; got an initial value of shape {value.shape}; each extent must be a "
            "number, because the shape of a variable does not change"
        )
    wanted = value.dtype if dtype is None else as_array(np.empty(0, dtype), name).dtype
    return converted(value, wanted, name)
