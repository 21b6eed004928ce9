"""Variable: an array that all replicas keep, equal on all of them or combined when it is read.

==========================  ==============================  ====================================================
operation                   ON_WRITE                        ON_READ
==========================  ==============================  ====================================================
read in ``run``             this replica's array            this replica's array
read elsewhere              this rank's array               arrays combined by `aggregation`; a collective
assign in ``run``           value combined by               this replica's array only
                            `aggregation`; a collective
assign elsewhere            the value, on all               SUM: value / N on each replica; else the value
assign_add in ``run``       delta combined likewise         this replica's array only
assign_add elsewhere        the delta, on all               SUM: refused; else the delta
==========================  ==============================  ====================================================
"""

from __future__ import annotations

from enum import Enum
from typing import Any, TypeVar

import numpy as np

from mpistrat.arrays import Array, as_array
from mpistrat.context.stack import default_mode, get_strategy, in_replica_context_of, misplaced
from mpistrat.context.values import Mirrored, PerReplica, fitted, keeps_kind
from mpistrat.errors import InvalidArgumentError, UnsupportedDtypeError
from mpistrat.reduction import ReduceOp
from mpistrat.strategy.base import Strategy

__all__ = ["Variable", "VariableAggregation", "VariableSynchronization"]


class VariableSynchronization(Enum):
    """When the arrays of a variable are brought together; AUTO means ON_WRITE, and NONE is refused."""

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


class VariableAggregation(Enum):
    """How the values of the replicas become one."""

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3


_E = TypeVar("_E", bound=Enum)


class Variable(Mirrored):
    """An array that the replicas of the current strategy share. It can be used like an array; `assign` changes it.

    Making one is a collective call: the initial value of replica 0 is sent to all. Outside all scopes it belongs to the
    default strategy, and nothing is sent.

    Parameters
    ----------
    initial_value : array_like or callable
        The first value, or what returns it; every rank calls it, so that random generators stay in step.
    trainable : bool, optional
        Whether an optimiser should change it; by default True, and False where it is synchronized on reading.
    name : str, optional
        What errors call it.
    dtype : dtype, optional
        The type of its elements; that of the initial value by default.
    synchronization : VariableSynchronization
        ON_WRITE (and AUTO): equal on all replicas. ON_READ: each replica has its own, combined when it is read.
    aggregation : VariableAggregation
        How the values that replicas assign, or for ON_READ hold, are combined.

    Raises
    ------
    InvalidArgumentError
        If `synchronization` is NONE or no member, `aggregation` is no member, the mean of integers is asked for, or a variable
        synchronized ON_READ is to be trainable.
    UnsupportedDtypeError
        If the initial value is no array of numbers, or `dtype` cannot hold the kind of number that it has.
    """

    def __init__(
        self,
        initial_value: Any,
        trainable: bool | None = None,
        name: str | None = None,
        dtype: Any = None,
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
        aggregation: VariableAggregation = VariableAggregation.NONE,
    ) -> None:
        self._strategy: Strategy = get_strategy()
        self._name = name or "Variable"
        self._synchronization = _checked_synchronization(synchronization)
        self._aggregation = _member(VariableAggregation, aggregation, "aggregation", VariableAggregation)
        on_read = self._synchronization is VariableSynchronization.ON_READ
        if on_read and trainable:
            raise InvalidArgumentError(f"{self._name}: a variable that is synchronized ON_READ cannot be trainable")
        self._trainable = not on_read if trainable is None else trainable
        value = as_array(initial_value() if callable(initial_value) else initial_value, self._name)
        self._array: Array = np.array(self._strategy.extended.collectives.broadcast(_cast(value, dtype, self._name)))
        if self._aggregation is VariableAggregation.MEAN and self._array.dtype.kind in "biu":
            raise InvalidArgumentError(
                f"{self._name} has dtype {self._array.dtype}, whose mean it cannot hold: use aggregation SUM or a float dtype"
            )
        self._view: Array = self._array.view()
        self._view.flags.writeable = False
        super().__init__(self._view)

    @property
    def name(self) -> str:
        """What errors call it."""
        return self._name

    @property
    def trainable(self) -> bool:
        """Whether an optimiser should change it."""
        return self._trainable

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

    @property
    def value(self) -> Array:
        """The array, not to be written to; it changes when the variable does."""
        return self.read()

    def numpy(self) -> Array:
        """Return a copy of the array."""
        return np.array(self.read())

    def in_replica(self) -> Variable:
        """Return the variable: it finds its component itself."""
        return self

    def read(self) -> Array:
        """Return the array; for a variable synchronized ON_READ, a collective call outside ``strategy.run``.

        Raises
        ------
        RuntimeError
            If another strategy than its own is current. A variable of the default strategy can be read anywhere.
        InvalidArgumentError
            If the arrays of an ON_READ variable are to be combined and its aggregation is NONE.
        """
        if self._strategy is default_mode().strategy:
            return self._view
        inside = in_replica_context_of(self._strategy, "reading a variable")
        if inside or self._synchronization is VariableSynchronization.ON_WRITE:
            return self._view
        return self._combined(self._array)

    def writable(self) -> Array:
        """Return the array of this replica, to be written to: what ``ctx.update(variable, fn)`` hands to `fn`.

        Raises
        ------
        RuntimeError
            Outside ``run`` of the variable's strategy. A variable of the default strategy is writable outside all scopes.
        """
        inside = in_replica_context_of(self._strategy, "ctx.update of a variable")
        if not inside and self._strategy is not default_mode().strategy:
            raise misplaced(
                f"ctx.update of {self!r}",
                f"inside strategy.run of {self._strategy!r}",
                "mpistrat.get_replica_context().update(variable, fn), outside strategy.run",
                "def step(): mpistrat.get_replica_context().update(variable, fn), then strategy.run(step)",
            )
        return self._array

    def assign(self, value: Any) -> Variable:
        """Set the variable to a value, and return it.

        A collective call inside ``strategy.run`` for a variable synchronized ON_WRITE.

        Raises
        ------
        InvalidArgumentError
            If the shapes differ, or inside ``strategy.run`` with aggregation NONE.
        TypeError
            If the value is a per-replica value, or its kind of number does not fit.
        RuntimeError
            If another strategy than the variable's own is current.
        """
        self._array[...] = self._incoming(value, "assign")
        return self

    def assign_add(self, delta: Any) -> Variable:
        """Add to the variable, and return it; raises and communicates like `assign`."""
        np.add(self._array, self._incoming(delta, "assign_add"), out=self._array)
        return self

    def assign_sub(self, delta: Any) -> Variable:
        """Subtract from the variable, and return it; raises and communicates like `assign`."""
        np.subtract(self._array, self._incoming(delta, "assign_sub"), out=self._array)
        return self

    def __repr__(self) -> str:
        kind = (
            "" if self._aggregation is VariableAggregation.NONE else f", {self._synchronization.name} {self._aggregation.name}"
        )
        return f"Variable({self._name!r}, {self._array.dtype} {self._array.shape}{kind})"

    def _incoming(self, value: Any, method: str) -> Array:
        """Return what a value that is assigned here does to the array of this replica."""
        inside = in_replica_context_of(self._strategy, f"Variable.{method}")
        if isinstance(value, PerReplica):
            raise TypeError(
                f"{self!r}.{method} got a per-replica value, which differs between replicas.\n"
                f"    incorrect:  variable.{method}(strategy.run(fn))\n"
                f'    correct:    variable.{method}(strategy.reduce("mean", strategy.run(fn), axis=None))'
            )
        array = fitted(value, self._array, self)
        if self._synchronization is VariableSynchronization.ON_READ:
            return array if inside else self._spread(array, method)
        return self._combined(array) if inside else array

    def _combined(self, array: Array) -> Array:
        """Return the arrays of all replicas as one. A collective call."""
        ops = self._strategy.extended.collectives
        if self._aggregation is VariableAggregation.NONE:
            raise InvalidArgumentError(_no_aggregation(self, ops.size))
        if self._aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return ops.broadcast(array)
        return ops.all_reduce(ReduceOp[self._aggregation.name], [array])[0]

    def _spread(self, array: Array, method: str) -> Array:
        """Return what each replica of an ON_READ variable holds, so that reading gives `array` again."""
        if self._aggregation is not VariableAggregation.SUM:
            return array
        if method != "assign":
            raise InvalidArgumentError(
                f"{self!r}.{method} outside strategy.run is undefined: the replicas' arrays are summed when it is read.\n"
                f"    correct:    {method} inside strategy.run, or variable.assign(value), which gives each replica its part"
            )
        return _part(array, self._strategy.extended.collectives.rank, self._strategy.num_replicas_in_sync)


def _cast(value: Array, dtype: Any, name: str) -> Array:
    """Return the initial value in the dtype that was asked for."""
    wanted = value.dtype if dtype is None else as_array(np.empty(0, dtype), name).dtype
    if not keeps_kind(value.dtype, wanted):
        raise UnsupportedDtypeError(
            f"{name} is to have dtype {wanted}; an initial value of dtype {value.dtype} would lose its kind: cast it first, "
            f"value.astype({wanted.name!r})"
        )
    return value.astype(wanted, copy=False)


def _part(total: Array, replica: int, num_replicas: int) -> Array:
    """Return one replica's part of a sum; integers are split without a remainder."""
    if total.dtype.kind == "b":
        return total
    if total.dtype.kind in "iu":
        share, rest = np.divmod(total.astype(np.uint64 if total.dtype.kind == "u" else np.int64), num_replicas)
        return np.asarray(share + (replica < rest), total.dtype)
    return np.asarray(total / total.dtype.type(num_replicas), total.dtype)


def _member(enum: type[_E], value: object, argument: str, accepted: Any) -> _E:
    if isinstance(value, enum):
        return value
    names = ", ".join(str(member) for member in accepted)
    raise InvalidArgumentError(f"{argument} must be one of {names}; got {value!r}")


def _checked_synchronization(synchronization: VariableSynchronization) -> VariableSynchronization:
    kinds = VariableSynchronization
    accepted = (kinds.AUTO, kinds.ON_WRITE, kinds.ON_READ)
    given = _member(kinds, None if synchronization is kinds.NONE else synchronization, "synchronization", accepted)
    return kinds.ON_WRITE if given is kinds.AUTO else given


def _no_aggregation(variable: Variable, num_replicas: int) -> str:
    return (
        f"{variable!r} has aggregation NONE, so nothing says how the values of {num_replicas} replicas become one.\n"
        "    incorrect:  def step(): variable.assign(value)\n"
        "    correct:    mpistrat.Variable(…, aggregation=mpistrat.VariableAggregation.MEAN); SUM, ONLY_FIRST_REPLICA too\n"
        '    correct:    def step(): ctx.update(variable, lambda old, new: new, (ctx.all_reduce("mean", value),))\n'
        "    correct:    variable.assign(value) outside strategy.run"
    )
