"""The arguments of CrossDeviceOps: pairs of values and destinations, checked before anything is sent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from mpistrat.arrays import Array, as_array, as_operand
from mpistrat.communicator.interface import BaseCommunicator
from mpistrat.communicator.sparse import IndexedSlices, check_slices
from mpistrat.context.stack import current, default_mode, get_strategy, misplaced
from mpistrat.context.values import DistributedValues, PerReplica
from mpistrat.cross_device.destinations import OnSomeReplicas, resolve
from mpistrat.errors import InvalidArgumentError, UnsupportedDtypeError
from mpistrat.reduction import ReduceOp, check_across_replicas

__all__ = [
    "IDEMPOTENT",
    "Pair",
    "broadcast_source",
    "check_unambiguous",
    "checked_component",
    "checked_pairs",
    "needs_reduction",
]

# the reduction of equal components is the component itself
IDEMPOTENT = (ReduceOp.MEAN, ReduceOp.MIN, ReduceOp.MAX)


class Pair(NamedTuple):
    """A value, its destinations as passed, and the ranks that they stand for."""

    value: Any
    destinations: Any
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        if isinstance(self.value, OnSomeReplicas):
            return f"{type(self.value).__name__} on ranks {self.value.ranks} -> {self.ranks}"
        component = checked_component(self.value)
        # replicas may pass slices with different rows
        kind = "IndexedSlices" if isinstance(component, IndexedSlices) else f"{component.dtype} {component.shape}"
        return f"{type(self.value).__name__} {kind} -> {self.ranks}"


def checked_pairs(op: ReduceOp, pairs: Iterable[tuple[Any, Any]], communicator: BaseCommunicator) -> list[Pair]:
    """Return pairs of values and destinations, after checking that each value can be reduced with `op`.

    Raises
    ------
    InvalidArgumentError
        If `pairs` is not an iterable of 2-tuples, a value is not an array, its sum is ambiguous, or its destinations are
        invalid.
    UnsupportedDtypeError
        If `op` is not defined for a dtype.
    RuntimeError
        If a value of a strategy is reduced outside all scopes.
    """
    given = list(pairs) if isinstance(pairs, Iterable) else None
    if given is None or any(not isinstance(pair, tuple) or len(pair) != 2 for pair in given):
        raise InvalidArgumentError(
            f"value_destination_pairs must be an iterable of 2-tuples (value, destinations); got {pairs!r}"
        )
    return [_checked(op, value, destinations, communicator) for value, destinations in given]


def checked_component(value: Any) -> Array | IndexedSlices:
    """Return the component of this rank of any value, distributed or not.

    Raises
    ------
    InvalidArgumentError
        If it is not an array of numbers.
    """
    component = value.in_replica() if isinstance(value, DistributedValues) else value
    if isinstance(component, IndexedSlices):
        return component
    try:
        return as_operand(component)
    except UnsupportedDtypeError as error:
        raise InvalidArgumentError(
            f"{value!r} cannot be reduced as a per-replica value: {error}; for nested values use batch_reduce, "
            "strategy.reduce or ctx.all_reduce"
        ) from None


def broadcast_source(tensor: Any) -> tuple[int, Array | IndexedSlices]:
    """Return the root of the broadcast of a value, and the array that this rank passes to it.

    Raises
    ------
    InvalidArgumentError
        If this is a per-replica value, or not an array of numbers.
    RuntimeError
        If the value of a strategy is broadcast outside all scopes.
    """
    _check_in_scope(tensor)
    if isinstance(tensor, PerReplica):
        raise InvalidArgumentError(
            f"{tensor!r} has a component on each replica, so it is ambiguous which one to broadcast.\n"
            "    incorrect:  ops.broadcast(strategy.run(fn), destinations)\n"
            '    correct:    ops.reduce("mean", strategy.run(fn), destinations), or ops.broadcast(array, destinations)'
        )
    if isinstance(tensor, OnSomeReplicas):
        return tensor.ranks[0], checked_component(tensor.stand_in())
    return 0, checked_component(tensor)


def check_unambiguous(op: ReduceOp, num_components: int) -> None:
    """Check that the reduction of a value that is equal on all replicas, and not zero, is not ambiguous.

    Raises
    ------
    InvalidArgumentError
        If there are several components and `op` is SUM or PROD.
    """
    if op not in IDEMPOTENT and num_components > 1:
        raise InvalidArgumentError(
            f"{op.name} of a value that is not a per-replica value is ambiguous with {num_components} replicas: it could count "
            f"once, or {num_components} times.\n"
            '    incorrect:  strategy.reduce("sum", 5.0, axis=None)\n'
            '    correct:    strategy.reduce("sum", strategy.run(fn), axis=None), with what fn returns on each replica; or '
            "the value itself"
        )


def needs_reduction(pair: Pair, communicator: BaseCommunicator) -> bool:
    """Return whether a value has several components to reduce."""
    return communicator.size > 1 and isinstance(pair.value, PerReplica)


def _checked(op: ReduceOp, value: Any, destinations: Any, communicator: BaseCommunicator) -> Pair:
    _check_in_scope(value)
    if isinstance(value, DistributedValues):
        value = _components(value, communicator)
    pair = Pair(value, destinations, resolve(destinations, communicator))
    if isinstance(value, OnSomeReplicas):
        check_unambiguous(op, len(value.ranks))
        return pair
    component = checked_component(value)
    if isinstance(component, IndexedSlices):
        check_slices(op, component)
        rows = component.values
    else:
        check_across_replicas(op, component.dtype)
        rows = component
    if not isinstance(value, PerReplica) and rows.any():
        check_unambiguous(op, communicator.size)
    return pair


def _components(value: DistributedValues, communicator: BaseCommunicator) -> DistributedValues:
    """Return what replaces a value in a reduction over replicas."""
    found = value.across_replicas()
    if found is not value and communicator.size == 1:
        # the array of a variable; a single component is its own result, and that must not change with the variable
        return PerReplica(as_array(found.in_replica()).copy())
    return found


def _check_in_scope(value: Any) -> None:
    """Refuse the value of a strategy outside all scopes, where only the component of this rank would be reduced."""
    is_default = current() is default_mode()
    if (
        is_default
        and isinstance(value, DistributedValues)
        and getattr(value, "distribute_strategy", None) is not get_strategy()
    ):
        raise misplaced(
            f"an operation of CrossDeviceOps on {value!r}",
            "in the scope of the strategy that the value belongs to",
            'ops.reduce("sum", strategy.run(fn), destinations)',
            'with strategy.scope(): ops.reduce("sum", strategy.run(fn), destinations)',
        )
