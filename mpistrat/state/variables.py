"""Variable: an array that all replicas keep, equal on all of them or combined when it is read.

==============================  ==============================  ================================================
operation                       ON_WRITE                        ON_READ
==============================  ==============================  ================================================
read in ``run``                 this replica's array            this replica's array
read elsewhere                  this rank's array               arrays combined by `aggregation`; a collective;
                                                                NONE: refused
assign in ``run``               value combined by               this replica's array only
                                `aggregation`; a collective;
                                NONE: a value that is equal
                                on all, else refused
assign elsewhere                the value, on all               SUM: value / N on each replica; else the value
assign_add, _sub in ``run``     delta combined likewise         this replica's array only
assign_add, _sub elsewhere      the delta, on all               SUM: refused; else the delta
scatter updates in ``run``      the rows of all replicas;       refused
                                NONE: rows that are equal
                                on all, else refused
… _min, _max, _update           ONLY_FIRST_REPLICA: the rows    refused
in ``run``                      of replica 0; NONE: rows that
                                are equal; else refused
scatter updates elsewhere       the rows, on all                refused
save: `numpy` elsewhere         this rank's array               the combined array
restore: `assign` elsewhere     the value, on all               what reads back as the value
==============================  ==============================  ================================================

Inside the function that ``extended.update`` calls, all of it means this replica's array only. So it does for variables of the
default strategy, which are plain arrays. Under central storage there is one array: ON_READ acts as ON_WRITE, and in ``run``
what NONE says of values that are equal holds for scatter_min, _max and _update alone; else it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mpistrat.arrays import Array, is_on_device, to_host
from mpistrat.context.fitting import fitted
from mpistrat.context.stack import default_mode, misplaced
from mpistrat.context.values import DistributedValues, PerReplica, select_replica
from mpistrat.errors import AgreementError, UnsupportedDtypeError
from mpistrat.state import refusals
from mpistrat.state.aggregation import VariableAggregation, aggregated, check_equal, share
from mpistrat.state.concern import Where
from mpistrat.state.indices import checked_slices, flattened
from mpistrat.state.rows import COMPARING, Rows, apply, by_rows, checked_rows, gathered_rows
from mpistrat.state.scatter import ScatterUpdates

__all__ = ["Variable"]


class Variable(ScatterUpdates):  # numpydoc ignore=PR02
    """An array that the replicas of the current strategy share. It can be used like an array; `assign` changes it.

    Making one is a collective call: the initial value of replica 0 is sent to all. Outside all scopes it belongs to the
    default strategy, and nothing is sent. Its array is where the replica computes: on a GPU it is one of CuPy's, to which
    initial values and assigned ones are copied from host memory.

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
    constraint : callable, optional
        What an optimiser should call with a new value; kept as an attribute, and never called here.
    synchronization : VariableSynchronization, optional
        ON_WRITE (and AUTO, and None): equal on all replicas. ON_READ: each replica has its own, combined when it is read.
    aggregation : VariableAggregation, optional
        How the values that replicas assign, or for ON_READ hold, are combined; None means NONE.
    shape : sequence of int, optional
        The shape that the initial value must have.

    Raises
    ------
    InvalidArgumentError
        If `synchronization` is NONE or no member, `aggregation` is not a member, the mean of integers is asked for, the initial
        value has another shape than `shape`, or `constraint` cannot be called.
    UnsupportedDtypeError
        If the initial value is not an array of numbers, or `dtype` cannot hold the kind of number that it has.
    AgreementError
        On every rank, if ranks make different variables.
    RuntimeError
        If the current scope was entered inside that of the default strategy.
    """

    @property
    def value(self) -> Array:
        """The array, on a GPU that of CuPy; not to be written to. It changes when the variable does."""
        return self.read()

    def numpy(self) -> Array:
        """Return a copy of the array, in host memory."""
        array = self.read()
        return to_host(array) if is_on_device(array) else np.array(array)

    def read_value(self) -> Array:
        """Return a copy of the array, where it is: on a GPU one of CuPy's. What is assigned later does not change it.

        Communicates and raises like `read`.
        """
        copied: Array = self.read().copy()
        return copied

    def in_replica(self) -> Variable:
        """Return the variable: it finds its component itself."""
        return self

    def across_replicas(self) -> DistributedValues:
        """Return what ``strategy.reduce`` combines: the arrays of the replicas for ON_READ, else the variable, equal on all."""
        return PerReplica(self._view) if self._is_on_read else self

    def read(self) -> Array:
        """Return the array; for a variable synchronized ON_READ, a collective call outside ``strategy.run``.

        Raises
        ------
        RuntimeError
            If another strategy than its own is current. A variable of the default strategy can be read anywhere.
        InvalidArgumentError
            If the arrays of an ON_READ variable are to be combined and its aggregation is NONE.
        """
        if not self._is_combined_here():
            return self._view
        if self._aggregation is VariableAggregation.NONE:
            self._refuse("read", refusals.unreadable(self, self._strategy.num_replicas_in_sync), Where.OUTSIDE)
        self._agree("read", Where.OUTSIDE, ())
        return aggregated(self._aggregation, self._array, self._strategy)

    def assign(self, value: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True) -> Any:
        """Set the variable to a value, and return it.

        A collective call inside ``strategy.run`` for a variable synchronized ON_WRITE. Outside it the next collective compares
        what ranks have assigned, values too where they take up to 1 MiB; with MPISTRAT_STRICT all are compared at once.

        Parameters
        ----------
        value : array_like
            Of the variable's shape. Inside ``strategy.run`` a per-replica value stands for the component of this replica.
        use_locking, name : bool, str
            Without effect; accepted because programs for TensorFlow pass them.
        read_value : bool
            Whether to return the variable.

        Returns
        -------
        Variable or None
            The variable; None where `read_value` is False.

        Raises
        ------
        InvalidArgumentError
            If the shapes differ; under central storage also inside ``strategy.run`` with aggregation NONE.
        TypeError
            If the value is a per-replica value outside ``strategy.run``, or its kind of number does not fit.
        RuntimeError
            If another strategy than the variable's own is current.
        AgreementError
            On every replica, if they pass different values inside ``strategy.run`` and the aggregation is NONE. From the next
            collective, if ranks pass different ones outside it.
        """
        self._array[...] = self._incoming("assign", value)
        return self._written(read_value)

    def assign_add(self, delta: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True) -> Any:
        """Add to the variable, and return it; communicates and raises like `assign`.

        Outside ``strategy.run`` it raises InvalidArgumentError for a variable that is synchronized ON_READ and summed.
        """
        np.add(self._array, self._incoming("assign_add", delta), out=self._array)
        return self._written(read_value)

    def assign_sub(self, delta: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True) -> Any:
        """Subtract from the variable, and return it; communicates and raises like `assign_add`. Booleans have no difference."""
        np.subtract(self._array, self._incoming("assign_sub", delta), out=self._array)
        return self._written(read_value)

    def writable(self) -> Array:
        """Return the array of this replica, to be written to: what ``ctx.update(variable, fn)`` hands to `fn`.

        Raises
        ------
        RuntimeError
            Outside ``run`` of the variable's strategy. A variable of the default strategy is writable outside all scopes.
        """
        if self._where("ctx.update of a variable") is Where.OUTSIDE:
            raise misplaced(
                f"ctx.update of {self!r}",
                f"inside strategy.run of {self._strategy!r}",
                "mpistrat.get_replica_context().update(variable, fn), outside strategy.run",
                "def step(): mpistrat.get_replica_context().update(variable, fn), then strategy.run(step)",
            )
        return self._array

    def update_component(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Return ``fn(variable, *args, **kwargs)``, for this rank: what ``extended.update`` calls, in its update context.

        There the variable is its component: what `fn` reads or assigns is this replica's array. Mirrored values among the
        arguments, at any depth, are replaced by their component too.
        """
        return fn(self, *select_replica(tuple(args)), **select_replica(dict(kwargs or {})))

    def _incoming(self, method: str, value: Any) -> Array:
        """Return what a value that is assigned here does to the array of this replica."""
        where = self._where(f"Variable.{method}")
        try:
            array = self._checked(method, value, where)
        except (TypeError, ValueError) as error:
            self._refuse(method, error, where)
        self._agree(method, where, (array,))
        if where is Where.IN_RUN and not self._is_on_read:
            if self._aggregation is VariableAggregation.NONE:
                self._require_equal(method, (array,))
                return array
            return aggregated(self._aggregation, array, self._strategy)
        if where is Where.OUTSIDE and self._is_on_read and self._aggregation is VariableAggregation.SUM:
            return share(array, self._strategy.extended.communicator)
        return array

    def _scatter(self, method: str, delta: Any) -> Variable:
        where = self._where(f"Variable.{method}")
        try:
            target, rows = self._checked_rows(method, delta, where)
        except (TypeError, ValueError, NotImplementedError) as error:
            self._refuse(method, error, where)
        self._agree(method, where, rows)
        if where is Where.IN_RUN and self._aggregation is VariableAggregation.NONE:
            self._require_equal(method, rows)
        elif where is Where.IN_RUN:
            rows = gathered_rows(rows, self._aggregation, self._strategy)
        apply(by_rows(method), target, rows)
        self._written()
        return self

    def _require_equal(self, method: str, arrays: tuple[Array, ...]) -> None:
        """Check that all replicas change the variable in the same way, for nothing says how their values become one."""
        communicator = self._strategy.extended.communicator
        if communicator.size == 1:
            return
        try:
            check_equal(f"{self!r}.{method}", arrays, communicator)
        except AgreementError as error:
            raise refusals.differing(self, method, communicator.size, error) from None

    def _checked(self, method: str, value: Any, where: Where) -> Array:
        value = self._own(method, value, where)
        if method == "assign_sub" and self.dtype.kind == "b":
            raise UnsupportedDtypeError(f"{self!r}.{method} is not defined for bool; accepted are integers, floats and complex")
        array = fitted(value, self._array, self)
        is_summed = self._aggregation is VariableAggregation.SUM
        if where is Where.OUTSIDE and self._is_on_read and is_summed and method != "assign":
            raise refusals.sum_outside_run(self, method)
        if where is Where.IN_RUN and self._needs_aggregation:
            raise refusals.no_aggregation(self, method, self._strategy.num_replicas_in_sync)
        return array

    def _checked_rows(self, method: str, delta: Any, where: Where) -> tuple[Array, Rows]:
        """Return the array whose rows are changed, which may be a view in which leading axes are one, and the rows."""
        by_entries = by_rows(method) != method
        given = [self._own(method, part, where) for part in (delta if by_entries else (delta,))]
        if self._is_on_read and self._strategy is not default_mode().strategy:
            raise refusals.no_scatter(self, method)
        if where is Where.IN_RUN:
            is_comparing = by_rows(method) in COMPARING
            if is_comparing and self._aggregation in (VariableAggregation.SUM, VariableAggregation.MEAN):
                raise refusals.no_such_aggregation(self, method)
            if not is_comparing and self._needs_aggregation:
                raise refusals.no_aggregation(self, method, self._strategy.num_replicas_in_sync)
        if not by_entries:
            return self._array, checked_rows(method, given[0], self._array, self)
        slices = checked_slices(f"{self!r}.{method}", given[0], given[1], self.shape)
        target = flattened(self._array, slices.values.shape[1:])
        return target, checked_rows(by_rows(method), slices, target, self)

    def _written(self, read_value: bool = True) -> Variable | None:
        """Return the variable if wanted; under central storage after the array of the root has been sent to all."""
        if self._root is not None:
            self._array[...] = self._strategy.extended.communicator.broadcast(self._array, self._root)
        return self if read_value else None
