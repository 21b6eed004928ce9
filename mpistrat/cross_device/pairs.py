"""Values and destinations of CrossDeviceOps: checked before anything is sent, and results delivered to some ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import numpy as np

from mpistrat.arrays import Array, as_array, as_operand
from mpistrat.communicator.interface import BaseCommunicator
from mpistrat.communicator.sparse import IndexedSlices, check_slices
from mpistrat.context.stack import current, default_mode, get_strategy, misplaced
from mpistrat.context.values import DistributedValues, Mirrored, PerReplica, in_replica
from mpistrat.errors import InvalidArgumentError, UnsupportedDtypeError
from mpistrat.reduction import ReduceOp, check_dtype
from mpistrat.text import ranks_text
from mpistrat.topology.world import ranks_of

# the reduction of equal components is the component itself
_IDEMPOTENT = (ReduceOp.MEAN, ReduceOp.MIN, ReduceOp.MAX)


class Pair(NamedTuple):
    """A value, its destinations as passed, the ranks that they stand for, and whether it has several components to reduce."""

    value: Any
    destinations: Any
    ranks: tuple[int, ...]
    is_reduced: bool

    def __str__(self) -> str:
        if isinstance(self.value, OnSomeReplicas):
            return f"{type(self.value).__name__} on ranks {self.value.ranks} -> {self.ranks}"
        component = checked_component(self.value)
        # replicas may pass slices with different rows
        kind = "IndexedSlices" if isinstance(component, IndexedSlices) else f"{component.dtype} {component.shape}"
        return f"{type(self.value).__name__} {kind} -> {self.ranks}"


def checked_pairs(op: ReduceOp, pairs: Iterable[tuple[Any, Any]], communicator: BaseCommunicator) -> list[Pair]:
    """Return pairs of values and destinations, after checking that each value can be reduced with `op`."""
    given = list(pairs) if isinstance(pairs, Iterable) else None
    if given is None or any(not isinstance(pair, tuple) or len(pair) != 2 for pair in given):
        raise InvalidArgumentError(f"value_destination_pairs must be 2-tuples (value, destinations); got {pairs!r}")
    return [_checked(op, value, destinations, communicator) for value, destinations in given]


def operand_or_slices(leaf: Any, name: str = "value") -> Any:
    """Return a leaf as an array; IndexedSlices as they are."""
    return leaf if isinstance(leaf, IndexedSlices) else as_operand(leaf, name)


def checked_component(value: Any) -> Any:
    """Return the component of this rank of any value, distributed or not: an array, or IndexedSlices."""
    try:
        return operand_or_slices(in_replica(value))
    except UnsupportedDtypeError as error:
        advice = "for nested values use batch_reduce, strategy.reduce or ctx.all_reduce"
        raise InvalidArgumentError(f"{value!r} cannot be reduced as a per-replica value: {error}; {advice}") from None


def broadcast_source(tensor: Any) -> tuple[int, Array | IndexedSlices]:
    """Return the root of the broadcast of a value, and the array that this rank passes to it."""
    _check_in_scope(tensor)
    if isinstance(tensor, PerReplica):
        raise InvalidArgumentError(
            f"{tensor!r} has a component on each replica, so it is ambiguous which one to broadcast.\n"
            "    incorrect:  ops.broadcast(strategy.run(fn), destinations)\n"
            '    correct:    ops.reduce("mean", strategy.run(fn), destinations), or ops.broadcast(array, destinations)'
        )
    if isinstance(tensor, OnSomeReplicas):
        return tensor.ranks[0], checked_component(tensor._component)  # or its placeholder
    return 0, checked_component(tensor)


def check_defined(op: ReduceOp, component: Array | IndexedSlices, num_equal: int) -> None:
    """Check that an operation is defined for a component, which so many replicas have alike."""
    if isinstance(component, IndexedSlices):
        check_slices(op, component)
    else:
        check_dtype(op, component.dtype)
    if num_equal > 1 and rows_of(component).any():
        check_unambiguous(op, num_equal)


def rows_of(component: Array | IndexedSlices) -> Array:
    """Return the array of a component, or the rows of slices."""
    return component.values if isinstance(component, IndexedSlices) else component


def as_passed(op: ReduceOp, value: Any) -> Any:
    """Return a value as a reduction takes it: one that is not distributed is what this rank passes, unless that is ambiguous.

    TensorFlow returns such a value itself for MEAN, and so does this where all ranks pass the same.
    """
    return value if isinstance(value, DistributedValues) or op not in _IDEMPOTENT else PerReplica(value)


def check_unambiguous(op: ReduceOp, num_components: int) -> None:
    """Check that the reduction of a value that is equal on all replicas, and not zero, is not ambiguous."""
    if op not in _IDEMPOTENT and num_components > 1:
        raise InvalidArgumentError(
            f"{op.name} of a value that is not a per-replica value is ambiguous with {num_components} replicas: it could count "
            f"once, or {num_components} times.\n"
            '    incorrect:  strategy.reduce("sum", 5.0, axis=None)\n'
            '    correct:    strategy.reduce("sum", strategy.run(fn), axis=None), with what fn returns on each replica; or '
            "the value itself"
        )


def _checked(op: ReduceOp, value: Any, destinations: Any, communicator: BaseCommunicator) -> Pair:
    _check_in_scope(value)
    if isinstance(value, DistributedValues):
        value = _components(value, communicator)
    elif communicator.size > 1:
        value = as_passed(op, value)
    is_reduced = communicator.size > 1 and isinstance(value, PerReplica)
    pair = Pair(value, destinations, resolve(destinations, communicator), is_reduced)
    if isinstance(value, OnSomeReplicas):
        check_unambiguous(op, len(value.ranks))
        return pair
    check_defined(op, checked_component(value), 1 if isinstance(value, PerReplica) else communicator.size)
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
    if current() is not default_mode() or not isinstance(value, DistributedValues):
        return
    if getattr(value, "distribute_strategy", None) is not get_strategy():
        scope = "in the scope of the strategy that the value belongs to"
        raise misplaced(f"an operation of CrossDeviceOps on {value!r}", scope, "ops of a value")


_ACCEPTED = (
    "accepted are a distributed value, variable or array (the replicas that hold it), a rank, or 'rank:0', and a set of these"
)
_ARRAY_PROTOCOLS = ("__array__", "__array_interface__", "__cuda_array_interface__", "__dlpack__")


class OnSomeReplicas(DistributedValues):
    """A value that only some ranks hold: the destinations of a reduction."""

    def __init__(self, component: Any, ranks: tuple[int, ...], rank: int) -> None:
        super().__init__(component)
        self.ranks = ranks
        self._rank = rank

    @property
    def is_here(self) -> bool:
        """Whether this rank has a component."""
        return self._rank in self.ranks

    @property
    def values(self) -> tuple[Any, ...]:
        """The components that this rank holds: a tuple of one, or of none."""
        return super().values if self.is_here else ()

    def in_replica(self) -> Any:
        """Return the component; on a rank that has none, this value itself, which cannot be read there."""
        return self._component if self.is_here else self

    def read(self) -> Array:
        """Return the component."""
        if not self.is_here:
            raise InvalidArgumentError(
                f"rank {self._rank}: this value was reduced to {ranks_text(self.ranks)} and cannot be read on this rank.\n"
                '    incorrect:  total = ops.reduce("sum", value, "rank:0"); print(np.asarray(total)), on all ranks\n'
                "    correct:    if total.is_here: print(np.asarray(total))\n"
                '    correct:    total = ops.reduce("sum", value, value), to have it on all ranks'
            )
        return as_array(self._component)

    def __repr__(self) -> str:
        held = repr(self._component) if self.is_here else "not here"
        return f"OnSomeReplicas({held}, on {ranks_text(self.ranks)})"


def resolve(destinations: Any, communicator: BaseCommunicator) -> tuple[int, ...]:
    """Return the ranks that `destinations` stands for, in increasing order."""
    if isinstance(destinations, (set, frozenset, str)) and not destinations:
        raise InvalidArgumentError(f"destinations must not be empty; {_ACCEPTED}")
    items = destinations if isinstance(destinations, (set, frozenset)) else (destinations,)
    return tuple(sorted({rank for item in items for rank in _ranks(item, communicator)}))


def deliver(result: Any, ranks: tuple[int, ...], communicator: BaseCommunicator) -> Any:
    """Return a result, which all ranks have, as a value that only `ranks` hold; with one replica, the result itself."""
    if communicator.size == 1:
        return result
    if len(ranks) == communicator.size:
        return Mirrored(result)
    return OnSomeReplicas(result if communicator.rank in ranks else _empty(result), ranks, communicator.rank)


def _ranks(destination: Any, communicator: BaseCommunicator) -> Collection[int]:
    """Return the ranks that one destination stands for."""
    if isinstance(destination, OnSomeReplicas):
        return destination.ranks
    if isinstance(destination, str):
        return ranks_of(destination, communicator.world)
    if isinstance(destination, (int, np.integer)) and not isinstance(destination, bool):
        return ranks_of(f"rank:{destination}", communicator.world)
    held = isinstance(destination, (DistributedValues, IndexedSlices))
    if held or any(hasattr(destination, protocol) for protocol in _ARRAY_PROTOCOLS):
        return range(communicator.size)
    advice = ": pass a set to name several ranks" if isinstance(destination, (list, tuple)) else ""
    raise InvalidArgumentError(f"destinations cannot be {destination!r}{advice}; {_ACCEPTED}")


def _empty(result: Any) -> Any:
    """Return an empty placeholder of the type of `result`, so that the memory of `result` can be freed."""
    if isinstance(result, IndexedSlices):
        return IndexedSlices(result.values[:0].copy(), result.indices[:0].copy(), result.dense_shape)
    return as_array(result).reshape(-1)[:0].copy()
