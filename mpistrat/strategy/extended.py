"""StrategyExtended: what all strategies share, for authors of strategies and libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from mpistrat.arrays import Array
from mpistrat.communicator.base import Communicator
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.communicator.sparse import IndexedSlices
from mpistrat.context.stack import default_mode, enter_or_assert_strategy
from mpistrat.context.values import PerReplica, select_replica
from mpistrat.cross_device.all_reduce import HierarchicalAllReduce
from mpistrat.cross_device.ops import CrossDeviceOps
from mpistrat.device.binding import own_device
from mpistrat.errors import UnsupportedDtypeError
from mpistrat.execution.work import Work
from mpistrat.reduction import ReduceOp, check_meaning
from mpistrat.strategy.deprecated import hinted
from mpistrat.strategy.variable_updates import VariableUpdates

__all__ = ["StrategyExtended"]

_BOOL, _DTYPE = np.dtype(bool), attrgetter("dtype")


class StrategyExtended(VariableUpdates):
    """How a strategy communicates, and what it says about its devices and roles. Each strategy has one of its own.

    Parameters
    ----------
    communicator : Communicator
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
        communicator: Communicator,
        cross_device_ops: CrossDeviceOps | None = None,
        worker_devices: Sequence[str] | None = None,
        parameter_devices: Sequence[str] | None = None,
    ) -> None:
        self.communicator = communicator
        self._cross_device_ops = cross_device_ops or HierarchicalAllReduce()
        # nothing to be asked for each reduction: the communicator does by itself what these ops would tell them to
        self.is_stock = type(self._cross_device_ops) is HierarchicalAllReduce and self._cross_device_ops.num_packs is None
        self._worker_devices = (own_device(),) if worker_devices is None else tuple(worker_devices)
        self._parameter_devices = self._worker_devices if parameter_devices is None else tuple(parameter_devices)

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
            return self._cross_device_ops.reduce(reduce_op, value, destinations, hinted(options, experimental_hints))

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
            wanted = hinted(options, experimental_hints)
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
        if self.is_stock and not any(isinstance(array, IndexedSlices) for array in arrays):
            return self.communicator.all_reduce(op, arrays, options)
        with enter_or_assert_strategy(self._strategy):
            return self._cross_device_ops.all_reduce_in_replica(op, arrays, options)

    def start_all_reduce(
        self, op: ReduceOp, arrays: list[Any], options: CommunicationOptions | None = None, structure: object = None
    ) -> Work[list[Any]]:
        """Start what `all_reduce` does, unless that is for cross-device ops: then the handle has ended. A collective call."""
        if self.is_stock and not any(isinstance(array, IndexedSlices) for array in arrays):
            return self.communicator.start_all_reduce(op, arrays, options, structure=structure)
        self.communicator.note(f"start_all_reduce({op.name}) of {structure}", options)
        return Work.ended(self.all_reduce(op, arrays, options))

    def all_gather(self, array: Array, axis: int, options: CommunicationOptions | None = None) -> Any:
        """Concatenate the arrays of all ranks along `axis`, outside ``strategy.run``. A collective call."""
        if self.is_stock:
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

    def _refuse_booleans(self, op: ReduceOp, arrays: list[Any], options: CommunicationOptions | None) -> None:
        try:
            for index, array in enumerate(arrays):
                check_meaning(op, array.dtype, f"array {index}")
        except UnsupportedDtypeError as error:
            self.communicator.refuse("all_reduce", error, options)

    def _require_devices(self, name: str) -> None:
        if default_mode().strategy is self._strategy:
            raise RuntimeError(
                f"the default strategy has no {name}: it stands for plain code, wherever that runs.\n"
                f"    incorrect:  mpistrat.get_strategy().extended.{name}, outside all scopes\n"
                f"    correct:    mpistrat.OneDeviceStrategy().extended.{name}"
            )
