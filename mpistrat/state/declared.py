"""Declared: what was said of a variable when it was made, and its array on this rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from mpistrat.arrays import Array, as_array, is_on_device, to_device, to_host
from mpistrat.context.fitting import converted
from mpistrat.context.stack import get_strategy, in_replica_context_of, require_no_default_scope
from mpistrat.context.values import Mirrored
from mpistrat.errors import InvalidArgumentError
from mpistrat.state import refusals
from mpistrat.state.aggregation import (
    VariableAggregation,
    VariableSynchronization,
    checked_aggregation,
    checked_synchronization,
)
from mpistrat.strategy.base import Strategy

__all__ = ["Declared"]


class Declared(Mirrored):
    """A variable before anything is done to it. The parameters are those of `mpistrat.Variable`."""

    def __init__(
        self,
        initial_value: Any,
        trainable: bool | None = None,
        name: str | None = None,
        dtype: Any = None,
        constraint: Callable[[Any], Any] | None = None,
        synchronization: VariableSynchronization | None = VariableSynchronization.AUTO,
        aggregation: VariableAggregation | None = VariableAggregation.NONE,
        shape: Sequence[int] | None = None,
    ) -> None:
        self._strategy: Strategy = get_strategy()
        self._name = name or "Variable"
        communicator = self._strategy.extended.communicator
        try:
            require_no_default_scope("mpistrat.Variable")
            self._synchronization = checked_synchronization(synchronization)
            self._aggregation = checked_aggregation(aggregation)
            self._trainable = (
                self._synchronization is not VariableSynchronization.ON_READ if trainable is None else bool(trainable)
            )
            self._constraint = _checked_constraint(constraint, self._name)
            value = _initial(initial_value, dtype, shape, self._name)
        except Exception as error:
            communicator.refuse(f"Variable(name={self._name!r})", error)
        kind = f"{self._synchronization.name}, {self._aggregation.name}, trainable={self._trainable}"
        communicator.note(f"Variable({self._name!r}, {value.dtype} {value.shape}, {kind})")
        self._hold(to_device(np.array(communicator.broadcast(value), order="C")))
        if self._aggregation is VariableAggregation.MEAN and self.dtype.kind in "biu":
            raise InvalidArgumentError(
                f"{self._name} has dtype {self.dtype}, whose mean it cannot hold: use aggregation SUM or a float dtype"
            )

    @property
    def name(self) -> str:
        """What errors call it."""
        return self._name

    @property
    def trainable(self) -> bool:
        """Whether an optimiser should change it."""
        return self._trainable

    @property
    def constraint(self) -> Callable[[Any], Any] | None:
        """What an optimiser should call with a new value, to put its result in the place of it; the variable never calls it."""
        return self._constraint

    @property
    def initial_value(self) -> NoReturn:
        """Not kept, as in TensorFlow without graphs: read the variable right after making it.

        Raises
        ------
        RuntimeError
            Always, and says how to keep it.
        """
        raise refusals.not_kept(self)

    def is_initialized(self, name: str | None = None) -> bool:
        """Return True: a variable has its initial value from the start. `name` is for programs for TensorFlow."""
        return True

    @property
    def synchronization(self) -> VariableSynchronization:
        """ON_WRITE or ON_READ."""
        return self._synchronization

    @property
    def aggregation(self) -> VariableAggregation:
        """How the values of the replicas become one."""
        return self._aggregation

    @property
    def distribute_strategy(self) -> Strategy:
        """The strategy in whose scope it was made."""
        return self._strategy

    def __deepcopy__(self, memo: dict[int, Any]) -> Declared:
        in_replica_context_of(self._strategy, "copy.deepcopy of a variable")  # refused under another strategy
        copied = copy.copy(self)
        copied._hold(self._array.copy())
        memo[id(self)] = copied
        return copied

    def __repr__(self) -> str:
        kind = (
            "" if self._aggregation is VariableAggregation.NONE else f", {self._synchronization.name} {self._aggregation.name}"
        )
        return f"{type(self).__name__}({self._name!r}, {self._array.dtype} {self._array.shape}{kind})"

    def _hold(self, array: Array) -> None:
        """Make `array` the one of this replica, of which users see a view that cannot be written to, where there is such."""
        self._array = array
        self._view: Array = array.view()
        if not is_on_device(array):  # CuPy has no arrays that are only read
            self._view.flags.writeable = False
        self._component = self._view


def _checked_constraint(constraint: Any, name: str) -> Callable[[Any], Any] | None:
    if constraint is None or callable(constraint):
        checked: Callable[[Any], Any] | None = constraint
        return checked
    raise InvalidArgumentError(f"{name}: constraint must be None or a function of the new value; got {constraint!r}")


def _initial(given: Any, dtype: Any, shape: Sequence[int] | None, name: str) -> Array:
    """Return the initial value, in host memory, of the shape and in the dtype that were asked for."""
    value = to_host(as_array(given() if callable(given) else given, name))
    if shape is not None and value.shape != tuple(shape):
        raise InvalidArgumentError(
            f"{name} is to have shape {tuple(shape)}; an initial value of shape {value.shape} does not fit; each extent "
            "must be a number, since a variable keeps its shape"
        )
    wanted = value.dtype if dtype is None else as_array(np.empty(0, dtype), name).dtype
    return converted(value, wanted, name)
