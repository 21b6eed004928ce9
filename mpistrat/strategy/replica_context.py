"""ReplicaContext: what a function inside ``strategy.run`` may ask of the other replicas."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mpistrat.arrays import Array, as_array
from mpistrat.context.stack import Mode, current, in_replica_context_of, misplaced, pop, push
from mpistrat.context.values import fitted, regroup, select_replica
from mpistrat.cross_device.options import CommunicationOptions
from mpistrat.errors import InvalidArgumentError, UnsupportedDtypeError
from mpistrat.reduction import ReduceOp, check_dtype
from mpistrat.structures import flatten, leaf_names, rebuild

if TYPE_CHECKING:
    from mpistrat.strategy.base import Strategy

__all__ = ["ReplicaContext", "Updatable"]

# method: the line as it is often written in cross-replica context, and as it should be
_ADVICE = {
    "all_reduce": ("with strategy.scope(): ctx.all_reduce(op, value)", "strategy.reduce(op, value, axis=None)"),
    "all_gather": ("with strategy.scope(): ctx.all_gather(value, axis)", "strategy.gather(value, axis)"),
    "merge_call": ("def merge_fn(strategy): ctx.merge_call(other_fn)", "def merge_fn(strategy): other_fn(strategy)"),
    "update": ("with strategy.scope(): ctx.update(variable, fn)", "with strategy.scope(): variable.assign(value)"),
    "__enter__": ("strategy.run(fn), where fn calls strategy.run(other)", "strategy.run(fn), where fn calls other()"),
}


class Updatable(Protocol):
    """What `ReplicaContext.update` changes: a variable of the context's strategy."""

    def writable(self) -> Array:
        """Return the array of this replica, to be written to."""


class ReplicaContext:
    """One replica inside ``strategy.run``; a context manager.

    Parameters
    ----------
    strategy : Strategy
        Whose replica it is.
    replica_id_in_sync_group : int
        The number of the replica, counted over all nodes.

    Raises
    ------
    InvalidArgumentError
        If the id is no integer of the strategy's replicas.
    """

    def __init__(self, strategy: Strategy, replica_id_in_sync_group: int) -> None:
        self._ops = strategy.extended.collectives
        self._strategy = strategy
        self._replica_id = _checked_id(replica_id_in_sync_group, self._ops.size)
        self.mode = Mode(strategy, self)

    @property
    def strategy(self) -> Strategy:
        """The strategy whose replica this is."""
        return self._strategy

    @property
    def replica_id_in_sync_group(self) -> int:
        """The number of this replica, 0 … `num_replicas_in_sync` - 1 over all nodes."""
        return self._replica_id

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas whose values are combined."""
        return self._ops.size

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any, options: CommunicationOptions | None = None) -> Any:
        """Combine a value across replicas; every replica receives the result.

        A collective call: every replica makes it, with the same structure, shapes and dtypes.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            SUM, MEAN, MIN, MAX or PROD, in any case.
        value : nest of array_like
            The leaves are reduced together, as one batch. A variable counts as the array of this replica.
        options : CommunicationOptions, optional
            Merged over those of the strategy.

        Returns
        -------
        nest of ndarray
            New arrays of the shapes and dtypes passed, in the same structure.

        Raises
        ------
        RuntimeError
            If this replica context is not the current one.
        UnsupportedDtypeError
            If a leaf is no array, or the operation is not defined for its dtype.
        AgreementError
            In strict mode, on every replica, if replicas passed different structures, shapes or dtypes.
        """
        self._require_current("all_reduce")
        leaves, structure = flatten(value)
        try:
            op = ReduceOp.parse(reduce_op)
        except (TypeError, ValueError) as error:
            self._ops.refuse("all_reduce", error)
        if self._ops.is_strict:
            self._ops.agree(f"all_reduce({op.name}) of {structure}")
        # a leaf that is no array of numbers is refused by the operations, where in strict mode all replicas learn of it
        arrays = [_readable(leaf) for leaf in leaves]
        try:
            return rebuild(structure, self._ops.all_reduce(op, arrays, options))
        except UnsupportedDtypeError:
            for name, leaf in zip(leaf_names(value), leaves, strict=True):
                check_dtype(op, as_array(leaf, name).dtype, name)
            raise

    def all_gather(self, value: Any, axis: int) -> Any:
        """Concatenate the components of a value along an axis, in replica order; every replica receives the result.

        A collective call.

        Parameters
        ----------
        value : nest of array_like
            Each leaf has at least one axis; extents agree between replicas except along `axis`.
        axis : int
            Where to concatenate.

        Raises
        ------
        RuntimeError
            If this replica context is not the current one.
        InvalidArgumentError
            If a leaf has no such axis.
        """
        self._require_current("all_gather")
        leaves, structure = flatten(value)
        if self._ops.is_strict:
            self._ops.agree(f"all_gather of {structure}")
        return rebuild(structure, [self._ops.all_gather(_readable(leaf), axis) for leaf in leaves])

    def merge_call(
        self, merge_fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Leave the replica, call ``merge_fn(strategy, *args, **kwargs)`` in cross-replica context, and come back.

        A collective call where `merge_fn` communicates: it runs once on every rank, with the replicas' arguments grouped
        into per-replica values.

        Returns
        -------
        nest
            The component of this replica of what `merge_fn` returned.

        Raises
        ------
        RuntimeError
            If this replica context is not the current one.
        """
        self._require_current("merge_call")
        outside = self._strategy.cross_replica_mode
        grouped_args, grouped_kwargs = regroup((tuple(args), dict(kwargs or {})), self.num_replicas_in_sync)
        push(outside)
        try:
            return select_replica(merge_fn(self._strategy, *grouped_args, **grouped_kwargs))
        finally:
            pop(outside)

    def update(
        self, variable: Updatable, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Change the component of a variable by a function of values that are equal on all replicas.

        The way to apply a gradient that `all_reduce` has reduced: no further communication takes place, so the arguments
        must be the same on every replica for the variable to stay mirrored.

        Parameters
        ----------
        variable : Variable
            The variable to change.
        fn : callable
            Called as ``fn(array, *args, **kwargs)`` with the array of this replica. It returns the new value, or writes
            into the array and returns None.

        Raises
        ------
        RuntimeError
            If this replica context is not the current one, or the variable belongs to another strategy.
        InvalidArgumentError
            If the new value has another shape than the variable.
        """
        self._require_current("update")
        component = variable.writable()
        given_args, given_kwargs = select_replica((tuple(args), dict(kwargs or {})))
        result = fn(component, *given_args, **given_kwargs)
        if result is not None:
            component[...] = fitted(result, component, variable)

    def __enter__(self) -> ReplicaContext:  # noqa: PYI034 - Self is newer than Python 3.10
        if in_replica_context_of(self._strategy, "strategy.run"):
            raise misplaced("strategy.run", "outside strategy.run", *_ADVICE["__enter__"])
        push(self.mode)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        pop(self.mode)

    def __repr__(self) -> str:
        return f"ReplicaContext(replica={self._replica_id}({self._ops.size}))"

    def _require_current(self, method: str) -> None:
        if current().replica_context is not self:
            raise misplaced(f"ReplicaContext.{method}", "in the replica context it belongs to", *_ADVICE[method])


def _checked_id(replica_id: int, num_replicas: int) -> int:
    try:
        index = operator.index(replica_id)
    except TypeError:
        index = -1
    if not 0 <= index < num_replicas:
        raise InvalidArgumentError(
            f"replica_id_in_sync_group must be an integer from 0 to {num_replicas - 1}; got {replica_id!r}"
        )
    return index


def _readable(leaf: Any) -> Array:
    """Return the leaf as an array; one of objects where it is ragged, for the operations to refuse on all replicas."""
    try:
        return np.asarray(leaf)
    except ValueError:
        return np.empty((), object)
