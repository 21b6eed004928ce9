"""Variable: an array on every replica, equal on all of them or combined when it is read.

The docstring of `mpistrat.state` has a table of all operations, inside ``run`` and elsewhere.
"""

from __future__ import annotations

import copy
import inspect
from abc import ABCMeta
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Any, NoReturn, cast

import numpy as np

from mpistrat.arrays import Array, as_array, checksum, is_on_device, to_device, to_host
from mpistrat.communicator.interface import BaseCommunicator
from mpistrat.context.stack import (
    default_mode,
    get_strategy,
    get_update_replica_id,
    in_replica_context_of,
    misplaced,
    require_no_default_scope,
)
from mpistrat.context.values import DistributedValues, Mirrored, PerReplica, converted
from mpistrat.errors import AgreementError, InvalidArgumentError
from mpistrat.reduction import ReduceOp
from mpistrat.state import changes
from mpistrat.state.changes import Change, ChangeMethods, VariableAggregation, VariableSynchronization

_COMPARED_BYTES = 1 << 20  # of larger assigned values, evenly spaced elements are compared


class Participants(Enum):
    """The ranks that take part in a call of a variable: this one only, the replicas inside ``run``, or all ranks outside it."""

    LOCAL = 0
    REPLICAS = 1
    ALL_RANKS = 2


class MadeByScope(ABCMeta):
    """The metaclass of `Variable`: calling that calls ``create_variable`` of the strategy, if it has one."""

    @property
    def __signature__(cls) -> inspect.Signature:
        """What the class is called with, as its own variables are made."""
        made = inspect.signature(cls.__init__)  # type: ignore[misc]
        return made.replace(parameters=list(made.parameters.values())[1:], return_annotation=made.empty)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a new variable."""
        create = getattr(get_strategy().extended, "create_variable", None)
        return super().__call__(*args, **kwargs) if create is None else create(*args, **kwargs)


class Variable(Mirrored, ChangeMethods, metaclass=MadeByScope):
    """An array that the replicas of the current strategy share. It can be used like an array; `assign` changes it.

    Creating one is a collective call: the initial value of replica 0 is broadcast. Outside all scopes it belongs to the default
    strategy, and nothing is communicated. On a replica with a GPU it is a CuPy array, to which values of the host are copied.

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
        self._strategy, self._name, self._constraint = strategy, name, constraint
        self._communicator: BaseCommunicator = strategy.extended.communicator
        with self._communicator.refusing(f"Variable(name={name!r})"):
            require_no_default_scope("mpistrat.Variable")
            if not (constraint is None or callable(constraint)):
                raise InvalidArgumentError(f"{name}: constraint must be None or a function of a value; got {constraint!r}")
            self._synchronization = changes.checked_synchronization(synchronization)
            self._aggregation = changes.checked_aggregation(aggregation)
            value = initial_array(initial_value, dtype, shape, name)
        is_on_read = self._synchronization is VariableSynchronization.ON_READ
        self._trainable = not is_on_read if trainable is None else bool(trainable)
        # the rank that keeps the array, under central storage, where ON_READ acts as ON_WRITE
        self._root: int | None = strategy.extended.root
        self._is_on_read = is_on_read and self._root is None
        self._number = str(strategy.extended.num_variables + 1)
        declared = f"{self._synchronization.name}, {self._aggregation.name}, trainable={self._trainable}"
        self._communicator.note(f"Variable({name!r}, {value.dtype} {value.shape}, {declared}), number {self._number}")
        self._hold(to_device(np.array(self._communicator.broadcast(value), order="C")))
        strategy.extended.num_variables += 1
        if self._aggregation is VariableAggregation.MEAN and self.dtype.kind in "biu":
            raise InvalidArgumentError(f"{name} has dtype {self.dtype}, which cannot hold a mean: use SUM or a float dtype")

    @property
    def name(self) -> str:
        """The name in errors."""
        return self._name

    @property
    def trainable(self) -> bool:
        """Whether an optimiser should change it."""
        return self._trainable

    @property
    def constraint(self) -> Callable[[Any], Any] | None:
        """A function for optimisers, whose result replaces a new value; the variable never calls it."""
        return self._constraint

    @property
    def initial_value(self) -> NoReturn:
        """Not kept, as in TensorFlow without graphs: read the variable right after creating it."""
        raise self._refusal("initial value", "initial_value")

    def is_initialized(self, name: str | None = None) -> bool:
        """Return True: a variable is initialized when it is created. `name` has no effect, as in TensorFlow."""
        return True

    @property
    def synchronization(self) -> VariableSynchronization:
        """ON_WRITE or ON_READ."""
        return self._synchronization

    @property
    def aggregation(self) -> VariableAggregation:
        """How the values of the replicas are combined."""
        return self._aggregation

    @property
    def distribute_strategy(self) -> Any:
        """The strategy in whose scope it was created."""
        return self._strategy

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
        return self.read().copy()

    def in_replica(self) -> Variable:
        """Return the variable, whose operations use this replica's component."""
        return self

    def across_replicas(self) -> DistributedValues:
        """Return the value for ``strategy.reduce``: the per-replica arrays with ON_READ, else the variable itself."""
        return PerReplica(self._view) if self._is_on_read else self

    def read(self) -> Array:
        """Return the array. With ON_READ, outside ``strategy.run``, this is a collective call that combines the arrays.

        With aggregation NONE they cannot be combined, which raises InvalidArgumentError.
        """
        if not self._is_combined_here():
            return self._view
        if self._aggregation is VariableAggregation.NONE:
            self._communicator.refuse(f"{self!r}.read", self._refusal("read", "read"))
        self._compare("read", Participants.ALL_RANKS)
        return self._aggregated(self._array)

    def sparse_read(self, indices: Any, name: str | None = None) -> Array:
        """Return some of the rows, as a new array; communicates and raises like `read`.

        Parameters
        ----------
        indices : array_like of int
            Indices of rows along the first axis, in any shape; the shape of the result is this one, followed by that of a row.
        """
        return self._take("sparse_read", lambda: as_array(indices, "indices")[..., np.newaxis])

    def gather_nd(self, indices: Any, name: str | None = None) -> Array:
        """Return single entries, as a new array; communicates and raises like `read`.

        Parameters
        ----------
        indices : array_like of int
            Its last axis holds the indices of an entry along the first axes of the variable: for a number along all of them.
        """
        return self._take("gather_nd", lambda: indices)

    def writable(self) -> Array:
        """Return the writable array of this replica, which ``ctx.update(variable, fn)`` passes to `fn`; only inside ``run``."""
        scope = self._participants("ctx.update of a variable")
        if scope is Participants.ALL_RANKS:
            wanted = f"inside strategy.run of {self._strategy!r}"
            raise misplaced(f"ctx.update of {self!r}", wanted, "ctx.update of a variable")
        if self._root is not None:
            self._compare("update", scope)
        return self._array

    def send_root(self) -> None:
        """Broadcast the array of the root, under central storage."""
        if self._root is not None:
            self._array[...] = self._communicator.broadcast(self._array, self._root)

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        in_replica_context_of(self._strategy, "copy.deepcopy of a variable")  # refused under another strategy
        copied = copy.copy(self)
        copied._hold(self._array.copy())
        copied._number = f"{self._number}, copied"  # which one replica alone may do
        memo[id(self)] = copied
        return copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._hold(self._array)  # a pickle has the view as an array of its own

    def __repr__(self) -> str:
        kind = f", {self._synchronization.name} {self._aggregation.name}"
        kind = "" if self._aggregation is VariableAggregation.NONE else kind
        return f"{type(self).__name__}({self._name!r}, {self._array.dtype} {self._array.shape}{kind})"

    def _hold(self, array: Array) -> None:
        """Make `array` the array of this replica, of which users get a read-only view, if the array library has such."""
        self._array = array
        self._view: Array = array.view()
        if not is_on_device(array):  # CuPy has no read-only arrays
            self._view.flags.writeable = False
        self._component = self._view

    def _participants(self, call: str) -> Participants:
        """Return the ranks that take part in a call in the present context; another strategy's is refused."""
        inside = in_replica_context_of(self._strategy, call)
        if self._strategy is default_mode().strategy or get_update_replica_id() is not None:
            return Participants.LOCAL
        return Participants.REPLICAS if inside else Participants.ALL_RANKS

    def _is_combined_here(self) -> bool:
        """Return whether reading the variable in the present context is a collective."""
        if self._strategy is default_mode().strategy:
            return False
        return self._participants("reading a variable") is Participants.ALL_RANKS and self._is_on_read

    def _concerns_others(self, scope: Participants) -> bool:
        return scope is Participants.ALL_RANKS or (scope is Participants.REPLICAS and not self._is_on_read)

    def _refusing(self, method: str, scope: Participants) -> AbstractContextManager[None]:
        """Return a context whose errors are raised on the other ranks that take part, too."""
        return self._communicator.refusing(f"{self!r}.{method}") if self._concerns_others(scope) else nullcontext()

    def _refusal(self, key: str, method: str, found: object = "") -> Exception:
        """Return an error of the table below."""
        kind, text = _REFUSALS[key]
        return kind(text.format(variable=self, method=method, replicas=self._communicator.size, found=found))

    def _own_part(self, method: str, scope: Participants, value: Any) -> Any:
        """Return an argument, with this replica's component for a per-replica value where that is accepted."""
        if not isinstance(value, PerReplica):
            return value
        is_mirrored = not self._is_on_read and self._root is None
        if scope is Participants.REPLICAS or (scope is Participants.ALL_RANKS and is_mirrored):
            return value.in_replica()
        raise self._refusal("per-replica value", method)

    def _compare(self, method: str, scope: Participants, *arrays: Array) -> None:
        """Compare a call on all ranks that take part, with the next collective; outside ``run`` also the arrays."""
        if not self._concerns_others(scope):
            return
        communicator, call = self._communicator, f"{self!r}.{method}"
        communicator.note(f"{call} of variable {self._number}")
        if not arrays or scope is not Participants.ALL_RANKS or self._root is not None:
            return
        if communicator.is_strict:
            changes.check_equal(call, arrays, communicator)
        else:
            communicator.note(f"with arrays of checksum {checksum(arrays, _COMPARED_BYTES):x}")

    def _require_equal(self, method: str, *arrays: Array) -> None:
        """Check that all replicas pass the same arrays, because there is no aggregation. A collective call."""
        if self._communicator.size == 1:
            return
        try:
            changes.check_equal(f"{self!r}.{method}", arrays, self._communicator)
        except AgreementError as error:
            raise self._refusal("different values", method, error) from None

    def _aggregated(self, array: Array) -> Array:
        """Return the combined arrays of all replicas, in either context. A collective call."""
        if self._aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return self._communicator.broadcast(array)
        return cast("Array", self._strategy.extended.all_reduce(ReduceOp[self._aggregation.name], [array])[0])

    def _take(self, method: str, indices: Callable[[], Any]) -> Array:
        """Return the entries whose indices the function returns."""
        with self._refusing(method, Participants.ALL_RANKS if self._is_combined_here() else Participants.LOCAL):
            numbers, entry = changes.flat_indices(f"{self!r}.{method}", indices(), self.shape)
        return changes.entries(self.read(), numbers, entry)

    def _change(self, method: str, value: Any) -> Variable:
        scope = self._participants(f"Variable.{method}")
        with self._refusing(method, scope):
            value = self._own_part(method, scope, value)
            self._require_defined(method, scope)
            change = changes.checked(method, value, self._array, self)
        self._compare(method, scope, *change)
        if scope is Participants.REPLICAS and not self._is_on_read:
            change = self._combined(method, change)
        elif self._is_split(scope):
            change = (changes.share(change[0], self._communicator),)
        changes.apply(method, self._array, change)
        self.send_root()
        return self

    def _is_split(self, scope: Participants) -> bool:
        """Return whether each replica gets a part of what is assigned, because the arrays are summed when they are read."""
        return scope is Participants.ALL_RANKS and self._is_on_read and self._aggregation is VariableAggregation.SUM

    def _require_defined(self, method: str, scope: Participants) -> None:
        """Refuse what has no meaning for a variable of this kind in the present context."""
        if self._is_on_read:
            if method.startswith("scatter") and self._strategy is not default_mode().strategy:
                raise self._refusal("scatter", method)
            if method != "assign" and self._is_split(scope):
                raise self._refusal("sum outside run", method)
        elif scope is Participants.REPLICAS:
            is_none = self._aggregation is VariableAggregation.NONE
            if method not in changes.COMPARING:
                if is_none and self._root is not None:
                    raise self._refusal("no aggregation", method)
            elif not is_none and self._aggregation is not VariableAggregation.ONLY_FIRST_REPLICA:
                raise self._refusal("scatter aggregation", method)

    def _combined(self, method: str, change: Change) -> Change:
        """Return what the replicas pass in ``run``, combined. A collective call."""
        if self._aggregation is VariableAggregation.NONE:
            self._require_equal(method, *change)
            return change
        if len(change) == 1:
            return (self._aggregated(change[0]),)
        return changes.gathered_rows(change, self._aggregation, self._communicator)


def initial_array(given: Any, dtype: Any, shape: Sequence[int] | None, name: str) -> Array:
    """Return an initial value, or the result of the function given as one, in host memory and the given dtype."""
    value = to_host(as_array(given() if callable(given) else given, name))
    if shape is not None and value.shape != tuple(shape):
        raise InvalidArgumentError(
            f"{name} must have shape {tuple(shape)}; got an initial value of shape {value.shape}; each extent must be a "
            "number, because the shape of a variable does not change"
        )
    wanted = value.dtype if dtype is None else as_array(np.empty(0, dtype), name).dtype
    return converted(value, wanted, name)


_UNDEFINED = "{variable!r} has aggregation NONE, so the values of {replicas} replicas cannot be combined."
_AGGREGATE = "    correct:    mpistrat.Variable(…, aggregation=mpistrat.VariableAggregation.MEAN); SUM, ONLY_FIRST_REPLICA too"
_WAYS_OUT = (
    "    incorrect:  def step(): variable.{method}(value)\n"
    f"{_AGGREGATE}\n"
    '    correct:    def step(): ctx.update(variable, lambda old, new: new, (ctx.all_reduce("mean", value),))\n'
    "    correct:    variable.{method}(value) outside strategy.run"
)

# what a variable does not support: the error, and its text with an incorrect line and correct ones
_REFUSALS: dict[str, tuple[type[Exception], str]] = {
    "per-replica value": (
        TypeError,
        "{variable!r}.{method} got a per-replica value, which differs between replicas.\n"
        "    incorrect:  variable.{method}(strategy.run(fn))\n"
        '    correct:    variable.{method}(strategy.reduce("mean", strategy.run(fn), axis=None))',
    ),
    "no aggregation": (InvalidArgumentError, f"{_UNDEFINED}\n{_WAYS_OUT}"),
    "different values": (AgreementError, f"{_UNDEFINED} Equal values are accepted; {{found}}\n{_WAYS_OUT}"),
    "initial value": (
        RuntimeError,
        "{variable!r} does not keep its initial value.\n"
        "    incorrect:  variable.initial_value\n"
        "    correct:    initial_value = variable.numpy(), right after making the variable",
    ),
    "read": (
        InvalidArgumentError,
        f"{_UNDEFINED}\n"
        "    incorrect:  np.asarray(variable), outside strategy.run\n"
        f"{_AGGREGATE}\n"
        "    correct:    strategy.run(lambda: variable.numpy()), the array of each replica",
    ),
    "sum outside run": (
        InvalidArgumentError,
        "{variable!r}.{method} outside strategy.run is undefined: the replicas' arrays are summed when it is read.\n"
        "    incorrect:  variable.{method}(delta)\n"
        "    correct:    def step(): variable.{method}(delta), then strategy.run(step)\n"
        "    correct:    variable.assign(value), which gives each replica its part",
    ),
    "scatter": (
        NotImplementedError,
        "{variable!r}.{method} is not defined for variables that are synchronized ON_READ.\n"
        "    incorrect:  mpistrat.Variable(…, synchronization=mpistrat.VariableSynchronization.ON_READ).{method}(slices)\n"
        "    correct:    mpistrat.Variable(…, aggregation=mpistrat.VariableAggregation.SUM).{method}(slices)\n"
        "    correct:    def step(): variable.assign_add(slices.to_dense())",
    ),
    "scatter aggregation": (
        NotImplementedError,
        "{variable!r}.{method} inside strategy.run needs aggregation ONLY_FIRST_REPLICA or NONE: rows are compared or "
        "replaced, not summed.\n"
        "    incorrect:  def step(): variable.{method}(slices)\n"
        "    correct:    mpistrat.Variable(…, aggregation=mpistrat.VariableAggregation.ONLY_FIRST_REPLICA).{method}(slices)\n"
        "    correct:    variable.{method}(slices) outside strategy.run",
    ),
}
