"""StrategyExtended: what all strategies share, for authors of strategies and libraries."""

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
    """How a strategy communicates, and what it says about its devices and roles. Each strategy has one of its own.

    Parameters
    ----------
    communicator : BaseCommunicator
        Over the strategy's replicas.
    cross_device_ops : CrossDeviceOps, optional
        How the components of values are combined; HierarchicalAllReduce by default.
    worker_devices : sequence of str, optional
        The devices that replicas compute on: that of this rank, which is the default, or those of all replicas, in their order.
    parameter_devices : sequence of str, optional
        The devices that variables live on; the worker devices by default.
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
        # nothing to be asked for each reduction: the communicator does by itself what these ops would tell them to
        self.uses_default_ops = (
            type(self._cross_device_ops) is HierarchicalAllReduce and self._cross_device_ops.num_packs is None
        )
        self._worker_devices = (own_device(),) if worker_devices is None else tuple(worker_devices)
        self._parameter_devices = self._worker_devices if parameter_devices is None else tuple(parameter_devices)

    def bind(self, strategy: Any) -> None:
        """Become the extended part of `strategy`, which calls this once when it is made."""
        self._strategy = strategy

    @property
    def cross_device_ops(self) -> CrossDeviceOps:
        """How the components of values are combined."""
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
        """The devices that variables live on.

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
        """Whether shapes must stay the same from step to step: no."""
        return False

    @property
    def experimental_between_graph(self) -> bool:
        """Whether each process runs the program for its own replica: where there is more than one."""
        return self.communicator.size > 1

    @property
    def experimental_should_init(self) -> bool:
        """Whether this rank makes initial values: every one does, and those of replica 0 count."""
        return True

    @property
    def should_checkpoint(self) -> bool:
        """Whether this rank is the one that writes checkpoints: replica 0."""
        return self.communicator.rank == 0

    @property
    def should_save_summary(self) -> bool:
        """Whether this rank is the one that writes logs: replica 0."""
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
        """Combine the components of a value, and leave the result on `destinations`. A collective call.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            How to combine.
        value : DistributedValues, IndexedSlices or array_like
            What; `CrossDeviceOps.reduce` says more about it, and what is returned and raised.
        destinations : DistributedValues, array, str, int or set
            Where the result is wanted.
        options : CommunicationOptions, optional
            Merged over those of the strategy.
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
        """Combine many values, each with a destination of its own, as one batch. A collective call.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            How to combine.
        value_destination_pairs : iterable of 2-tuples
            Values and destinations; `CrossDeviceOps.batch_reduce` says more about them, and what is returned and raised.
        options : CommunicationOptions, optional
            Merged over those of the strategy.
        experimental_hints : CommunicationOptions, optional
            The old name of `options`; deprecated.
        """
        with self.in_scope("batch_reduce_to"):
            wanted = merge_hints(options, experimental_hints)
            return self._cross_device_ops.batch_reduce(reduce_op, value_destination_pairs, wanted)

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """Copy a value to `destinations`. A collective call: see `CrossDeviceOps.broadcast`."""
        with self.in_scope("broadcast_to"):
            return self._cross_device_ops.broadcast(tensor, destinations)

    def all_reduce(self, op: ReduceOp, arrays: list[Any], options: CommunicationOptions | None = None) -> list[Any]:
        """Combine arrays and slices of this rank with those of the others, in either context. A collective call.

        Raises
        ------
        UnsupportedDtypeError
            If booleans are to be summed.
        """
        if op is ReduceOp.SUM and _BOOL in map(_DTYPE, arrays):
            self._refuse_booleans(op, arrays, options)
        if self.uses_default_ops and not any(isinstance(array, IndexedSlices) for array in arrays):
            return self.communicator.all_reduce(op, arrays, options)
        with enter_or_assert_strategy(self._strategy):
            return self._cross_device_ops.all_reduce_in_replica(op, arrays, options)

    def start_all_reduce(
        self, op: ReduceOp, arrays: list[Any], options: CommunicationOptions | None = None, structure: object = None
    ) -> Work[list[Any]]:
        """Start what `all_reduce` does, unless that is for cross-device ops: then the handle has ended. A collective call."""
        if self.uses_default_ops and not any(isinstance(array, IndexedSlices) for array in arrays):
            return self.communicator.start_all_reduce(op, arrays, options, structure=structure)
        self.communicator.note(f"start_all_reduce({op.name}) of {structure}", options)
        return Work.ended(self.all_reduce(op, arrays, options))

    def all_gather(self, array: Array, axis: int, options: CommunicationOptions | None = None) -> Any:
        """Concatenate the arrays of all ranks along `axis`, outside ``strategy.run``. A collective call."""
        if self.uses_default_ops:
            return self.communicator.all_gather(array, axis, options)
        value = PerReplica(array)
        with enter_or_assert_strategy(self._strategy):
            whole = self._cross_device_ops.gather_implementation(value, value, axis, options or CommunicationOptions())
        return select_replica(whole)

    def call_for_each_replica(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Return ``strategy.run(fn, args, kwargs)``: the name that it once had."""
        return self._strategy.run(fn, args, kwargs)

    def update(
        self,
        var: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call ``fn(variable, *args, **kwargs)`` for the component of a variable that this rank holds.

        In `fn` the variable is its component: what is assigned changes this rank's array, without communication, so the
        arguments must be equal on all replicas for the variable to stay mirrored. Inside ``strategy.run`` this is a
        `merge_call`. All ranks make the call, which is compared with the next collective.

        Parameters
        ----------
        var : Variable
            The variable to change.
        fn : callable
            What to do to it.
        args, kwargs : sequence, mapping
            Mirrored values in them are replaced by their component, plain values are passed as they are. So are per-replica
            values, for a variable that is synchronized ON_READ.
        group : bool
            Whether the results are of no interest: then None is returned.

        Returns
        -------
        None or nest of list
            What `fn` returned, in place of each leaf a list of those that this rank holds: one.

        Raises
        ------
        TypeError
            If `var` is not a variable, or an argument is a per-replica value and the arrays of `var` are to stay equal, or an
            argument is a value that only some replicas have.
        AgreementError
            On the other ranks where one rank is refused: from the next collective.
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
        """Call ``fn(*args, **kwargs)``, to change state of an optimiser that belongs to no variable.

        Parameters
        ----------
        colocate_with : object
            What `non_slot_devices` returned: where the state is.
        fn : callable
            What to do.
        args, kwargs : sequence, mapping
            As for `update`.
        group : bool
            As for `update`, which says what is returned too.

        Raises
        ------
        RuntimeError
            If called inside ``strategy.run``.
        TypeError
            If an argument is a per-replica value, or one that only some replicas have.
        AgreementError
            On the other ranks where one rank is refused: from the next collective.
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
        """Return where state of an optimiser lives that belongs to none of these variables: where they live."""
        return self._parameter_devices

    def read_var(self, v: Any) -> Any:
        """Return a copy of the array of a variable, combined where it is synchronized on reading. A collective call then.

        Raises
        ------
        RuntimeError
            If called inside ``strategy.run``.
        """
        with self.in_scope("read_var"):
            return v.read().copy()  # what is assigned later does not change it

    def value_container(self, value: Any) -> Any:
        """Return the distributed value, a variable for example, whose `values` `value` came from; else `value` itself."""
        return container_of(value)

    def variable_created_in_scope(self, v: Any) -> bool:
        """Return whether a variable was made in the scope of this very strategy."""
        return getattr(v, "distribute_strategy", None) is self._strategy

    @contextmanager
    def colocate_vars_with(self, colocate_with_variable: Any) -> Iterator[None]:
        """Make new variables where a variable is; on a rank all are in one place.

        Raises
        ------
        RuntimeError
            On entering, outside the strategy's scope.
        InvalidArgumentError
            On entering, if the variable was not made under this strategy.
        """
        if current().strategy is not self._strategy:
            raise misplaced("strategy.extended.colocate_vars_with", "in the strategy's scope", *ADVICE["colocate_vars_with"])
        self.require_cross_replica("strategy.extended.colocate_vars_with")
        if not self.variable_created_in_scope(colocate_with_variable):
            raise InvalidArgumentError(
                f"{colocate_with_variable!r} was not made in the scope of {self._strategy!r}: variables can be made with those "
                "of the same strategy only"
            )
        yield

    def require_cross_replica(self, call: str) -> None:
        """Check that this is not inside ``strategy.run``.

        Raises
        ------
        RuntimeError
            If it is, or if another strategy is current; `call` is what was called, as the user writes it.
        """
        if in_replica_context_of(self._strategy, call):
            raise misplaced(call, "in cross-replica context", *ADVICE[call.rpartition(".")[2]])

    @contextmanager
    def in_scope(self, method: str) -> Iterator[None]:
        """Enter the strategy's scope, if need be, for a method of its extended part."""
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
                f"the default strategy has no {name}: it stands for plain code, wherever that runs.\n"
                f"    incorrect:  mpistrat.get_strategy().extended.{name}, outside all scopes\n"
                f"    correct:    mpistrat.OneDeviceStrategy().extended.{name}"
            )


def _check_update(var: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> None:
    if not hasattr(var, "update_component"):
        raise TypeError(f"extended.update changes a mpistrat.Variable; got {var!r}")
    # what is combined when it is read may be changed by what differs
    _check_mirrored(args, kwargs, may_differ=isinstance(var.across_replicas(), PerReplica))


def _check_mirrored(args: Sequence[Any], kwargs: Mapping[str, Any] | None, *, may_differ: bool = False) -> None:
    for leaf in flatten((tuple(args), dict(kwargs or {})))[0]:
        if isinstance(leaf, OnSomeReplicas):
            raise TypeError(
                f"extended.update got {leaf!r}, but every replica makes the change: reduce the value to the variable.\n"
                '    incorrect:  extended.update(variable, fn, args=(extended.reduce_to("sum", value, "rank:0"),))\n'
                '    correct:    extended.update(variable, fn, args=(extended.reduce_to("sum", value, variable),))'
            )
        if isinstance(leaf, PerReplica) and not may_differ:
            raise TypeError(
                f"extended.update got {leaf!r}, which differs between replicas, and so would the variable: reduce it first.\n"
                "    incorrect:  strategy.extended.update(variable, fn, args=(strategy.run(gradient),))\n"
                '    correct:    total = strategy.reduce("sum", strategy.run(gradient), axis=None); '
                "strategy.extended.update(variable, fn, args=(total,))"
            )


def _results(result: Any, group: bool) -> Any:
    return None if group else map_leaves(lambda leaf: [leaf], result)
