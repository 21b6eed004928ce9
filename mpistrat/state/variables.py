"""Variable: an array on every replica, equal on all of them or combined when it is read.

The docstring of `mpistrat.state` has a table of all operations, inside ``run`` and elsewhere.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from mpistrat.arrays import Array, as_array, in_dtype, is_on_device, like, to_device, to_host
from mpistrat.communicator.sparse import IndexedSlices
from mpistrat.context.assignment import assignable
from mpistrat.context.stack import default_mode, get_strategy, in_replica_context_of, misplaced, require_no_default_scope
from mpistrat.context.values import DistributedValues, Mirrored, PerReplica, select_replica
from mpistrat.errors import InvalidArgumentError, UnsupportedDtypeError
from mpistrat.state import refusals
from mpistrat.state.aggregation import VariableAggregation, VariableSynchronization, aggregated, share
from mpistrat.state.declaration import Declaration, UpdateScope, initial_array
from mpistrat.state.indices import checked_slices, flat_indices, flattened
from mpistrat.state.made_by_scope import MadeByScope
from mpistrat.state.scatter import COMPARING, Rows, apply, by_rows, checked_rows, gathered_rows
from mpistrat.state.variable_call import VariableCall

__all__ = ["Variable"]


class Variable(Mirrored, metaclass=MadeByScope):  # type: ignore[metaclass]  # a stub says ABC, where NumPy has none
    """An array that the replicas of the current strategy share. It can be used like an array; `assign` changes it.

    Creating one is a collective call: the initial value of replica 0 is broadcast. Outside all scopes it belongs to the default
    strategy, and nothing is communicated. On a replica with a GPU it is a CuPy array, to which initial and assigned values are
    copied from host memory.

    Parameters
    ----------
    initial_value : array_like or callable
        The first value, or a function that returns it, which every rank calls, so that random generators stay in step.
    trainable : bool, optional
        Whether an optimiser should change it; by default True, but False with ON_READ.
    name : str, optional
        Its name in errors.
    dtype : dtype, optional
        Its dtype; by default that of the initial value.
    constraint : callable, optional
        A function for optimisers to apply to a new value; kept as an attribute, and never called by the variable.
    synchronization : VariableSynchronization, optional
        ON_WRITE (and AUTO, and None): equal on all replicas. ON_READ: each replica has its own, combined when it is read.
    aggregation : VariableAggregation, optional
        How the assigned values, with ON_READ the arrays, of the replicas are combined; None means NONE.
    shape : sequence of int, optional
        The shape that the initial value must have.

    Raises
    ------
    InvalidArgumentError
        If `synchronization` is NONE or no member, `aggregation` is not a member, the mean of integers is asked for, the initial
        value has another shape than `shape`, or `constraint` cannot be called.
    UnsupportedDtypeError
        If the initial value is not an array of numbers, or `dtype` cannot hold its kind of number.
    AgreementError
        On every rank, if ranks create different variables.
    RuntimeError
        If the current scope was entered inside that of the default strategy.
    """

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
        strategy, name = get_strategy(), name or "Variable"
        communicator = strategy.extended.communicator
        try:
            require_no_default_scope("mpistrat.Variable")
            declared = Declaration.checked(strategy, name, trainable, constraint, synchronization, aggregation)
            value = initial_array(initial_value, dtype, shape, name)
        except Exception as error:
            communicator.refuse(f"Variable(name={name!r})", error)
        communicator.note(f"Variable({name!r}, {value.dtype} {value.shape}, {declared})")
        self._declaration = declared
        self._hold(to_device(np.array(communicator.broadcast(value), order="C")))
        if declared.aggregation is VariableAggregation.MEAN and self.dtype.kind in "biu":
            raise InvalidArgumentError(
                f"{name} has dtype {self.dtype}, which cannot hold a mean: use aggregation SUM or a float dtype"
            )

    @property
    def name(self) -> str:
        """The name in errors."""
        return self._declaration.name

    @property
    def trainable(self) -> bool:
        """Whether an optimiser should change it."""
        return self._declaration.trainable

    @property
    def constraint(self) -> Callable[[Any], Any] | None:
        """A function for optimisers, whose result replaces a new value; the variable never calls it."""
        return self._declaration.constraint

    @property
    def initial_value(self) -> NoReturn:
        """Not kept, as in TensorFlow without graphs: read the variable right after creating it.

        Raises
        ------
        RuntimeError
            Always; the message says how to keep it.
        """
        raise refusals.not_kept(self)

    def is_initialized(self, name: str | None = None) -> bool:
        """Return True: a variable is initialized when it is created. `name` has no effect, as in TensorFlow."""
        return True

    @property
    def synchronization(self) -> VariableSynchronization:
        """ON_WRITE or ON_READ."""
        return self._declaration.synchronization

    @property
    def aggregation(self) -> VariableAggregation:
        """How the values of the replicas are combined."""
        return self._declaration.aggregation

    @property
    def distribute_strategy(self) -> Any:
        """The strategy in whose scope it was created."""
        return self._declaration.strategy

    @property
    def value(self) -> Array:
        """The array, a CuPy array on a GPU; read-only. It changes when the variable does."""
        return self.read()

    def numpy(self) -> Array:
        """Return a copy of the array, in host memory."""
        array = self.read()
        return to_host(array) if is_on_device(array) else np.array(array)

    def read_value(self) -> Array:
        """Return a copy of the array, a CuPy array on a GPU; later assignments do not change it.

        Communicates and raises like `read`.
        """
        copied: Array = self.read().copy()
        return copied

    def in_replica(self) -> Variable:
        """Return the variable, whose operations use this replica's component."""
        return self

    def across_replicas(self) -> DistributedValues:
        """Return the value for ``strategy.reduce``: the per-replica arrays with ON_READ, else the variable itself."""
        return PerReplica(self._view) if self._declaration.is_on_read else self

    def read(self) -> Array:
        """Return the array. With ON_READ, outside ``strategy.run``, this is a collective call that combines the arrays.

        Raises
        ------
        RuntimeError
            If another strategy is current. A variable of the default strategy can be read anywhere.
        InvalidArgumentError
            If the arrays have to be combined and the aggregation is NONE.
        """
        declared = self._declaration
        if not declared.is_combined_here():
            return self._view
        call = self._call("read", UpdateScope.OUTSIDE)
        if declared.aggregation is VariableAggregation.NONE:
            call.refuse(refusals.unreadable(self, declared.strategy.num_replicas_in_sync))
        call.compare()
        return aggregated(declared.aggregation, self._array, declared.strategy)

    def sparse_read(self, indices: Any, name: str | None = None) -> Array:
        """Return some of the rows, as a new array; communicates and raises like `read`.

        Parameters
        ----------
        indices : array_like of int
            Indices of rows along the first axis, in any shape; the shape of the result is this one, followed by that of a row.
        name : str, optional
            Without effect, as in TensorFlow.

        Raises
        ------
        InvalidArgumentError
            If an index is negative or out of range, or the variable has no axis.
        UnsupportedDtypeError
            If the indices are not integers.
        """
        return self._take("sparse_read", lambda: as_array(indices, "indices")[..., np.newaxis])

    def gather_nd(self, indices: Any, name: str | None = None) -> Array:
        """Return single entries, as a new array; communicates and raises like `sparse_read`.

        Parameters
        ----------
        indices : array_like of int
            Its last axis holds the indices of one entry along the first axes of the variable: of all of them for a number, of
            fewer for an array.
        name : str, optional
            Without effect, as in TensorFlow.
        """
        return self._take("gather_nd", lambda: indices)

    def assign(self, value: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True) -> Any:
        """Set the variable to a value, and return it.

        A collective call inside ``strategy.run`` for a variable synchronized ON_WRITE. Outside it the next collective compares
        what ranks have assigned, values too where they take up to 1 MiB; with MPISTRAT_STRICT all are compared at once.

        Parameters
        ----------
        value : array_like
            Of the variable's shape. Inside ``strategy.run`` a per-replica value stands for the component of this replica.
        use_locking, name : bool, str
            Without effect, as in TensorFlow.
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
            If it is a per-replica value outside ``strategy.run``, or the variable cannot hold its kind of number.
        RuntimeError
            If another strategy is current.
        AgreementError
            On every replica, if they pass different values inside ``strategy.run`` and the aggregation is NONE. From the next
            collective, if ranks pass different ones outside it.
        """
        self._array[...] = self._incoming("assign", value)
        self._send_root()
        return self if read_value else None

    def assign_add(self, delta: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True) -> Any:
        """Add to the variable, and return it; communicates and raises like `assign`.

        Outside ``strategy.run`` it raises InvalidArgumentError for a variable synchronized ON_READ with aggregation SUM.
        """
        np.add(self._array, self._incoming("assign_add", delta), out=self._array)
        self._send_root()
        return self if read_value else None

    def assign_sub(self, delta: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True) -> Any:
        """Subtract from the variable, and return it; communicates and raises like `assign_add`. Not defined for bool."""
        np.subtract(self._array, self._incoming("assign_sub", delta), out=self._array)
        self._send_root()
        return self if read_value else None

    def scatter_add(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Variable:
        """Add rows to the rows with the given indices, and return the variable.

        A collective call inside ``strategy.run``: the rows of all replicas are applied, in replica order; with MEAN each is
        divided by their number, with ONLY_FIRST_REPLICA only those of replica 0 are, with NONE the replicas' rows must be
        equal and are applied once. Outside it ranks compare their rows as `assign` does its values. Rows with the
        same index are applied one after another.

        Parameters
        ----------
        sparse_delta : IndexedSlices
            The rows and their indices. Replicas may have different numbers of rows, or none.
        use_locking, name : bool, str
            Without effect, as in TensorFlow.

        Raises
        ------
        NotImplementedError
            If the variable is synchronized ON_READ.
        InvalidArgumentError
            If rows have another shape than those of the variable or an index is out of range; under central storage also
            inside ``strategy.run`` with aggregation NONE.
        TypeError
            If it is not an IndexedSlices, or the operation is not defined for the kind of number.
        RuntimeError
            If another strategy is current.
        AgreementError
            On every replica, if they pass different rows inside ``strategy.run`` with aggregation NONE. From the next
            collective, if ranks pass different ones outside it.
        """
        return self._scatter("scatter_add", sparse_delta)

    def scatter_sub(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Variable:
        """Subtract rows, and return the variable; communicates and raises like `scatter_add`."""
        return self._scatter("scatter_sub", sparse_delta)

    def scatter_mul(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Variable:
        """Multiply by rows, and return the variable; communicates and raises like `scatter_add`."""
        return self._scatter("scatter_mul", sparse_delta)

    def scatter_div(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Variable:
        """Divide by rows, and return the variable; communicates and raises like `scatter_add`. Not defined for integers."""
        return self._scatter("scatter_div", sparse_delta)

    def scatter_min(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Variable:
        """Keep the elementwise minimum of rows and variable, and return it; communicates and raises like `scatter_update`."""
        return self._scatter("scatter_min", sparse_delta)

    def scatter_max(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Variable:
        """Keep the elementwise maximum of rows and variable, and return it; communicates and raises like `scatter_update`."""
        return self._scatter("scatter_max", sparse_delta)

    def scatter_update(self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None) -> Variable:
        """Replace rows, and return the variable; communicates and raises like `scatter_add`.

        Inside ``strategy.run`` the aggregation must be ONLY_FIRST_REPLICA or NONE.

        Raises
        ------
        NotImplementedError
            Inside ``strategy.run`` with aggregation SUM or MEAN.
        """
        return self._scatter("scatter_update", sparse_delta)

    def scatter_nd_add(self, indices: Any, updates: Any, name: str | None = None) -> Variable:
        """Add to single entries, and return the variable; communicates and raises like `scatter_add`.

        Parameters
        ----------
        indices : array_like of int
            Its last axis holds the indices of one entry along the first axes of the variable: of all of them for a number, of
            fewer for an array.
        updates : array_like
            One for each entry, of its shape.
        name : str, optional
            Without effect, as in TensorFlow.
        """
        return self._scatter("scatter_nd_add", (indices, updates))

    def scatter_nd_sub(self, indices: Any, updates: Any, name: str | None = None) -> Variable:
        """Subtract from single entries, like `scatter_nd_add`."""
        return self._scatter("scatter_nd_sub", (indices, updates))

    def scatter_nd_min(self, indices: Any, updates: Any, name: str | None = None) -> Variable:
        """Keep the elementwise minimum of updates and entries, like `scatter_nd_add`; communicates like `scatter_update`."""
        return self._scatter("scatter_nd_min", (indices, updates))

    def scatter_nd_max(self, indices: Any, updates: Any, name: str | None = None) -> Variable:
        """Keep the elementwise maximum of updates and entries, like `scatter_nd_add`; communicates like `scatter_update`."""
        return self._scatter("scatter_nd_max", (indices, updates))

    def scatter_nd_update(self, indices: Any, updates: Any, name: str | None = None) -> Variable:
        """Replace single entries, like `scatter_nd_add`; communicates like `scatter_update`."""
        return self._scatter("scatter_nd_update", (indices, updates))

    def writable(self) -> Array:
        """Return the writable array of this replica, which ``ctx.update(variable, fn)`` passes to `fn`.

        Raises
        ------
        RuntimeError
            Outside ``run`` of the variable's strategy. A variable of the default strategy is writable outside all scopes.
        """
        if self._declaration.update_scope("ctx.update of a variable") is UpdateScope.OUTSIDE:
            raise misplaced(
                f"ctx.update of {self!r}",
                f"inside strategy.run of {self._declaration.strategy!r}",
                "mpistrat.get_replica_context().update(variable, fn), outside strategy.run",
                "def step(): mpistrat.get_replica_context().update(variable, fn), then strategy.run(step)",
            )
        return self._array

    def update_component(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Return ``fn(variable, *args, **kwargs)`` for this rank, in the update context of ``extended.update``.

        There `fn` reads and assigns this replica's array. Mirrored values among the arguments, at any depth, are replaced by
        their components.
        """
        return fn(self, *select_replica(tuple(args)), **select_replica(dict(kwargs or {})))

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        in_replica_context_of(self._declaration.strategy, "copy.deepcopy of a variable")  # refused under another strategy
        copied = copy.copy(self)
        copied._hold(self._array.copy())
        memo[id(self)] = copied
        return copied

    def __repr__(self) -> str:
        declared = self._declaration
        is_plain = declared.aggregation is VariableAggregation.NONE
        kind = "" if is_plain else f", {declared.synchronization.name} {declared.aggregation.name}"
        return f"{type(self).__name__}({declared.name!r}, {self._array.dtype} {self._array.shape}{kind})"

    def _hold(self, array: Array) -> None:
        """Make `array` the array of this replica, of which users get a read-only view, if the array library has such."""
        self._array = array
        self._view: Array = array.view()
        if not is_on_device(array):  # CuPy has no read-only arrays
            self._view.flags.writeable = False
        self._component = self._view

    def _call(self, method: str, scope: UpdateScope | None = None) -> VariableCall:
        scope = self._declaration.update_scope(f"Variable.{method}") if scope is None else scope
        return VariableCall(self, self._declaration, method, scope)

    def _take(self, method: str, indices: Callable[[], Any]) -> Array:
        """Return the entries whose indices the function returns."""
        try:
            numbers, entry = flat_indices(f"{self!r}.{method}", indices(), self.shape)
        except (TypeError, ValueError) as error:
            is_combined = self._declaration.is_combined_here()
            self._call(method, UpdateScope.OUTSIDE if is_combined else UpdateScope.HERE).refuse(error)
        array = self.read()
        taken = flattened(array, entry).take(like(numbers, array), axis=0)
        return in_dtype(taken, taken.dtype)  # numbers become arrays without axes

    def _incoming(self, method: str, value: Any) -> Array:
        """Return the array to assign to, or add to, the array of this replica, for a value passed in the present context."""
        call, declared = self._call(method), self._declaration
        try:
            array = self._checked(call, value)
        except (TypeError, ValueError) as error:
            call.refuse(error)
        call.compare(array)
        if call.scope is UpdateScope.IN_RUN and not declared.is_on_read:
            if declared.aggregation is VariableAggregation.NONE:
                call.require_equal(array)
                return array
            return aggregated(declared.aggregation, array, declared.strategy)
        is_summed = declared.is_on_read and declared.aggregation is VariableAggregation.SUM
        if is_summed and call.scope is UpdateScope.OUTSIDE:
            return share(array, declared.communicator)
        return array

    def _checked(self, call: VariableCall, value: Any) -> Array:
        value, declared = call.component(value), self._declaration
        if call.method == "assign_sub" and self.dtype.kind == "b":
            raise UnsupportedDtypeError(f"{call} is not defined for bool; accepted are integers, floats and complex")
        array = assignable(value, self._array, self)
        is_summed = declared.is_on_read and declared.aggregation is VariableAggregation.SUM
        if is_summed and call.scope is UpdateScope.OUTSIDE and call.method != "assign":
            raise refusals.sum_outside_run(self, call.method)
        if call.scope is UpdateScope.IN_RUN and declared.needs_aggregation:
            raise refusals.no_aggregation(self, call.method, declared.strategy.num_replicas_in_sync)
        return array

    def _scatter(self, method: str, delta: Any) -> Variable:
        """Apply rows, or for ``scatter_nd_…`` indices and updates, of the ranks that take part, and return the variable."""
        call, declared = self._call(method), self._declaration
        try:
            target, rows = self._checked_rows(call, delta)
        except (TypeError, ValueError, NotImplementedError) as error:
            call.refuse(error)
        call.compare(*rows)
        if call.scope is UpdateScope.IN_RUN:
            if declared.aggregation is VariableAggregation.NONE:
                call.require_equal(*rows)
            else:
                rows = gathered_rows(rows, declared.aggregation, declared.strategy)
        apply(by_rows(method), target, rows)
        self._send_root()
        return self

    def _checked_rows(self, call: VariableCall, delta: Any) -> tuple[Array, Rows]:
        """Return the array whose rows are changed, which may be a view with flattened leading axes, and the rows."""
        declared, method = self._declaration, by_rows(call.method)
        by_entries = method != call.method
        given = [call.component(part) for part in (delta if by_entries else (delta,))]
        if declared.is_on_read and declared.strategy is not default_mode().strategy:
            raise refusals.no_scatter(self, call.method)
        if call.scope is UpdateScope.IN_RUN:
            is_comparing = method in COMPARING
            if is_comparing and declared.aggregation in (VariableAggregation.SUM, VariableAggregation.MEAN):
                raise refusals.no_such_aggregation(self, call.method)
            if not is_comparing and declared.needs_aggregation:
                raise refusals.no_aggregation(self, call.method, declared.strategy.num_replicas_in_sync)
        if not by_entries:
            return self._array, checked_rows(method, given[0], self._array, self)
        slices = checked_slices(str(call), given[0], given[1], self.shape)
        target = flattened(self._array, slices.values.shape[1:])
        return target, checked_rows(method, slices, target, self)

    def _send_root(self) -> None:
        """Broadcast the array of the root, under central storage."""
        root = self._declaration.root
        if root is not None:
            self._array[...] = self._declaration.communicator.broadcast(self._array, root)
