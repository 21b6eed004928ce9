"""StrategyExtended: the part of a strategy for authors of strategies and libraries, as in tf.distribute."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Number
from typing import Any

from mpistrat.arrays import Array, as_array, checksum, like
from mpistrat.communicator.interface import BaseCommunicator
from mpistrat.communicator.options import CommunicationOptions, check_options
from mpistrat.communicator.sparse import IndexedSlices, gather_refused
from mpistrat.communicator.validate import check_gather, check_target, read_arrays
from mpistrat.context.stack import (
    current,
    default_mode,
    enter_or_assert_strategy,
    in_replica_context_of,
    misplaced,
    outside_replica,
    updating,
)
from mpistrat.context.values import PerReplica, component_of, container_of, in_replica, regroup, select_replica
from mpistrat.cross_device import CrossDeviceOps, HierarchicalAllReduce, OnSomeReplicas, operand_or_slices
from mpistrat.device.binding import own_device
from mpistrat.errors import InvalidArgumentError
from mpistrat.execution.engine import Work
from mpistrat.reduction import ReduceOp
from mpistrat.strategy.deprecated import accepts_hints
from mpistrat.structures import ONE_LEAF, each_leaf, flatten, leaf_names, map_leaves

# Of each argument of an update: a value that was not reduced differs nearly everywhere.
_COMPARED_BYTES = 1 << 16


class StrategyExtended:
    """The communicator, devices and roles of a strategy. Each strategy has its own.

    Parameters
    ----------
    communicator : BaseCommunicator
        Over the strategy's replicas.
    cross_device_ops : CrossDeviceOps, optional
        Reduces the components of values; HierarchicalAllReduce by default.
    worker_devices : sequence of str, optional
        The devices that replicas compute on: the one of this rank, which is the default, or those of all replicas in order.
    parameter_devices : sequence of str, optional
        The devices that hold the variables; the worker devices by default.
    is_chief : bool, optional
        Whether this rank writes checkpoints and logs; by default rank 0 does.
    """

    root: int | None = None  # the rank that keeps the variables, where one does
    experimental_require_static_shapes = False  # shapes may change from step to step
    experimental_should_init = True  # every rank creates initial values, and those of replica 0 are used

    def __init__(
        self,
        communicator: BaseCommunicator,
        cross_device_ops: CrossDeviceOps | None = None,
        worker_devices: Sequence[str] | None = None,
        parameter_devices: Sequence[str] | None = None,
        is_chief: bool | None = None,
    ) -> None:
        self.communicator = communicator
        self.num_variables = 0  # that all replicas have made: their numbers tell those without a name apart
        self._is_chief = communicator.rank == 0 if is_chief is None else is_chief
        self._cross_device_ops = cross_device_ops or HierarchicalAllReduce()
        self._worker_devices = (own_device(),) if worker_devices is None else tuple(worker_devices)
        self._parameter_devices = self._worker_devices if parameter_devices is None else tuple(parameter_devices)

    def bind(self, strategy: Any) -> None:
        """Set the strategy that this belongs to; the strategy calls this once when it is created."""
        self._strategy = strategy

    @property
    def cross_device_ops(self) -> CrossDeviceOps:
        """Reduces the components of values."""
        return self._cross_device_ops

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The devices that replicas compute on; the default strategy has none, and raises RuntimeError."""
        self._require_devices("worker_devices")
        return self._worker_devices

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The devices that hold the variables; the default strategy has none, and raises RuntimeError."""
        self._require_devices("parameter_devices")
        return self._parameter_devices

    @property
    def replica_device(self) -> str:
        """The device of this rank's replica."""
        return self._worker_devices[self.communicator.rank % len(self._worker_devices)]

    @property
    def experimental_between_graph(self) -> bool:
        """Whether each process runs the program for its own replica: True with several replicas."""
        return self.communicator.size > 1

    @property
    def should_checkpoint(self) -> bool:
        """Whether this rank writes checkpoints and logs: True on the chief."""
        return self._is_chief

    should_save_summary = should_checkpoint

    @accepts_hints
    def reduce_to(
        self, reduce_op: ReduceOp | str, value: Any, destinations: Any, options: CommunicationOptions | None = None
    ) -> Any:
        """Reduce a value over replicas, and deliver the result. As `CrossDeviceOps.reduce`. A collective call."""
        with self.in_scope("reduce_to"):
            return self._cross_device_ops.reduce(reduce_op, value, self._kept(destinations), options)

    @accepts_hints
    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Iterable[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Reduce many values as one batch. As `CrossDeviceOps.batch_reduce`. A collective call."""
        with self.in_scope("batch_reduce_to"):
            pairs = value_destination_pairs
            if isinstance(pairs, Iterable):  # the ops refuse what is not a pair
                pairs = [(one[0], self._kept(one[1])) if isinstance(one, tuple) and len(one) == 2 else one for one in pairs]
            return self._cross_device_ops.batch_reduce(reduce_op, pairs, options)

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """Broadcast a value to `destinations`. As `CrossDeviceOps.broadcast`. A collective call."""
        with self.in_scope("broadcast_to"):
            return self._cross_device_ops.broadcast(tensor, self._kept(destinations))

    def all_reduce(
        self, op: ReduceOp, arrays: list[Any], options: CommunicationOptions | None = None, out: list[Array] | None = None
    ) -> list[Any]:
        """Reduce arrays and IndexedSlices over all replicas, in either context; into `out`, if given. A collective call."""
        wanted = self._direct_options(arrays, options)
        if wanted is not None:
            return self.communicator.all_reduce(op, arrays, wanted, out)
        if out is not None:
            with self.communicator.refusing("all_reduce", options):
                read, targets = read_arrays(arrays, out)
                for pair in zip(targets or (), read, strict=True):
                    check_target(*pair)
        with enter_or_assert_strategy(self._strategy):
            results = self._cross_device_ops.all_reduce_in_replica(op, arrays, options)
        if out is None:
            return results
        for target, result in zip(targets or (), results, strict=True):
            target[...] = result
        return out

    def start_all_reduce(
        self, op: ReduceOp, arrays: list[Any], options: CommunicationOptions | None = None, structure: object = None
    ) -> Work[list[Any]]:
        """Start `all_reduce`; with ops that reduce in another way it is complete when this returns. A collective call."""
        wanted = self._direct_options(arrays, options)
        if wanted is not None:
            return self.communicator.start_all_reduce(
                op, arrays, wanted, structure=None if structure == ONE_LEAF else structure
            )
        self.communicator.note(f"start_all_reduce({op.name}) of {structure}", options)
        return Work.ended(self.all_reduce(op, arrays, options))

    def _direct_options(self, arrays: list[Any], options: CommunicationOptions | None) -> CommunicationOptions | None:
        """Return the options with which the communicator reduces these arrays itself; None if the ops must."""
        if any(isinstance(array, IndexedSlices) for array in arrays):
            return None
        if not arrays:  # ops are not asked for nothing
            return options or CommunicationOptions()
        return self._cross_device_ops.all_reduce_options(self.communicator, options)

    def all_gather(self, value: Any, axis: int, options: CommunicationOptions | None = None, method: str = "all_gather") -> Any:
        """Concatenate the components of a nest along `axis`, in either context. A collective call."""

        def gathered(array: Array) -> Any:
            if type(self._cross_device_ops).gather_implementation is CrossDeviceOps.gather_implementation:
                return self.communicator.all_gather(array, axis, options)
            own = PerReplica(array)
            with enter_or_assert_strategy(self._strategy), outside_replica():
                return self._cross_device_ops.gather_implementation(own, own, axis, options or CommunicationOptions())

        return self.for_each_leaf(method, f"axis={axis}", value, options, gathered, lambda array: check_gather(array, axis))

    def broadcast(self, value: Any, root: int, options: CommunicationOptions | None = None) -> Any:
        """Return the nest of the rank `root`, in either context. A collective call."""

        def received(array: Array) -> Any:
            if type(self._cross_device_ops).broadcast_implementation is CrossDeviceOps.broadcast_implementation:
                return self.communicator.broadcast(array, root, options)
            source = array if root == 0 else OnSomeReplicas(array, (root,), self.communicator.rank)
            with enter_or_assert_strategy(self._strategy), outside_replica():
                return self._cross_device_ops.broadcast_implementation(source, PerReplica(array))

        return self.for_each_leaf("broadcast", f"root={root}", value, options, received)

    def for_each_leaf(
        self,
        method: str,
        what: str,
        value: Any,
        options: CommunicationOptions | None,
        collective: Callable[[Array], Any],
        check: Callable[[Array], object] = lambda array: None,
    ) -> Any:
        """Check this replica's components of all leaves of a nest, then make a collective call for each."""
        with self.communicator.refusing(method, options):
            leaves, structure = flatten(value)
            leaves = list(map(component_of, leaves))
            check_options(options)
            arrays = each_leaf(operand_or_slices, leaves, lambda: leaf_names(value))
            for array in arrays:
                if isinstance(array, IndexedSlices):
                    raise gather_refused(array)
                check(array)
        self.communicator.note(f"{method}({what}) of {structure}", options)
        results = [like(in_replica(collective(array)), leaf) for array, leaf in zip(arrays, leaves, strict=True)]
        return structure.unflatten(results)

    def call_for_each_replica(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Return ``strategy.run(fn, args, kwargs)``. An old name."""
        return self._strategy.run(fn, args, kwargs)

    def update(
        self,
        var: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call ``fn(variable, *args, **kwargs)`` to update the component of a variable on this rank.

        Assigning in `fn` changes the array of this rank, without communication, so the arguments must be equal on all replicas
        for the variable to stay mirrored. Inside ``strategy.run`` this is a `merge_call`. All ranks make the call; their calls,
        and the components of per-replica arguments, are compared by the next collective.

        Parameters
        ----------
        args, kwargs : sequence, mapping
            Distributed values in them are replaced by their component, which every replica must hold. Those of per-replica
            values must be equal, as those that `all_reduce` has returned are, unless the variable is synchronized ON_READ.
        group : bool
            True: return None. False: return what `fn` returned, with a list of one component, that of this rank, for each leaf.
        """
        with self.communicator.refusing("extended.update"):
            if not hasattr(var, "writable"):
                raise TypeError(f"extended.update changes a mpistrat.Variable of replicas; got {var!r}")
            given = tuple(args), dict(kwargs or {})
        if in_replica_context_of(self._strategy, "strategy.extended.update"):
            if self.root is None:  # else what the rank passes that keeps the variable is what counts
                given = regroup(given, self.communicator.size)
            return current().replica_context.merge_call(lambda _: self.update(var, fn, *given, group))
        given, call = self._arguments_of_update(given), f"extended.update of {var!r}"
        with enter_or_assert_strategy(self._strategy):
            with self.communicator.refusing(call):
                in_replica_context_of(var.distribute_strategy, "strategy.extended.update")  # refused under another strategy
                bound = partial(fn, var)  # refused if it cannot be called
            may_differ = isinstance(var.across_replicas(), PerReplica)  # ON_READ
            return self._updated(call, bound, given, group, may_differ)

    def _updated(self, call: str, fn: Callable[..., Any], given: Any, group: bool, may_differ: bool = False) -> Any:
        """Call a function with this replica's components of arguments, which ranks compare unless they may differ."""
        with self.communicator.refusing(call):
            fingerprint = _fingerprint(flatten(given)[0], may_differ)
        self.communicator.note(call + fingerprint)
        args, kwargs = select_replica(given)
        with updating(self.communicator.rank):
            result = fn(*args, **kwargs)
        return None if group else map_leaves(lambda leaf: [leaf], result)

    def _arguments_of_update(self, given: Any) -> Any:
        """Return arguments of `update` as the function gets them on each rank."""
        return given

    def update_non_slot(
        self,
        colocate_with: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call ``fn(*args, **kwargs)`` to update optimizer state that belongs to no variable, outside ``strategy.run``.

        `colocate_with` is the device of the state, as returned by `non_slot_devices`. All else is as for `update`.
        """
        with self.in_scope("update_non_slot"):
            return self._updated("extended.update_non_slot", fn, (tuple(args), dict(kwargs or {})), group)

    def non_slot_devices(self, var_list: Sequence[Any]) -> tuple[str, ...]:
        """Return the devices of optimizer state that belongs to no variable: those of the variables."""
        return self._parameter_devices

    def read_var(self, v: Any) -> Any:
        """Return a copy of the array of a variable, outside ``strategy.run``. A collective call for an ON_READ variable."""
        with self.in_scope("read_var"):
            return v.read().copy()  # so that later assignments do not change the result

    def value_container(self, value: Any) -> Any:
        """Return the distributed value, for example a variable, that `value` is a component of; else `value` itself."""
        return container_of(value)

    def variable_created_in_scope(self, v: Any) -> bool:
        """Return whether a variable was created in the scope of this strategy."""
        return getattr(v, "distribute_strategy", None) is self._strategy

    @contextmanager
    def colocate_vars_with(self, colocate_with_variable: Any) -> Iterator[None]:
        """Create variables on the device of another one. Has no effect: all variables of a rank are on one device."""
        if current().strategy is not self._strategy:
            raise misplaced("strategy.extended.colocate_vars_with", "in the strategy's scope")
        self.require_cross_replica("strategy.extended.colocate_vars_with")
        if not self.variable_created_in_scope(colocate_with_variable):
            raise InvalidArgumentError(
                f"{colocate_with_variable!r} was not created in the scope of {self._strategy!r}: name one of the same strategy"
            )
        yield

    def require_cross_replica(self, call: str) -> None:
        """Check that this is not inside ``strategy.run``; `call` is the call as the user wrote it."""
        if in_replica_context_of(self._strategy, call):
            raise misplaced(call, "in cross-replica context")

    @contextmanager
    def in_scope(self, method: str) -> Iterator[None]:
        """Check that this is not inside ``strategy.run``, and enter the strategy's scope for a method of the extended part."""
        self.require_cross_replica(f"strategy.extended.{method}")
        with enter_or_assert_strategy(self._strategy):
            yield

    def _kept(self, destinations: Any) -> Any:
        """Return destinations, with the rank that keeps a variable in its place, where one does."""
        if self.root is None or not self.variable_created_in_scope(destinations):
            return destinations
        return self.parameter_devices[0]

    def _require_devices(self, name: str) -> None:
        if default_mode().strategy is self._strategy:
            raise RuntimeError(
                f"the default strategy has no {name}: it represents code without a strategy.\n"
                f"    incorrect:  mpistrat.get_strategy().extended.{name}, outside all scopes\n"
                f"    correct:    mpistrat.OneDeviceStrategy().extended.{name}"
            )


def _fingerprint(leaves: list[Any], may_differ: bool) -> str:
    """Return a text that differs between ranks where components of per-replica values do, after checking that all have some."""
    for leaf in leaves:
        if isinstance(leaf, OnSomeReplicas):
            raise TypeError(
                f"extended.update got {leaf!r}, but every replica runs the update: reduce the value to the variable.\n"
                '    incorrect:  extended.update(variable, fn, args=(extended.reduce_to("sum", value, "rank:0"),))\n'
                '    correct:    extended.update(variable, fn, args=(extended.reduce_to("sum", value, variable),))'
            )
    compared = [leaf for leaf in leaves if isinstance(leaf, PerReplica) and not may_differ]
    arrays = [array for leaf in compared for array in _arrays_of(leaf.in_replica())]
    if not arrays:
        return ""
    found = checksum(arrays, _COMPARED_BYTES)
    return f" with per-replica values, which must be equal: all_reduce them first (checksum {found:x})"


def _arrays_of(component: Any) -> list[Array]:
    """Return the arrays of a component, which may also be slices, or no array at all."""
    if isinstance(component, IndexedSlices):
        return [as_array(component.indices), as_array(component.values)]
    is_array = hasattr(component, "dtype") or isinstance(component, Number)
    return [as_array(component, "an argument of extended.update")] if is_array else []
