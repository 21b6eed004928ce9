"""CrossDeviceOps: how the components of values are combined and where the results land; the base of the family.

File law: an object of the family holds no communicator. It works for the strategy that is current when it is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mpistrat.arrays import as_array, like
from mpistrat.communicator.interface import BaseCommunicator
from mpistrat.communicator.options import CommunicationOptions, check_options
from mpistrat.communicator.sparse import IndexedSlices, broadcast_slices, gather_refused
from mpistrat.context.stack import current, default_mode, get_strategy, in_cross_replica_context, misplaced, pop, push
from mpistrat.context.values import DistributedValues, Mirrored, PerReplica, select_replica
from mpistrat.cross_device.destinations import OnSomeReplicas, deliver, resolve
from mpistrat.cross_device.pairs import Pair, broadcast_source, checked_component, checked_pairs, needs_reduction
from mpistrat.reduction import ReduceOp

__all__ = ["CrossDeviceOps", "current_communicator"]

# method: the line as it is often written inside strategy.run, and as it should be
_ADVICE = {
    "reduce": (
        'def step(): return ops.reduce("sum", value, destinations)',
        'def step(): return mpistrat.get_replica_context().all_reduce("sum", value); or ops.reduce(…) in strategy.scope()',
    ),
    "batch_reduce": (
        'def step(): return ops.batch_reduce("sum", [(value, destinations), (other, destinations)])',
        'def step(): return mpistrat.get_replica_context().all_reduce("sum", [value, other]); or ops.batch_reduce(…) in '
        "strategy.scope()",
    ),
    "broadcast": (
        "def step(): return ops.broadcast(array, destinations)",
        "with strategy.scope(): ops.broadcast(array, destinations)",
    ),
}

_IMPLEMENTATIONS = {"reduce_implementation", "batch_reduce_implementation"}


class CrossDeviceOps:
    """Base of what combines the components of values. Derive from it, or from a class of the family, to see every reduction.

    A subclass overrides `reduce_implementation` or `batch_reduce_implementation`, or both. Where it overrides one of them, all
    reductions go through that one, those of ``ctx.all_reduce`` too; the most derived class that overrides either decides.

    Attributes
    ----------
    num_packs : int or None
        Cut the elements of a batch into so many equal packs; 0 reduces each array by itself. None packs by the options'
        `bytes_per_pack`.
    """

    num_packs: int | None = None

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Combine the components of a value, and leave the result on `destinations`. A collective call.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            SUM, MEAN, MIN, MAX or PROD, in any case.
        per_replica_value : DistributedValues, IndexedSlices or array_like
            What is combined. A value that is not a per-replica value is equal on all replicas: its mean, minimum and maximum
            are itself, its sum and product are refused, with several replicas, unless it is zero.
        destinations : DistributedValues, array, str, int or set
            Where the result is wanted: a value, variable or array stands for the replicas that hold it, and is not changed; a
            device string (``rank:2``) or a rank for that rank; a set of these for all of them.
        options : CommunicationOptions, optional
            Merged over those of the strategy.

        Returns
        -------
        Mirrored, OnSomeReplicas or ndarray
            A mirrored value where all replicas are destinations, else a value that only the destinations can read; with one
            replica, its component as it is. Of a variable a copy: what is assigned later does not change a result.

        Raises
        ------
        RuntimeError
            If called inside ``strategy.run``, or outside all scopes with a value of a strategy.
        InvalidArgumentError
            If the value is not an array, the sum or product of a value that is equal everywhere is asked for, or `destinations`
            is empty or nothing that names ranks.
        UnsupportedDtypeError
            If `reduce_op` is not defined for the dtype.
        TypeError
            If `reduce_op` is neither a ReduceOp nor a str.
        NotImplementedError
            If slices are to be combined otherwise than by SUM or MEAN.
        """
        return self._reduce("reduce", reduce_op, [(per_replica_value, destinations)], options)[0]

    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Iterable[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Combine many values, each with a destination of its own, as one batch. A collective call.

        Parameters
        ----------
        reduce_op, options : ReduceOp or str, CommunicationOptions, optional
            As for `reduce`.
        value_destination_pairs : iterable of 2-tuples
            Values and destinations as for `reduce`, dense and sparse in any order.

        Returns
        -------
        list
            One result for each pair, in order.

        Raises
        ------
        InvalidArgumentError
            If `value_destination_pairs` is not an iterable of 2-tuples, and as for `reduce`, which see for the other errors.
        """
        return self._reduce("batch_reduce", reduce_op, value_destination_pairs, options)

    def broadcast(self, tensor: Any, destinations: Any) -> Any:
        """Copy a value to `destinations`, of which a variable only says where; it is not changed. A collective call.

        Parameters
        ----------
        tensor : array_like, Mirrored, OnSomeReplicas or IndexedSlices
            That of replica 0 counts; of a value that lives on some replicas, that of the first of them.
        destinations : DistributedValues, array, str, int or set
            As for `reduce`.

        Returns
        -------
        Mirrored, OnSomeReplicas or ndarray
            As for `reduce`.

        Raises
        ------
        RuntimeError
            If called inside ``strategy.run``, or outside all scopes with a value of a strategy.
        InvalidArgumentError
            If the value is not an array or differs between replicas, or `destinations` is empty or nothing that names ranks.
        """
        _require_cross_replica(self, "broadcast")
        communicator = current_communicator()
        try:
            broadcast_source(tensor)
            ranks = resolve(destinations, communicator)
        except (TypeError, ValueError) as error:
            communicator.refuse("broadcast", error)
        communicator.note(f"broadcast of a {type(tensor).__name__} to ranks {ranks}")
        return self.broadcast_implementation(tensor, destinations)

    def all_reduce_in_replica(
        self, reduce_op: ReduceOp, arrays: Sequence[Any], options: CommunicationOptions | None = None
    ) -> list[Any]:
        """Combine arrays and slices of this replica with those of the others: what ``ctx.all_reduce`` calls. A collective call.

        Each is reduced to all replicas by the implementations below, in cross-replica context.
        """
        if not arrays:
            return []
        found = current()
        outside = found if found is default_mode() else found.strategy.cross_replica_mode
        values = [PerReplica(array) for array in arrays]
        push(outside)
        try:
            results = self._reduce_each(reduce_op, [(value, value) for value in values], options or CommunicationOptions())
        finally:
            pop(outside)
        return [result.in_replica() if isinstance(result, DistributedValues) else result for result in results]

    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: PerReplica, destinations: Any, options: CommunicationOptions
    ) -> Any:
        """Combine one value; to be overridden. A collective call, in cross-replica context, with checked arguments.

        Returns
        -------
        Mirrored, OnSomeReplicas or ndarray
            The result; an array counts as the component of this rank.
        """
        raise _abstract(self)

    def batch_reduce_implementation(
        self, reduce_op: ReduceOp, value_destination_pairs: Sequence[tuple[PerReplica, Any]], options: CommunicationOptions
    ) -> list[Any]:
        """Combine many values and return their results in order; to be overridden, as `reduce_implementation`."""
        raise _abstract(self)

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        """Copy a value to `destinations`; may be overridden. A collective call, in cross-replica context."""
        communicator = current_communicator()
        root, component = broadcast_source(tensor)
        if isinstance(component, IndexedSlices):
            copy: Any = broadcast_slices(communicator, component, root)
        else:
            copy = like(communicator.broadcast(component, root), tensor)
        return deliver(copy, resolve(destinations, communicator), communicator)

    def gather_implementation(self, per_replica_value: Any, destinations: Any, axis: int, options: CommunicationOptions) -> Any:
        """Concatenate the components along `axis`, in replica order; may be overridden. A collective call: ``strategy.gather``.

        Raises
        ------
        NotImplementedError
            If the components are slices.
        """
        communicator = current_communicator()
        component = checked_component(per_replica_value)
        if isinstance(component, IndexedSlices):
            communicator.refuse("gather", gather_refused(component), options)
        whole = like(communicator.all_gather(component, axis, options), select_replica(per_replica_value))
        return deliver(whole, resolve(destinations, communicator), communicator)

    def _reduce(
        self, method: str, reduce_op: ReduceOp | str, pairs: Iterable[tuple[Any, Any]], options: CommunicationOptions | None
    ) -> list[Any]:
        """Check what was asked for, and combine the values that are not their own results already."""
        _require_cross_replica(self, method)
        communicator = current_communicator()
        try:
            op = ReduceOp.parse(reduce_op)
            checked = checked_pairs(op, pairs, communicator)
            check_options(options)
        except (TypeError, ValueError, NotImplementedError) as error:
            communicator.refuse(method, error, options)
        asked = ", ".join(map(str, checked))
        # a repr of the user's own might differ between ranks
        call = f"{type(self).__name__}(num_packs={self.num_packs}).{method}({op.name}, [{asked}])"
        communicator.note(call, options)
        waiting = [(pair.value, pair.destinations) for pair in checked if needs_reduction(pair, communicator)]
        results = iter(self._reduce_each(op, waiting, options or CommunicationOptions()) if waiting else ())
        return [
            next(results) if needs_reduction(pair, communicator) else self._without_reduction(pair, communicator)
            for pair in checked
        ]

    def _reduce_each(self, op: ReduceOp, pairs: list[tuple[PerReplica, Any]], options: CommunicationOptions) -> list[Any]:
        """Hand values to the implementation that was overridden last; where it was both, a batch to the one for batches."""
        overrides = next(vars(kind) for kind in type(self).__mro__ if not _IMPLEMENTATIONS.isdisjoint(vars(kind)))
        by_one = "reduce_implementation" in overrides
        if "batch_reduce_implementation" in overrides and not (by_one and len(pairs) == 1):
            return self.batch_reduce_implementation(op, pairs, options)
        return [self.reduce_implementation(op, value, destinations, options) for value, destinations in pairs]

    def _without_reduction(self, pair: Pair, communicator: BaseCommunicator) -> Any:
        """Return the result of a value whose components need not be combined."""
        if isinstance(pair.value, OnSomeReplicas) and not set(pair.ranks) <= set(pair.value.ranks):
            return self.broadcast_implementation(pair.value, pair.destinations)
        value = pair.value
        if hasattr(value, "distribute_strategy"):  # a variable changes, a result does not
            value = Mirrored(as_array(value).copy())
        alone = communicator.size == 1 and isinstance(value, DistributedValues)
        return value.in_replica() if alone else value

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_packs={self.num_packs})"


def current_communicator() -> BaseCommunicator:
    """Return what the current strategy communicates through."""
    communicator: BaseCommunicator = get_strategy().extended.communicator
    return communicator


def _require_cross_replica(ops: CrossDeviceOps, method: str) -> None:
    if not in_cross_replica_context() and current() is not default_mode():
        raise misplaced(f"{type(ops).__name__}.{method}", "in cross-replica context", *_ADVICE[method])


def _abstract(ops: CrossDeviceOps) -> NotImplementedError:
    return NotImplementedError(
        f"{type(ops).__name__} does not say how values are combined: override reduce_implementation or "
        "batch_reduce_implementation, or derive it from HierarchicalAllReduce"
    )
