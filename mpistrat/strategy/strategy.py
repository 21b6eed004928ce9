"""Strategy: how one program runs on many replicas."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from mpistrat.arrays import Array, array_module, as_array, as_operand, like
from mpistrat.communicator.explain import Explanation
from mpistrat.communicator.interface import BaseCommunicator
from mpistrat.communicator.local import LocalCommunicator
from mpistrat.communicator.options import CommunicationOptions, check_options
from mpistrat.communicator.sparse import IndexedSlices, gather_refused
from mpistrat.communicator.validate import check_gather
from mpistrat.context.input_context import InputContext, ValueContext
from mpistrat.context.stack import Mode, StrategyScope, default_mode
from mpistrat.context.values import across_replicas, regroup, select_replica
from mpistrat.errors import InvalidArgumentError
from mpistrat.execution.memory import MemoryReport
from mpistrat.inputs.distribute import distribute_dataset, distribute_from_function
from mpistrat.reduction import ReduceOp
from mpistrat.strategy import deprecated
from mpistrat.strategy.axis_reduction import check_ambiguous, reduce_locally
from mpistrat.strategy.deprecated import merge_hints
from mpistrat.strategy.extended import StrategyExtended
from mpistrat.strategy.replica_context import ReplicaContext
from mpistrat.strategy.run_options import RunOptions
from mpistrat.structures import flatten, rebuild

__all__ = ["Strategy"]


class Strategy:
    """Runs one program on many replicas. One rank is one replica.

    Parameters
    ----------
    extended : StrategyExtended
        How it communicates; the strategies of this package make theirs themselves.
    """

    _accepts_per_replica = False  # whether `distribute_datasets_from_function` accepts InputReplicationMode.PER_REPLICA

    def __init__(self, extended: StrategyExtended) -> None:
        self._extended = extended
        extended.bind(self)
        self.replica_context = ReplicaContext(self, extended.communicator.rank)
        self.cross_replica_mode = Mode(self)

    @property
    def extended(self) -> StrategyExtended:
        """The part for authors of strategies and libraries."""
        return self._extended

    @property
    def communicator(self) -> BaseCommunicator:
        """What the strategy communicates through: the verbs on plain arrays, in either context. Not in TensorFlow.

        A `mpistrat.Communicator` where there are several replicas; one of a single replica has the same verbs. What is called
        here counts as a collective of the strategy, so all replicas call it, in the same order.
        """
        return self._extended.communicator

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas whose values are combined."""
        return self._extended.communicator.size

    @property
    def rank(self) -> int:
        """The number of this replica, 0 … `num_replicas_in_sync` - 1 over all nodes. Not in TensorFlow."""
        return self._extended.communicator.rank

    @property
    def local_rank(self) -> int:
        """The position of this replica among those of its node, from 0. Not in TensorFlow."""
        return self._extended.communicator.world.place(self.rank).local_rank

    @property
    def node_rank(self) -> int:
        """The number of the node of this replica, from 0; virtual nodes count. Not in TensorFlow."""
        return self._extended.communicator.world.place(self.rank).node_index

    @property
    def is_chief(self) -> bool:
        """Whether this is the replica that prints, logs and saves, one of all. Not in TensorFlow."""
        return self._extended.should_checkpoint

    @property
    def array_module(self) -> Any:
        """The namespace of the arrays that replicas compute on: CuPy on GPUs, NumPy elsewhere. Not in TensorFlow."""
        return array_module()

    @property
    def cluster_resolver(self) -> Any:
        """Where the roles of the tasks come from; None where there are no roles."""
        return None

    def scope(self) -> StrategyScope:
        """Return a context manager in which this strategy is the current one, and variables become its variables.

        Entering it communicates nothing, and selects no device: a rank is bound to its own when it starts.

        Raises
        ------
        RuntimeError
            On entering, if another strategy is current, or inside `run`. On leaving, if it is left out of order.
        """
        default = default_mode()
        return StrategyScope(default if default.strategy is self else self.cross_replica_mode)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Call `fn` once on each replica, in its replica context.

        Parameters
        ----------
        fn : callable
            What each replica computes. This rank calls it once, for its own replica.
        args, kwargs : list or tuple, mapping
            Passed on; distributed values in them, at any depth, are replaced by the component of this replica. Variables
            are passed whole.
        options : RunOptions, optional
            Without effect; accepted because programs for TensorFlow pass it.

        Returns
        -------
        nest
            What `fn` returned, each leaf a per-replica value; with one replica, just what it returned.

        Raises
        ------
        InvalidArgumentError
            If `args` is neither a list nor a tuple.
        TypeError
            If `options` are not RunOptions.
        RuntimeError
            If called inside `run`, or in the scope of another strategy.
        """
        if not isinstance(args, (list, tuple)):
            raise InvalidArgumentError(f"args must be a list or tuple, for example args=(batch,); got {type(args).__name__}")
        if not isinstance(options, (RunOptions, type(None))):
            raise TypeError(f"options must be a mpistrat.RunOptions or None; got {options!r}")
        with self.replica_context:
            result = fn(*select_replica(args), **select_replica(dict(kwargs or {})))
        return regroup(result, self.num_replicas_in_sync)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the components that this rank holds, a tuple of one; a plain value is its own component.

        Raises
        ------
        RuntimeError
            If called inside `run`, or in the scope of another strategy.
        """
        self._extended.require_cross_replica("strategy.experimental_local_results")
        return (select_replica(across_replicas(value)),)

    def local(self, value: Any) -> Any:
        """Return the component of this replica, of each leaf of a nest; a plain value is its own. Not in TensorFlow.

        Sends nothing, so one rank may ask alone. Inside `run` too; of a variable synchronized ON_READ it is the array of this
        replica, any other variable is returned as it is.
        """
        return select_replica(across_replicas(value))

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        axis: int | Sequence[int] | None,
        options: CommunicationOptions | None = None,
        *,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """Combine a per-replica value to plain arrays, which every rank receives.

        A collective call.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            SUM or MEAN, and with ``axis=None`` also MIN, MAX or PROD; in any case.
        value : nest of per-replica values
            The leaves are reduced together. A leaf that is not a distributed value is what this rank passes: MEAN, MIN and MAX
            combine the ranks' values; SUM and PROD are refused on every rank, unless it is zero on all. Of a mirrored value
            the mean, minimum and maximum are itself, and sums are refused likewise.
        axis : int, sequence of int, or None
            Axes to reduce each component over first. The mean is exact then: the sum over all replicas divided by the
            number of elements on all replicas, so replicas with fewer or no rows weigh as they should. Booleans are counted,
            as NumPy does; across replicas, with ``axis=None``, they have neither sum nor mean.
        options : CommunicationOptions, optional
            Merged over those of the strategy. Not in TensorFlow.
        experimental_hints : CommunicationOptions, optional
            The old name of `options`; deprecated.

        Returns
        -------
        nest of array
            Arrays of the kinds that came in: NumPy for NumPy, PyTorch for PyTorch. Of slices, slices.

        Raises
        ------
        RuntimeError
            If called inside `run`, or in the scope of another strategy.
        TypeError
            If `reduce_op` is neither ReduceOp nor str, or `axis` of another type.
        InvalidArgumentError
            If the operation is unknown, an axis is out of range, the sum is ambiguous, or `options` are of another type.
        UnsupportedDtypeError
            If a component is not an array, or the operation is not defined for its dtype.
        NotImplementedError
            If slices are to be reduced over axes, or otherwise than by SUM or MEAN.
        AgreementError
            On every rank, if ranks pass different structures, shapes, dtypes, axes or operations, or did so in an earlier call.
        """
        self._extended.require_cross_replica("strategy.reduce")
        communicator = self._extended.communicator
        leaves, structure = flatten(across_replicas(value))
        wanted = merge_hints(options, experimental_hints)
        try:
            check_options(wanted)
            op = ReduceOp.parse(reduce_op)
            part = reduce_locally(op, leaves, axis, communicator.size)
        except Exception as error:  # whatever the user's arrays raise when they are read, the other ranks must learn of it
            communicator.refuse("reduce", error, wanted)
        call = f"reduce({op.name}, axis={axis!r}) of {structure}, {len(part.sent)} arrays to combine"
        communicator.note(call, wanted)
        check_ambiguous(part, communicator, wanted)
        totals = part.finish(self._extended.all_reduce(part.op, part.sent, wanted))
        communicator.confirm()
        return rebuild(structure, [like(*pair) for pair in zip(totals, select_replica(leaves), strict=True)])

    def gather(
        self,
        value: Any,
        axis: int,
        options: CommunicationOptions | None = None,
        *,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """Concatenate the components of a per-replica value along an axis, in replica order; every rank receives the result.

        A collective call.

        Parameters
        ----------
        value : nest of per-replica values
            Components have at least one axis, and agree in all extents but that of `axis`. The component of a leaf that is
            not a distributed value is what this rank passes.
        axis : int
            Where to concatenate.
        options : CommunicationOptions, optional
            Merged over those of the strategy. Not in TensorFlow.
        experimental_hints : CommunicationOptions, optional
            The old name of `options`; deprecated.

        Raises
        ------
        RuntimeError
            If called inside `run`, or in the scope of another strategy.
        InvalidArgumentError
            If a component has no such axis, other extents differ, or `options` are of another type.
        NotImplementedError
            If a component is IndexedSlices.
        AgreementError
            On every rank, if ranks pass different structures, dtypes or axes.
        """
        self._extended.require_cross_replica("strategy.gather")
        communicator = self._extended.communicator
        leaves, structure = flatten(across_replicas(value))
        wanted = merge_hints(options, experimental_hints)
        try:
            check_options(wanted)
            arrays = [_gatherable(leaf, axis) for leaf in leaves]
        except Exception as error:  # as in `reduce`
            communicator.refuse("gather", error, wanted)
        communicator.note(f"gather(axis={axis}) of {structure}", wanted)
        results = [self._extended.all_gather(array, axis, wanted) for array in arrays]
        return rebuild(structure, [like(*pair) for pair in zip(results, select_replica(leaves), strict=True)])

    def broadcast(self, value: Any, root: int = 0, options: CommunicationOptions | None = None) -> Any:
        """Return the value of replica `root` as plain arrays, on every rank. Not in TensorFlow.

        A collective call.

        Parameters
        ----------
        value : nest of array_like
            The same structure on all ranks; only the shapes and dtypes of `root` count.
        root : int
            The replica whose value it is.
        options : CommunicationOptions, optional
            Merged over those of the strategy.

        Raises
        ------
        RuntimeError
            If called inside `run`, or in the scope of another strategy.
        InvalidArgumentError
            If `root` is not a replica.
        UnsupportedDtypeError
            If a leaf is not an array of numbers.
        """
        self._extended.require_cross_replica("strategy.broadcast")
        with self.replica_context as context:
            return context.broadcast(select_replica(value), root, options)

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Iterable[Any]:
        """Return the dataset whose elements are split over the replicas: global batches in, per-replica batches out.

        A collective call: all ranks must describe the same data, or they would not end together.

        Parameters
        ----------
        dataset : ArrayDataset or iterable
            Batched with the global batch size. The default strategy returns it as it is.
        options : InputOptions, optional
            How it is shared out, and how far to read ahead.

        Raises
        ------
        RuntimeError
            If called inside `run`, or in the scope of another strategy.
        TypeError
            If it is not a dataset.
        NotImplementedError
            If the options ask for replication PER_REPLICA.
        """
        self._extended.require_cross_replica("strategy.experimental_distribute_dataset")
        if hasattr(dataset, "distribute") and default_mode().strategy is not self:
            shared: Iterable[Any] = dataset.distribute(self, options)
            return shared
        return distribute_dataset(self, dataset, options)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: Any = None
    ) -> Iterable[Any]:
        """Return the dataset whose elements are those of ``dataset_fn(context)``, which every rank calls once.

        A collective call. Nothing is split: the function batches with the size of a replica's batch, and takes its shard.

        Parameters
        ----------
        dataset_fn : callable
            Takes an `InputContext`, which says which input pipeline it makes and for how many replicas; returns a dataset.
        options : InputOptions, optional
            How far to read ahead.

        Raises
        ------
        RuntimeError
            If called inside `run`, or in the scope of another strategy.
        TypeError
            If the function does not return a dataset.
        NotImplementedError
            If the options ask for replication PER_REPLICA, and this is not a MirroredStrategy.
        """
        self._extended.require_cross_replica("strategy.distribute_datasets_from_function")
        return distribute_from_function(self, dataset_fn, options, accepts_per_replica=self._accepts_per_replica)

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Return per-replica values whose components ``value_fn(context)`` returns, which every rank calls once.

        Parameters
        ----------
        value_fn : callable
            Takes a `ValueContext`, which says for which replica it is called; returns a nest.

        Returns
        -------
        nest
            Each leaf a per-replica value; with one replica, just what `value_fn` returned.

        Raises
        ------
        RuntimeError
            If called inside `run`, or in the scope of another strategy.
        """
        self._extended.require_cross_replica("strategy.experimental_distribute_values_from_function")
        communicator = self._extended.communicator
        return regroup(value_fn(ValueContext(communicator.rank, communicator.size)), communicator.size)

    def explain(self, value: Any, options: CommunicationOptions | None = None) -> Explanation:
        """Explain what an all-reduce of a value does: packs, plans, bytes, predicted times and the last one measured.

        Sends nothing, in either context. Not in TensorFlow.

        Parameters
        ----------
        value : nest of array_like or per-replica values
            What would be summed or averaged; of values with a component per replica that of this rank counts.
        options : CommunicationOptions, optional
            Merged over those of the strategy.

        Returns
        -------
        Explanation
            Print it.

        Raises
        ------
        InvalidArgumentError
            If `options` are of another type, or ask for what cannot be done.
        UnsupportedDtypeError
            If a leaf is not an array, or its dtype cannot be added.
        RuntimeError
            If the strategy was closed.
        """
        check_options(options)
        leaves = flatten(select_replica(value))[0]
        return self._extended.communicator.explain([as_array(leaf) for leaf in leaves], options)

    def memory_report(self) -> MemoryReport:
        """Return what this rank holds to communicate: windows, scratch memory and plans, in bytes. Not in TensorFlow.

        No collective call. What is held is allocated by the first calls of a kind, and kept until `close`.

        Returns
        -------
        MemoryReport
            Printed, it is one line.

        Raises
        ------
        RuntimeError
            If the strategy was closed.
        """
        return self._extended.communicator.memory_report()

    def close(self) -> None:
        """Free the strategy's communicators and shared memory.

        A collective call. Afterwards what would communicate raises RuntimeError; closing again does nothing. Programs
        that end anyway need not call it. The default strategy holds nothing, and stays open.

        Raises
        ------
        RuntimeError
            If called inside `run`, or in the scope of another strategy.
        """
        self._extended.require_cross_replica("strategy.close")
        if default_mode().strategy is not self:
            self._extended.communicator.close(owner=repr(self))

    # names of TensorFlow 1, and spellings that have been replaced
    unwrap = deprecated.unwrap
    group = deprecated.group
    configure = deprecated.configure
    update_config_proto = deprecated.update_config_proto
    experimental_run = deprecated.experimental_run
    make_dataset_iterator = deprecated.make_dataset_iterator
    make_input_fn_iterator = deprecated.make_input_fn_iterator
    experimental_make_numpy_dataset = deprecated.experimental_make_numpy_dataset
    experimental_distribute_datasets_from_function = deprecated.experimental_distribute_datasets_from_function
    colocate_vars_with = deprecated.colocate_vars_with

    def __copy__(self) -> NoReturn:
        raise RuntimeError(
            f"{self!r} cannot be copied: both copies would share one extended part, which belongs to one strategy.\n"
            "    incorrect:  copy.copy(strategy)\n"
            "    correct:    copy.deepcopy(strategy), for a strategy of one device; or a new strategy"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        is_default = default_mode().strategy is self
        if is_default:
            return self  # there is one
        if not isinstance(self._extended.communicator, LocalCommunicator):
            raise InvalidArgumentError(
                f"{self!r} cannot be copied: the copy would communicate in the same groups, and ranks would meet in the wrong "
                "calls. Make a new strategy on all ranks."
            )
        copied: Strategy = object.__new__(type(self))
        memo[id(self)] = copied
        vars(copied).update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return copied

    def __repr__(self) -> str:
        ops = self._extended.communicator
        return f"{type(self).__name__}(replica={ops.rank}({ops.size}), world={ops.world.shape})"


def _gatherable(leaf: Any, axis: int) -> Array:
    component = select_replica(leaf)
    if isinstance(component, IndexedSlices):
        raise gather_refused(component)
    array = as_operand(component)
    check_gather(array, axis)
    return array
