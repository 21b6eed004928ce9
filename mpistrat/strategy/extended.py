"""StrategyExtended: the part of a strategy for authors of strategies and libraries, as in tf.distribute."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import numpy as np

from mpistrat.arrays import Array
from mpistrat.communicator.interface import BaseCommunicator
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.communicator.sparse import IndexedSlices
from mpistrat.communicator.validate import check_out
from mpistrat.context.stack import (
    current,
    default_mode,
    enter_or_assert_strategy,
    in_replica_context_of,
    misplaced,
    updating,
)
from mpistrat.context.values import PerReplica, container_of, select_replica
from mpistrat.cross_device.all_reduce import HierarchicalAllReduce
from mpistrat.cross_device.destinations import OnSomeReplicas
from mpistrat.cross_device.ops import CrossDeviceOps
from mpistrat.device.binding import own_device
from mpistrat.errors import InvalidArgumentError, UnsupportedDtypeError
from mpistrat.execution.work import Work
from mpistrat.reduction import ReduceOp, check_across_replicas
from mpistrat.strategy.advice import ADVICE
from mpistrat.strategy.deprecated import merge_hints
from mpistrat.structures import flatten, map_leaves

__all__ = ["StrategyExtended"]

_BOOL, _DTYPE = np.dtype(bool), attrgetter("dtype")


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
    """

    def __init__(
        self,
        communicator: BaseCommunicator,
        cross_device_ops: CrossDeviceOps | None = None,
        worker_devices: Sequence[str] | None = None,
        parameter_devices: Sequence[str] | None = None,
    ) -> None:
        self.communicator = communicator
        self._cross_device_ops = cross_device_ops or HierarchicalAllReduce()
        # the default ops add nothing to the communicator, so reductions can call it directly
        self.uses_default_ops = (
            type(self._cross_device_ops) is HierarchicalAllReduce and self._cross_device_ops.num_packs is None
        )
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
        """The devices that replicas compute on.

        Raises
        ------
        RuntimeError
            If this is the default strategy.
        """
        self._require_devices("worker_devices")
        return self._worker_devices

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The devices that hold the variables.

        Raises
        ------
        RuntimeError
            If this is the default strategy.
        """
        self._require_devices("parameter_devices")
        return self._parameter_devices

    @property
    def replica_device(self) -> str:
        """The device of this rank's replica."""
        return self._worker_devices[self.communicator.rank % len(self._worker_devices)]

    @property
    def experimental_require_static_shapes(self) -> bool:
        """False: shapes may change from step to step."""
        return False

    @property
    def experimental_between_graph(self) -> bool:
        """Whether each process runs the program for its own replica: True with several replicas."""
        return self.communicator.size > 1

    @property
    def experimental_should_init(self) -> bool:
        """True: every rank creates initial values, and those of replica 0 are used."""
        return True

    @property
    def should_checkpoint(self) -> bool:
        """Whether this rank writes checkpoints: True on replica 0."""
        return self.communicator.rank == 0

    @property
    def should_save_summary(self) -> bool:
        """Whether this rank writes logs: True on replica 0."""
        return self.communicator.rank == 0

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
        *,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """Reduce a value over replicas, and deliver the result to `destinations`. A collective call.

        `CrossDeviceOps.reduce` documents the arguments, the result and the errors.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            The operation.
        value : DistributedValues, IndexedSlices or array_like
            The value.
        destinations : DistributedValues, array, str, int or set
            The ranks that receive the result.
        options : CommunicationOptions, optional
            Take precedence over those of the strategy.
        experimental_hints : CommunicationOptions, optional
            The old name of `options`; deprecated.
        """
        with self.in_scope("reduce_to"):
            return self._cross_device_ops.reduce(reduce_op, value, destinations, merge_hints(options, experimental_hints))

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Iterable[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
        *,
        experimental_hints: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Reduce many values as one batch, each with its own destinations. A collective call.

        `CrossDeviceOps.batch_reduce` documents the arguments, the result and the errors.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            The operation.
        value_destination_pairs : iterable of 2-tuples
            Values and destinations.
        options : CommunicationOptions, optional
            Take precedence over those of the strategy.
        experimental_hints : CommunicationOptions, optional
            The old name of `options`; deprecated.
        """
        with self.in_scope("batch_reduce_to"):
            wanted = merge_hints(options, experimental_hints)
            return self._cross_device_ops.batch_reduce(reduce_op, value_destination_pairs, wanted)

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """Broadcast a value to `destinations`. A collective call: see `CrossDeviceOps.broadcast`."""
        with self.in_scope("broadcast_to"):
            return self._cross_device_ops.broadcast(tensor, destinations)

    def all_reduce(
        self,
        op: ReduceOp,
        arrays: list[Any],
        options: CommunicationOptions | None = None,
        out: list[Array] | None = None,
    ) -> list[Any]:
        """Reduce arrays and IndexedSlices over all replicas, in either context; into `out`, if given. A collective call.

        Raises
        ------
        UnsupportedDtypeError
            If `op` is SUM and an array has dtype bool.
        """
        if op is ReduceOp.SUM and _BOOL in map(_DTYPE, arrays):
            self._refuse_booleans(op, arrays, options)
        if self.uses_default_ops and not any(isinstance(array, IndexedSlices) for array in arrays):
            return self.communicator.all_reduce(op, arrays, options, out)
        with enter_or_assert_strategy(self._strategy):
            results = self._cross_device_ops.all_reduce_in_replica(op, arrays, options)
        if out is None:
            return results
        for target, result in zip(check_out(out, results), results, strict=True):
            target[...] = result
        return out

    def start_all_reduce(
        self, op: ReduceOp, arrays: list[Any], options: CommunicationOptions | None = None, structure: object = None
    ) -> Work[list[Any]]:
        """Start `all_reduce`; with other than the default ops it is complete when this returns. A collective call."""
        if self.uses_default_ops and not any(isinstance(array, IndexedSlices) for array in arrays):
            return self.communicator.start_all_reduce(op, arrays, options, structure=structure)
        self.communicator.note(f"start_all_reduce({op.name}) of {structure}", options)
        return Work.ended(self.all_reduce(op, arrays, options))

    def all_gather(self, array: Array, axis: int, options: CommunicationOptions | None = None) -> Any:
        """Concatenate the arrays of all ranks along `axis`, in cross-replica context. A collective call."""
        if self.uses_default_ops:
            return self.communicator.all_gather(array, axis, options)
        value = PerReplica(array)
        with enter_or_assert_strategy(self._strategy):
            whole = self._cross_device_ops.gather_implementation(value, value, axis, options or CommunicationOptions())
        return select_replica(whole)

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
        for the variable to stay mirrored. Inside ``strategy.run`` this is a `merge_call`. All ranks make the call; their calls
        are compared with the next collective.

        Parameters
        ----------
        var : Variable
            The variable to update.
        fn : callable
            The update.
        args, kwargs : sequence, mapping
            Distributed values in them are replaced by their component. Per-replica values are accepted only for a variable that
            is synchronized ON_READ.
        group : bool
            True: return None.

        Returns
        -------
        None or nest of list
            What `fn` returned, with a list of one component, that of this rank, in place of each leaf.

        Raises
        ------
        TypeError
            If `var` is not a variable, an argument is a per-replica value although `var` is mirrored, or an argument is held by
            some replicas only.
        AgreementError
            On the other ranks, from the next collective, if one rank raises one of these errors.
        RuntimeError
            If the variable belongs to another strategy.
        """
        if in_replica_context_of(self._strategy, "strategy.extended.update"):
            return current().replica_context.merge_call(lambda _: self.update(var, fn, args, kwargs, group))
        try:
            _check_update(var, args, kwargs)
        except TypeError as error:
            self.communicator.refuse("extended.update", error)
        self.communicator.note(f"extended.update of {var!r}")
        with enter_or_assert_strategy(self._strategy):
            in_replica_context_of(var.distribute_strategy, "strategy.extended.update")  # refused under another strategy
            with updating(self.communicator.rank):
                return _results(var.update_component(fn, args, kwargs), group)

    def update_non_slot(
        self,
        colocate_with: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call ``fn(*args, **kwargs)`` to update optimizer state that belongs to no variable. Returns the same as `update`.

        Parameters
        ----------
        colocate_with : object
            The device of the state, as returned by `non_slot_devices`.
        fn : callable
            The update.
        args, kwargs : sequence, mapping
            As for `update`.
        group : bool
            As for `update`.

        Raises
        ------
        RuntimeError
            If called inside ``strategy.run``.
        TypeError
            If an argument is a per-replica value, or only some replicas hold it.
        AgreementError
            On the other ranks, from the next collective, if one rank raises one of these errors.
        """
        with self.in_scope("update_non_slot"):
            try:
                _check_mirrored(args, kwargs)
            except TypeError as error:
                self.communicator.refuse("extended.update_non_slot", error)
            self.communicator.note("extended.update_non_slot")
            with updating(self.communicator.rank):
                return _results(fn(*select_replica(tuple(args)), **select_replica(dict(kwargs or {}))), group)

    def non_slot_devices(self, var_list: Sequence[Any]) -> tuple[str, ...]:
        """Return the devices of optimizer state that belongs to no variable: those of the variables."""
        return self._parameter_devices

    def read_var(self, v: Any) -> Any:
        """Return a copy of the array of a variable. An ON_READ variable is reduced first, by a collective call.

        Raises
        ------
        RuntimeError
            If called inside ``strategy.run``.
        """
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
        """Create variables on the device of another one. Has no effect: all variables of a rank are on one device.

        Raises
        ------
        RuntimeError
            On entering, outside the strategy's scope.
        InvalidArgumentError
            On entering, if the variable was not created in the scope of this strategy.
        """
        if current().strategy is not self._strategy:
            raise misplaced("strategy.extended.colocate_vars_with", "in the strategy's scope", *ADVICE["colocate_vars_with"])
        self.require_cross_replica("strategy.extended.colocate_vars_with")
        if not self.variable_created_in_scope(colocate_with_variable):
            raise InvalidArgumentError(
                f"{colocate_with_variable!r} was not created in the scope of {self._strategy!r}: variables can only be "
                "colocated with those of the same strategy"
            )
        yield

    def require_cross_replica(self, call: str) -> None:
        """Check that this is not inside ``strategy.run``.

        Raises
        ------
        RuntimeError
            If it is, or if another strategy is current; `call` is the call as the user wrote it.
        """
        if in_replica_context_of(self._strategy, call):
            raise misplaced(call, "in cross-replica context", *ADVICE[call.rpartition(".")[2]])

    @contextmanager
    def in_scope(self, method: str) -> Iterator[None]:
        """Check that this is not inside ``strategy.run``, and enter the strategy's scope for a method of the extended part."""
        self.require_cross_replica(f"strategy.extended.{method}")
        with enter_or_assert_strategy(self._strategy):
            yield

    def _refuse_booleans(self, op: ReduceOp, arrays: list[Any], options: CommunicationOptions | None) -> None:
        try:
            for index, array in enumerate(arrays):
                check_across_replicas(op, array.dtype, f"array {index}")
        except UnsupportedDtypeError as error:
            self.communicator.refuse("all_reduce", error, options)

    def _require_devices(self, name: str) -> None:
        if default_mode().strategy is self._strategy:
            raise RuntimeError(
                f"the default strategy has no {name}: it represents code without a strategy.\n"
                f"    incorrect:  mpistrat.get_strategy().extended.{name}, outside all scopes\n"
                f"    correct:    mpistrat.OneDeviceStrategy().extended.{name}"
            )


def _check_update(var: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> None:
    if not hasattr(var, "update_component"):
        raise TypeError(f"extended.update changes a mpistrat.Variable; got {var!r}")
    # the components of an ON_READ variable may differ
    _check_mirrored(args, kwargs, may_differ=isinstance(var.across_replicas(), PerReplica))


def _check_mirrored(args: Sequence[Any], kwargs: Mapping[str, Any] | None, *, may_differ: bool = False) -> None:
    for leaf in flatten((tuple(args), dict(kwargs or {})))[0]:
        if isinstance(leaf, OnSomeReplicas):
            raise TypeError(
                f"extended.update got {leaf!r}, but every replica runs the update: reduce the value to the variable.\n"
                '    incorrect:  extended.update(variable, fn, args=(extended.reduce_to("sum", value, "rank:0"),))\n'
                '    correct:    extended.update(variable, fn, args=(extended.reduce_to("sum", value, variable),))'
            )
        if isinstance(leaf, PerReplica) and not may_differ:
            raise TypeError(
                f"extended.update got {leaf!r}; it differs between replicas, so the variable would too: reduce it first.\n"
                "    incorrect:  strategy.extended.update(variable, fn, args=(strategy.run(gradient),))\n"
                '    correct:    total = strategy.reduce("sum", strategy.run(gradient), axis=None); '
                "strategy.extended.update(variable, fn, args=(total,))"
            )


def _results(result: Any, group: bool) -> Any:
    return None if group else map_leaves(lambda leaf: [leaf], result)
