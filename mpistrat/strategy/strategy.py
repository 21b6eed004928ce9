"""Strategy: runs one program on many replicas, as in tf.distribute."""

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
from mpistrat.structures import flatten

__all__ = ["Strategy"]


class Strategy:
    """Runs one program on many replicas. One rank is one replica.

    Parameters
    ----------
    extended : StrategyExtended
        The part that communicates; the subclasses of this package create it themselves.
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
        """The communicator of the strategy: collectives on arrays, in either context. Not in TensorFlow.

        A `mpistrat.Communicator`, or with a single replica an object with the same methods. Its collectives count as those of
        the strategy: all replicas make the same calls, in the same order.
        """
        return self._extended.communicator

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas."""
        return self._extended.communicator.size

    @property
    def rank(self) -> int:
        """The index of this replica over all nodes, from 0 to `num_replicas_in_sync` - 1. Not in TensorFlow."""
        return self._extended.communicator.rank

    @property
    def local_rank(self) -> int:
        """The index of this replica among those of its node, from 0. Not in TensorFlow."""
        return self._extended.communicator.world.place(self.rank).local_rank

    @property
    def node_rank(self) -> int:
        """The index of this replica's node, from 0; with virtual nodes the index of the virtual node. Not in TensorFlow."""
        return self._extended.communicator.world.place(self.rank).node_index

    @property
    def is_chief(self) -> bool:
        """Whether this replica prints, logs and saves: True on one replica. Not in TensorFlow."""
        return self._extended.should_checkpoint

    @property
    def array_module(self) -> Any:
        """The array library that replicas compute with: CuPy on GPUs, NumPy elsewhere. Not in TensorFlow."""
        return array_module()

    @property
    def cluster_resolver(self) -> Any:
        """Defines the task of each rank; None if the ranks have no tasks."""
        return None

    def scope(self) -> StrategyScope:
        """Return a context manager in which this strategy is current, and in which its variables are created.

        Entering it does not communicate, nor select a device: each rank is bound to its device when it starts.

        Raises
        ------
        RuntimeError
            On entering, if another strategy is current, or inside `run`. On exit, if an inner scope has not been left.
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
            The function. This rank calls it once, for its own replica.
        args, kwargs : list or tuple, mapping
            Arguments of `fn`. Distributed values in them, at any depth, are replaced by the component of this replica;
            variables are passed unchanged.
        options : RunOptions, optional
            Without effect; accepted for compatibility with TensorFlow.

        Returns
        -------
        nest
            What `fn` returned, with each leaf as a per-replica value; with one replica, unchanged.

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
        """Return the components on this rank, a tuple of one; a value that is not distributed is its own component.

        Raises
        ------
        RuntimeError
            If called inside `run`, or in the scope of another strategy.
        """
        self._extended.require_cross_replica("strategy.experimental_local_results")
        return (select_replica(across_replicas(value)),)

    def local(self, value: Any) -> Any:
        """Return the component of this replica for each leaf of a nest. Not in TensorFlow.

        Not a collective call: one rank may call it alone, also inside `run`. A leaf that is not a distributed value is its own
        component. For a variable synchronized ON_READ the array of this replica is returned, any other variable unchanged.
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
        """Reduce a per-replica value over all replicas; every rank receives the result as plain arrays.

        A collective call.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            SUM or MEAN, and with ``axis=None`` also MIN, MAX or PROD; case does not matter.
        value : nest of per-replica values
            The leaves are reduced together. A leaf that is not a distributed value is the component that this rank passes:
            MEAN, MIN and MAX reduce the ranks' values; SUM and PROD are ambiguous, and refused on every rank unless it is zero
            on all. The mean, minimum and maximum of a mirrored value are the value itself; SUM and PROD are refused likewise.
        axis : int, sequence of int, or None
            Axes to reduce each component over first. MEAN then divides the sum over all replicas by the number of elements on
            all replicas, so replicas with fewer or no rows have the right weight. Booleans are counted, as in NumPy; with
            ``axis=None`` SUM and MEAN are not defined for them.
        options : CommunicationOptions, optional
            Take precedence over those of the strategy. Not in TensorFlow.
        experimental_hints : CommunicationOptions, optional
            The old name of `options`; deprecated.

        Returns
        -------
        nest of array
            Arrays of the library that the components belong to: NumPy for NumPy, PyTorch for PyTorch. IndexedSlices for
            IndexedSlices.

        Raises
        ------
        RuntimeError
            If called inside `run`, or in the scope of another strategy.
        TypeError
            If `reduce_op` is neither ReduceOp nor str, or `axis` of another type.
        InvalidArgumentError
            If the operation is unknown, an axis is out of range, the sum is ambiguous, or `options` have another type.
        UnsupportedDtypeError
            If a component is not an array, or the operation is not defined for its dtype.
        NotImplementedError
            If a component is IndexedSlices, and an axis is given or the operation is neither SUM nor MEAN.
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
        except Exception as error:  # the other ranks must raise too, whatever reading the user's arrays raises
            communicator.refuse("reduce", error, wanted)
        call = f"reduce({op.name}, axis={axis!r}) of {structure}, {len(part.sent)} arrays to combine"
        communicator.note(call, wanted)
        check_ambiguous(part, communicator, wanted)
        totals = part.finish(self._extended.all_reduce(part.op, part.sent, wanted))
        communicator.confirm()
        return structure.unflatten([like(*pair) for pair in zip(totals, select_replica(leaves), strict=True)])

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
            Components have at least one axis, and the same shape except along `axis`. A leaf that is not a distributed value is
            the component that this rank passes.
        axis : int
            The axis to concatenate along.
        options : CommunicationOptions, optional
            Take precedence over those of the strategy. Not in TensorFlow.
        experimental_hints : CommunicationOptions, optional
            The old name of `options`; deprecated.

        Raises
        ------
        RuntimeError
            If called inside `run`, or in the scope of another strategy.
        InvalidArgumentError
            If a component has no such axis, shapes differ along another one, or `options` have another type.
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
        return structure.unflatten([like(*pair) for pair in zip(results, select_replica(leaves), strict=True)])

    def broadcast(self, value: Any, root: int = 0, options: CommunicationOptions | None = None) -> Any:
        """Return the value of replica `root` as plain arrays, on every rank. Not in TensorFlow.

        A collective call.

        Parameters
        ----------
        value : nest of array_like
            The same structure on all ranks; shapes and dtypes are those of `root`.
        root : int
            The replica whose value is returned.
        options : CommunicationOptions, optional
            Take precedence over those of the strategy.

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
        """Return a dataset that splits each global batch of `dataset` over the replicas.

        A collective call: all ranks must pass the same data, so that they reach its end together.

        Parameters
        ----------
        dataset : ArrayDataset or iterable
            Batched with the global batch size. The default strategy returns it unchanged.
        options : InputOptions, optional
            How batches are split, and how many are prefetched.

        Raises
        ------
        RuntimeError
            If called inside `run`, or in the scope of another strategy.
        TypeError
            If it is not a dataset, or the options are not InputOptions.
        NotImplementedError, InvalidArgumentError
            If the options ask for replication PER_REPLICA; if the dataset cannot be sharded by their policy.
        AgreementError
            If ranks pass different datasets or policies, or one of them raises: on all others.
        """
        self._extended.require_cross_replica("strategy.experimental_distribute_dataset")
        if hasattr(dataset, "distribute") and default_mode().strategy is not self:
            shared: Iterable[Any] = dataset.distribute(self, options)
            return shared
        return distribute_dataset(self, dataset, options)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: Any = None
    ) -> Iterable[Any]:
        """Return a distributed dataset with the batches of ``dataset_fn(context)``, which every rank calls once.

        A collective call. Batches are not split: the function takes its shard of the data, and batches it with the batch size
        of one replica.

        Parameters
        ----------
        dataset_fn : callable
            Takes an `InputContext`, with the index of the input pipeline and the number of replicas; returns a dataset.
        options : InputOptions, optional
            How many batches are prefetched.

        Raises
        ------
        RuntimeError
            If called inside `run`, or in the scope of another strategy.
        TypeError
            If the function does not return a dataset, or the options are not InputOptions.
        NotImplementedError
            If the options ask for replication PER_REPLICA, and this is not a MirroredStrategy.
        """
        self._extended.require_cross_replica("strategy.distribute_datasets_from_function")
        return distribute_from_function(self, dataset_fn, options, accepts_per_replica=self._accepts_per_replica)

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Return per-replica values; the component of this replica is ``value_fn(context)``, which every rank calls once.

        Parameters
        ----------
        value_fn : callable
            Takes a `ValueContext`, with the index of the replica; returns a nest.

        Returns
        -------
        nest
            Each leaf as a per-replica value; with one replica, what `value_fn` returned, unchanged.

        Raises
        ------
        RuntimeError
            If called inside `run`, or in the scope of another strategy.
        """
        self._extended.require_cross_replica("strategy.experimental_distribute_values_from_function")
        communicator = self._extended.communicator
        return regroup(value_fn(ValueContext(communicator.rank, communicator.size)), communicator.size)

    def explain(self, value: Any, options: CommunicationOptions | None = None) -> Explanation:
        """Explain how a value would be all-reduced: packs, plans, bytes, predicted times and the last measured time.

        Not a collective call; works in either context. Not in TensorFlow.

        Parameters
        ----------
        value : nest of array_like or per-replica values
            The value to sum or average; for a per-replica value, the component of this rank is used.
        options : CommunicationOptions, optional
            Take precedence over those of the strategy.

        Returns
        -------
        Explanation
            Print it.

        Raises
        ------
        InvalidArgumentError
            If `options` have another type, or cannot be fulfilled.
        UnsupportedDtypeError
            If a leaf is not an array, or SUM is not defined for its dtype.
        RuntimeError
            If the strategy was closed.
        """
        check_options(options)
        leaves = flatten(select_replica(value))[0]
        return self._extended.communicator.explain([as_array(leaf) for leaf in leaves], options)

    def memory_report(self) -> MemoryReport:
        """Return the memory that this rank uses for communication: windows, scratch memory and plans. Not in TensorFlow.

        Not a collective call. The memory is allocated by the first calls with arrays of some shapes, and kept until `close`.

        Returns
        -------
        MemoryReport
            Sizes in bytes; its text is one line.

        Raises
        ------
        RuntimeError
            If the strategy was closed.
        """
        return self._extended.communicator.memory_report()

    def close(self) -> None:
        """Free the strategy's communicators and shared memory.

        A collective call. Later collectives raise RuntimeError; closing again does nothing. It need not be called at the end of
        a program. It has no effect on the default strategy.

        Raises
        ------
        RuntimeError
            If called inside `run`, or in the scope of another strategy.
        """
        self._extended.require_cross_replica("strategy.close")
        if default_mode().strategy is not self:
            self._extended.communicator.close(owner=repr(self))

    # deprecated names
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
            f"{self!r} cannot be copied: the copies would share strategy.extended, which belongs to one strategy.\n"
            "    incorrect:  copy.copy(strategy)\n"
            "    correct:    copy.deepcopy(strategy), for a strategy of one device; or a new strategy"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        is_default = default_mode().strategy is self
        if is_default:
            return self  # there is only one
        if not isinstance(self._extended.communicator, LocalCommunicator):
            raise InvalidArgumentError(
                f"{self!r} cannot be copied: collectives of the copy and of the original would mix in the same communicators. "
                "Create a new strategy on all ranks."
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
