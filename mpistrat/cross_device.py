"""CrossDeviceOps, as in tf.distribute: objects that reduce the components of values, and deliver the results to destinations.

Invariant: these objects hold no communicator. They use the one of the strategy that is current when they are called.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from mpistrat.arrays import Array, as_array, as_operand, like
from mpistrat.communicator.interface import BaseCommunicator
from mpistrat.communicator.options import CommunicationOptions, check_options
from mpistrat.communicator.sparse import IndexedSlices, all_reduce_slices, broadcast_slices, check_slices
from mpistrat.context.stack import current, default_mode, get_strategy, in_cross_replica_context, misplaced, outside_replica
from mpistrat.context.values import DistributedValues, Mirrored, PerReplica, assignable, in_replica
from mpistrat.device.binding import bound_device
from mpistrat.errors import InvalidArgumentError, TransportError, UnsupportedDtypeError
from mpistrat.reduction import ReduceOp, accumulation_dtype, check_dtype, combine, divide, quiet
from mpistrat.text import ranks_text
from mpistrat.topology.world import ranks_of

AccumulationFn = Callable[[list[Array]], Any]

_IMPLEMENTATIONS = {"reduce_implementation", "batch_reduce_implementation"}
# the reduction of equal components is the component itself
_IDEMPOTENT = (ReduceOp.MEAN, ReduceOp.MIN, ReduceOp.MAX)


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
            The value. One that is not distributed is the component that this rank passes: its mean, minimum and maximum are
            those of the ranks' values; those of a mirrored value are the value itself. Their sum and product are ambiguous
            with several replicas, and refused unless the value is zero.
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
        with current_communicator().refusing("all_reduce", options):
            for array in arrays:
                check_dtype(reduce_op, array.dtype)
        values = [PerReplica(array) for array in arrays]
        with outside_replica():
            results = self._reduce_each(reduce_op, [(value, value) for value in values], options or CommunicationOptions())
        return list(map(in_replica, results))

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
        component = in_replica(per_replica_value)
        whole = like(communicator.all_gather(as_operand(component), axis, options), component)
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
        waiting = [(pair.value, pair.destinations) for pair in checked if pair.is_reduced]
        results = iter(self._reduce_each(op, waiting, options or CommunicationOptions()) if waiting else ())
        return [next(results) if pair.is_reduced else self._without_reduction(pair, communicator) for pair in checked]

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
        return in_replica(value) if communicator.size == 1 else value

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_packs={self.num_packs})"


class HierarchicalAllReduce(CrossDeviceOps):
    """Reduces inside each node, then between nodes, with the algorithm that is fastest for the arrays. Strategies' default.

    Parameters
    ----------
    num_packs : int, optional
        Number of equal packs that the elements of a batch are cut into; the last one takes the remainder. 0: each array is
        reduced separately. None (the default): packs follow `bytes_per_pack` of the options.
    """

    def __init__(self, num_packs: int | None = None) -> None:
        self._options = CommunicationOptions(num_packs=num_packs)

    @property
    def num_packs(self) -> int | None:
        """As given."""
        return self._options.num_packs

    def all_reduce_options(
        self, communicator: BaseCommunicator, options: CommunicationOptions | None
    ) -> CommunicationOptions | None:
        """Return these options, merged over those of this object, unless a subclass reduces in another way."""
        kind, own = type(self), HierarchicalAllReduce
        is_own = kind.reduce_implementation is own.reduce_implementation
        if not is_own or kind.batch_reduce_implementation is not own.batch_reduce_implementation:
            return None
        self._check(communicator)
        return self._options.merge(options)

    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: PerReplica, destinations: Any, options: CommunicationOptions
    ) -> Any:
        """Reduce one value: see `CrossDeviceOps.reduce_implementation`. A collective call."""
        pairs = [(per_replica_value, destinations)]
        return HierarchicalAllReduce.batch_reduce_implementation(self, reduce_op, pairs, options)[0]

    def batch_reduce_implementation(
        self, reduce_op: ReduceOp, value_destination_pairs: Sequence[tuple[PerReplica, Any]], options: CommunicationOptions
    ) -> list[Any]:
        """Reduce many values as one batch: see `CrossDeviceOps.batch_reduce_implementation`. A collective call."""
        communicator = current_communicator()
        self._check(communicator)
        wanted = self._options.merge(options)
        destination_ranks = [resolve(destinations, communicator) for _, destinations in value_destination_pairs]
        components = [component for value, _ in value_destination_pairs for component in value.values]
        arrays = [as_array(component) for component in components if not isinstance(component, IndexedSlices)]
        dense = iter(communicator.all_reduce(reduce_op, arrays, wanted) if arrays else ())
        results = [
            all_reduce_slices(communicator, reduce_op, component, wanted)
            if isinstance(component, IndexedSlices)
            else like(next(dense), component)
            for component in components
        ]
        return [deliver(result, ranks, communicator) for result, ranks in zip(results, destination_ranks, strict=True)]

    def _check(self, communicator: BaseCommunicator) -> None:
        """Raise if the communicator cannot reduce in this way."""


class CollectiveAllReduce(HierarchicalAllReduce):
    """Reduces by one all-reduce over all ranks (algorithm ``flat``), whatever the nodes."""

    def __init__(self, options: CommunicationOptions | None = None, num_packs: int | None = None) -> None:
        check_options(options)
        own = CommunicationOptions(num_packs=num_packs)
        self._options = CommunicationOptions(algorithm="flat").merge(options).merge(own)

    def __repr__(self) -> str:
        return f"CollectiveAllReduce(options={self._options}, num_packs={self.num_packs})"


class HierarchicalCopyAllReduce(HierarchicalAllReduce):
    """Reduces inside one node by a reduce-scatter and an all-gather."""

    def __init__(self, num_packs: int = 1) -> None:
        self._options = CommunicationOptions(algorithm="hierarchical", num_packs=num_packs)

    def _check(self, communicator: BaseCommunicator) -> None:
        if communicator.world.num_nodes > 1:
            raise NotImplementedError(
                f"HierarchicalCopyAllReduce reduces over the ranks of one node, but these replicas are {communicator.world}: "
                "use HierarchicalAllReduce(), which reduces inside nodes and then between them"
            )


class NcclAllReduce(HierarchicalAllReduce):
    """Reduces arrays on GPUs by NCCL."""

    def __init__(self, num_packs: int = 1) -> None:
        self._options = CommunicationOptions(implementation="NCCL", num_packs=num_packs)

    def _check(self, communicator: BaseCommunicator) -> None:
        if bound_device() is None:
            raise TransportError(
                "NcclAllReduce reduces arrays in GPU memory, but these replicas compute in host memory: use "
                "HierarchicalAllReduce(), the default, or ReductionToOneDevice()"
            )


class ReductionToOneDevice(CrossDeviceOps):
    """Gathers the components of a value on one rank, reduces them there in replica order, and broadcasts the result.

    Slow with many ranks, but the order of the sum is always the same, and `accumulation_fn` can be any function.

    Parameters
    ----------
    reduce_to_device : str or int, optional
        The rank that reduces, as a device string (``rank:1``) or a number; by default the first destination.
    accumulation_fn : callable, optional
        Replaces the sum, but not of IndexedSlices: ``accumulation_fn([component_0, component_1, …])`` is called on that rank
        with arrays in the dtype of the accumulation (float32 for 16-bit floats), and returns one like them; MEAN divides it.
    """

    def __init__(self, reduce_to_device: str | int | None = None, accumulation_fn: AccumulationFn | None = None) -> None:
        if accumulation_fn is not None and not callable(accumulation_fn):
            raise TypeError(f"accumulation_fn must be callable with a list of arrays; got {accumulation_fn!r}")
        self._reduce_to_device = reduce_to_device
        self._accumulation_fn = accumulation_fn

    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: PerReplica, destinations: Any, options: CommunicationOptions
    ) -> Any:
        """Reduce one value: see `CrossDeviceOps.reduce_implementation`. A collective call."""
        communicator = current_communicator()
        [component] = per_replica_value.values
        ranks = resolve(destinations, communicator)
        if isinstance(component, IndexedSlices):
            return deliver(all_reduce_slices(communicator, reduce_op, component, options), ranks, communicator)
        with communicator.refusing("ReductionToOneDevice", options):
            array = as_operand(component)
            root = ranks[0] if self._reduce_to_device is None else self._root(communicator)
        parts = communicator.gather(array, root, options)

        def reduced() -> tuple[Array, str]:
            return array if parts is None else self._reduced(reduce_op, parts), ""

        call = f"{reduce_op.name} by ReductionToOneDevice with an accumulation_fn"
        # all ranks raise what the user's function raises on one of them
        result = communicator.agree_on(call, reduced, options) if self._accumulation_fn else reduced()[0]
        if ranks != (root,):
            result = communicator.broadcast(result, root, options)
        return deliver(like(result, component), ranks, communicator)

    def _root(self, communicator: BaseCommunicator) -> int:
        """Return the rank that `reduce_to_device` names."""
        ranks = resolve(self._reduce_to_device, communicator)
        if len(ranks) > 1:
            raise InvalidArgumentError(f"reduce_to_device must name one rank; {self._reduce_to_device!r} names ranks {ranks}")
        return ranks[0]

    def _reduced(self, op: ReduceOp, parts: list[Array]) -> Array:
        """Return the reduction of the components, in their dtype."""
        total = self._accumulated(op, parts) if self._accumulation_fn else quiet()(_folded, op, parts)
        result = np.empty_like(parts[0], order="C")
        quiet()(divide, total, len(parts) if op is ReduceOp.MEAN else 1, result)
        return result

    def _accumulated(self, op: ReduceOp, parts: list[Array]) -> Array:
        """Return the result of `accumulation_fn` for the components."""
        assert self._accumulation_fn is not None, "there is a function to call"
        if op not in (ReduceOp.SUM, ReduceOp.MEAN):
            raise InvalidArgumentError(f"accumulation_fn replaces the sum, so it is for SUM and MEAN only; got {op.name}")
        wide = accumulation_dtype(op, parts[0].dtype)
        total = as_array(self._accumulation_fn([part.astype(wide) for part in parts]), "what accumulation_fn returned")
        return assignable(total, np.empty_like(parts[0], wide), self)

    def __repr__(self) -> str:
        function = getattr(self._accumulation_fn, "__name__", type(self._accumulation_fn).__name__)
        chosen = "None" if self._accumulation_fn is None else function
        return f"ReductionToOneDevice(reduce_to_device={self._reduce_to_device!r}, accumulation_fn={chosen})"


def _folded(op: ReduceOp, parts: Sequence[Array]) -> Array:
    """Return the components reduced one after the other."""
    total = parts[0].astype(accumulation_dtype(op, parts[0].dtype))
    for part in parts[1:]:
        combine(op)(total, part, out=total)
    return total


def current_communicator() -> BaseCommunicator:
    """Return the communicator of the current strategy."""
    return cast("BaseCommunicator", get_strategy().extended.communicator)


def _require_cross_replica(ops: CrossDeviceOps, method: str) -> None:
    if not in_cross_replica_context() and current() is not default_mode():
        raise misplaced(f"{type(ops).__name__}.{method}", "in cross-replica context", f"ops.{method}")


def _abstract(ops: CrossDeviceOps) -> NotImplementedError:
    wanted = "override reduce_implementation or batch_reduce_implementation, or derive it from HierarchicalAllReduce"
    return NotImplementedError(f"{type(ops).__name__} implements no reduction: {wanted}")


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
