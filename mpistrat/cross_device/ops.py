"""CrossDeviceOps: base class of the objects that reduce the components of values and deliver the results.

Invariant: these objects hold no communicator. They use the one of the strategy that is current when they are called.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mpistrat.arrays import as_array, like
from mpistrat.communicator.interface import BaseCommunicator
from mpistrat.communicator.options import CommunicationOptions, check_options
from mpistrat.communicator.sparse import IndexedSlices, broadcast_slices, gather_refused
from mpistrat.context.stack import current, default_mode, get_strategy, in_cross_replica_context, misplaced, outside_replica
from mpistrat.context.values import DistributedValues, Mirrored, PerReplica, select_replica
from mpistrat.cross_device.pairs import (
    OnSomeReplicas,
    Pair,
    broadcast_source,
    checked_component,
    checked_pairs,
    deliver,
    needs_reduction,
    resolve,
)
from mpistrat.reduction import ReduceOp

_IMPLEMENTATIONS = {"reduce_implementation", "batch_reduce_implementation"}


class CrossDeviceOps:
    """Base class of the objects that reduce values over replicas. A subclass can change or observe every reduction.

    A subclass overrides `reduce_implementation`, `batch_reduce_implementation` or both. All reductions call the one that is
    overridden, also those of ``ctx.all_reduce``; the most derived class that overrides either decides.

    Attributes
    ----------
    num_packs : int or None
        Number of equal packs that the elements of a batch are cut into; 0: each array is reduced separately; None: packs follow
        `bytes_per_pack` of the options.
    """

    @property
    def num_packs(self) -> int | None:
        """None, if this has no packs."""
        return None

    def reduce(
        self, reduce_op: ReduceOp | str, per_replica_value: Any, destinations: Any, options: CommunicationOptions | None = None
    ) -> Any:
        """Reduce a value over replicas, and deliver the result to `destinations`. A collective call, outside ``strategy.run``.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            SUM, MEAN, MIN, MAX or PROD; case does not matter. IndexedSlices have SUM and MEAN.
        per_replica_value : DistributedValues, IndexedSlices or array_like
            The value. If it is not a per-replica value, it counts as equal on all replicas: its mean, minimum and maximum are
            the value itself. Its sum and product are ambiguous with several replicas, and refused unless it is zero.
        destinations : DistributedValues, array, str, int or set
            The ranks that receive the result. A value, variable or array stands for the replicas that hold it, and is not
            changed; a device string (``rank:2``) or a number stands for that rank; a set stands for all its members.
        options : CommunicationOptions, optional
            Override those of the strategy.

        Returns
        -------
        Mirrored, OnSomeReplicas or ndarray
            A mirrored value if all replicas are destinations, else a value that only the destinations can read; with one
            replica, its component. The result of a variable is a copy: assigning to the variable does not change it.
        """
        return self._reduce("reduce", reduce_op, [(per_replica_value, destinations)], options)[0]

    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Iterable[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Reduce many values as one batch, each with its own destinations: pairs of what `reduce` takes. A collective call."""
        return self._reduce("batch_reduce", reduce_op, value_destination_pairs, options)

    def broadcast(self, tensor: Any, destinations: Any) -> Any:
        """Broadcast a value to `destinations`. A collective call."""
        _require_cross_replica(self, "broadcast")
        communicator = current_communicator()
        with communicator.refusing("broadcast"):
            broadcast_source(tensor)
            ranks = resolve(destinations, communicator)
        communicator.note(f"broadcast of a {type(tensor).__name__} to ranks {ranks}")
        return self.broadcast_implementation(tensor, destinations)

    def all_reduce_in_replica(
        self, reduce_op: ReduceOp, arrays: Sequence[Any], options: CommunicationOptions | None = None
    ) -> list[Any]:
        """Reduce arrays and slices to all replicas, on behalf of ``ctx.all_reduce``. A collective call.

        The implementations below are called in cross-replica context.
        """
        if not arrays:
            return []
        values = [PerReplica(array) for array in arrays]
        with outside_replica():
            results = self._reduce_each(reduce_op, [(value, value) for value in values], options or CommunicationOptions())
        return [result.in_replica() if isinstance(result, DistributedValues) else result for result in results]

    def all_reduce_options(
        self, communicator: BaseCommunicator, options: CommunicationOptions | None
    ) -> CommunicationOptions | None:
        """Return the options with which an all-reduce of the communicator does the same for arrays; None if none does."""
        return None

    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: PerReplica, destinations: Any, options: CommunicationOptions
    ) -> Any:
        """Reduce one value; to be overridden. A collective call, in cross-replica context, with checked arguments.

        The result is a `Mirrored` value, one on some replicas, or an array, which is the component of this rank.
        """
        raise _abstract(self)

    def batch_reduce_implementation(
        self, reduce_op: ReduceOp, value_destination_pairs: Sequence[tuple[PerReplica, Any]], options: CommunicationOptions
    ) -> list[Any]:
        """Reduce many values, and return their results in order; to be overridden, as `reduce_implementation`."""
        raise _abstract(self)

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        """Broadcast a value to `destinations`, also for ``broadcast`` of a strategy or replica context; may be overridden.

        A collective call, in cross-replica context.
        """
        communicator = current_communicator()
        root, component = broadcast_source(tensor)
        if isinstance(component, IndexedSlices):
            copy: Any = broadcast_slices(communicator, component, root)
        else:
            copy = like(communicator.broadcast(component, root), tensor)
        return deliver(copy, resolve(destinations, communicator), communicator)

    def gather_implementation(self, per_replica_value: Any, destinations: Any, axis: int, options: CommunicationOptions) -> Any:
        """Concatenate components along `axis`, for ``strategy.gather`` and ``ctx.all_gather``; may be overridden.

        A collective call, in cross-replica context. The components are in replica order.
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
        """Check the arguments, and reduce the values that need it."""
        _require_cross_replica(self, method)
        communicator = current_communicator()
        with communicator.refusing(method, options):
            op = ReduceOp.parse(reduce_op)
            checked = checked_pairs(op, pairs, communicator)
            check_options(options)
        asked = ", ".join(map(str, checked))
        # not repr(self): the one of a user's class may differ between ranks
        call = f"{type(self).__name__}(num_packs={self.num_packs}).{method}({op.name}, [{asked}])"
        communicator.note(call, options)
        waiting = [(pair.value, pair.destinations) for pair in checked if needs_reduction(pair, communicator)]
        results = iter(self._reduce_each(op, waiting, options or CommunicationOptions()) if waiting else ())
        return [
            next(results) if needs_reduction(pair, communicator) else self._without_reduction(pair, communicator)
            for pair in checked
        ]

    def _reduce_each(self, op: ReduceOp, pairs: list[tuple[PerReplica, Any]], options: CommunicationOptions) -> list[Any]:
        """Reduce by the most derived implementation; if a class has both, by that for batches unless there is one value."""
        overrides = next(vars(kind) for kind in type(self).__mro__ if not _IMPLEMENTATIONS.isdisjoint(vars(kind)))
        by_one = "reduce_implementation" in overrides
        if "batch_reduce_implementation" in overrides and not (by_one and len(pairs) == 1):
            return self.batch_reduce_implementation(op, pairs, options)
        return [self.reduce_implementation(op, value, destinations, options) for value, destinations in pairs]

    def _without_reduction(self, pair: Pair, communicator: BaseCommunicator) -> Any:
        """Return the result of a value that is equal on all replicas."""
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
    """Return the communicator of the current strategy."""
    communicator: BaseCommunicator = get_strategy().extended.communicator
    return communicator


def _require_cross_replica(ops: CrossDeviceOps, method: str) -> None:
    if not in_cross_replica_context() and current() is not default_mode():
        raise misplaced(f"{type(ops).__name__}.{method}", "in cross-replica context", f"ops.{method}")


def _abstract(ops: CrossDeviceOps) -> NotImplementedError:
    return NotImplementedError(
        f"{type(ops).__name__} implements no reduction: override reduce_implementation or batch_reduce_implementation, or "
        "derive it from HierarchicalAllReduce"
    )
