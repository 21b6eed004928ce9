"""Strategy: runs one program on many replicas, as in tf.distribute; and those of one replica, the default one among them."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, SupportsIndex

from mpistrat import settings
from mpistrat.arrays import array_module, as_array, like
from mpistrat.communicator.explain import Explanation, MemoryReport
from mpistrat.communicator.interface import BaseCommunicator
from mpistrat.communicator.local import LocalCommunicator
from mpistrat.communicator.options import CommunicationOptions, check_options
from mpistrat.context.stack import EXAMPLES, Mode, StrategyScope, default_mode, register_default
from mpistrat.context.values import across_replicas, checked_args, component_of, in_replica, regroup, select_replica
from mpistrat.device.binding import own_device
from mpistrat.errors import InvalidArgumentError, LaunchError
from mpistrat.inputs.distribute import distribute_dataset, distribute_from_function
from mpistrat.inputs.input_options import InputContext, ValueContext
from mpistrat.launch.bootstrap import bind_device, what_is_bound
from mpistrat.launch.environment import LauncherView, detect
from mpistrat.reduction import ReduceOp
from mpistrat.strategy.deprecated import RunOptions, accepts_hints, with_old_names
from mpistrat.strategy.extended import StrategyExtended
from mpistrat.strategy.local_reduction import check_ambiguous, reduce_locally
from mpistrat.strategy.replica_context import ReplicaContext
from mpistrat.structures import flatten, map_leaves
from mpistrat.topology.world import parse_device, ranks_of


@with_old_names
class Strategy:
    """Runs one program on many replicas. One rank is one replica.

    `Communicator` documents the collectives. The options of a call override those of the strategy. Methods raise RuntimeError
    if they are called in the scope of another strategy; all but `run`, `local` and `explain` also inside `run`.
    """

    _accepts_per_replica = False  # whether `distribute_datasets_from_function` accepts InputReplicationMode.PER_REPLICA
    _cluster_resolver: Any = None

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
        return self._extended.communicator.local_rank

    @property
    def node_rank(self) -> int:
        """The index of this replica's node, from 0; with virtual nodes the index of the virtual node. Not in TensorFlow."""
        return self._extended.communicator.node

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
        return self._cluster_resolver

    def scope(self) -> StrategyScope:
        """Return a context manager in which this strategy is current, and in which its variables are created.

        Entering it does not communicate, nor select a device: each rank is bound to its device when it starts. It raises
        RuntimeError if another strategy is current, or inside `run`.
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
        """
        args = checked_args(args)
        if not isinstance(options, (RunOptions, type(None))):
            raise TypeError(f"options must be a mpistrat.RunOptions or None; got {options!r}")
        with self.replica_context:
            result = fn(*select_replica(args), **select_replica(dict(kwargs or {})))
        return regroup(result, self.num_replicas_in_sync)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the components on this rank, a tuple of one; a value that is not distributed is its own component."""
        self._extended.require_cross_replica("strategy.experimental_local_results")
        return (self.local(value),)

    def local(self, value: Any) -> Any:
        """Return the component of this replica for each leaf of a nest. Not in TensorFlow.

        Not a collective call: one rank may call it alone, also inside `run`. A leaf that is not a distributed value is its own
        component. For a variable synchronized ON_READ the array of this replica is returned, any other variable unchanged.
        """
        return map_leaves(component_of, value)

    @accepts_hints
    def reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        axis: int | Sequence[int] | None,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Reduce a per-replica value over all replicas; every rank receives the result as plain arrays. A collective call.

        As `Communicator.all_reduce`, but for these parameters.

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
            Override those of the strategy.

        Returns
        -------
        nest of array
            Arrays of the library that the components belong to: NumPy for NumPy, PyTorch for PyTorch. IndexedSlices for
            IndexedSlices, of which there are only SUM and MEAN with ``axis=None``.
        """
        self._extended.require_cross_replica("strategy.reduce")
        communicator = self._extended.communicator
        with communicator.refusing("reduce", options):
            leaves, structure = flatten(value)
            given = [across_replicas(leaf) for leaf in leaves]
            components = [in_replica(leaf) for leaf in given]
            check_options(options)
            op = ReduceOp.parse(reduce_op)
            part = reduce_locally(op, given, components, axis, communicator.size)
        call = f"reduce({op.name}, axis={axis!r}) of {structure}, {len(part.sent)} arrays to combine"
        communicator.note(call, options)
        check_ambiguous(part, communicator, options)
        totals = part.finish(self._extended.all_reduce(part.op, part.sent, options))
        communicator.confirm()
        return structure.unflatten([like(*pair) for pair in zip(totals, components, strict=True)])

    @accepts_hints
    def gather(self, value: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        """Concatenate the components of a per-replica value along an axis. As `Communicator.all_gather`. A collective call.

        A leaf that is not a distributed value is the component that this rank passes.
        """
        self._extended.require_cross_replica("strategy.gather")
        return self._extended.all_gather(value, axis, options, "gather")

    def broadcast(self, value: Any, root: int = 0, options: CommunicationOptions | None = None) -> Any:
        """Return the value of replica `root` as plain arrays, on every rank. As `Communicator.broadcast`. Not in TensorFlow.

        A collective call. The structure is the same on all ranks; shapes and dtypes are those of `root`.
        """
        self._extended.require_cross_replica("strategy.broadcast")
        return self._extended.broadcast(value, root, options)

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Iterable[Any]:
        """Return a dataset that splits each global batch of `dataset` over the replicas.

        A collective call: all ranks must pass the same data, so that they reach its end together.

        Parameters
        ----------
        dataset : ArrayDataset or iterable
            Batched with the global batch size. The default strategy returns it unchanged.
        options : InputOptions, optional
            How batches are split, and how many are prefetched. Replication PER_REPLICA is refused.
        """
        self._extended.require_cross_replica("strategy.experimental_distribute_dataset")
        return distribute_dataset(self, dataset, options)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: Any = None
    ) -> Iterable[Any]:
        """Return a distributed dataset with the batches of ``dataset_fn(context)``, which every rank calls once.

        A collective call. Batches are not split: the function batches its shard of the data with the batch size of a replica.

        Parameters
        ----------
        dataset_fn : callable
            Takes an `InputContext`, with the index of the input pipeline and the number of replicas; returns a dataset.
        options : InputOptions, optional
            How many batches are prefetched. Only MirroredStrategy accepts replication PER_REPLICA.
        """
        self._extended.require_cross_replica("strategy.distribute_datasets_from_function")
        return distribute_from_function(self, dataset_fn, options, accepts_per_replica=self._accepts_per_replica)

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Return per-replica values; the component of this replica is the nest ``value_fn(ValueContext(…))``."""
        self._extended.require_cross_replica("strategy.experimental_distribute_values_from_function")
        communicator = self._extended.communicator
        return regroup(value_fn(ValueContext(communicator.rank, communicator.size)), communicator.size)

    def explain(self, value: Any, options: CommunicationOptions | None = None) -> Explanation:
        """Explain how a value would be all-reduced: packs, plans, bytes, and times if they were measured.

        Not a collective call; works in either context. Print what it returns. Not in TensorFlow.
        """
        check_options(options)
        leaves = flatten(select_replica(value))[0]
        return self._extended.communicator.explain([as_array(leaf) for leaf in leaves], options)

    def memory_report(self) -> MemoryReport:
        """Return the memory that this rank uses for communication: windows, scratch memory and plans. Not in TensorFlow.

        Not a collective call. The memory is allocated by the first calls with arrays of some shapes, and kept until `close`.
        """
        return self._extended.communicator.memory_report()

    def close(self) -> None:
        """Free the strategy's communicators and shared memory.

        A collective call. Later collectives raise RuntimeError; closing again does nothing. It need not be called at the end of
        a program. It has no effect on the default strategy.
        """
        self._extended.require_cross_replica("strategy.close")
        if default_mode().strategy is not self:
            self._extended.communicator.close(owner=repr(self))

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
            why = "collectives of the copy and of the original would mix in the same communicators"
            raise InvalidArgumentError(f"{self!r} cannot be copied: {why}. Create a new strategy on all ranks.")
        copied: Strategy = object.__new__(type(self))
        memo[id(self)] = copied
        vars(copied).update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return copied

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        if default_mode().strategy is self:
            return _default_strategy, ()
        return super().__reduce_ex__(protocol)

    def __repr__(self) -> str:
        communicator = self._extended.communicator
        place = f"replica={communicator.rank}({communicator.size}), world={communicator.world.shape}"
        return f"{type(self).__name__}({place})"


class OneDeviceStrategy(Strategy):
    """Runs everything on this rank alone; does not start MPI, and ignores other ranks.

    Code for several replicas runs under it unchanged, which is useful for debugging.

    Parameters
    ----------
    device : str, optional
        The device that this process computes on: ``/cpu:0`` or ``/gpu:0``; by default that of MPISTRAT_DEVICE, a GPU if any.
    """

    def __init__(self, device: str | None = None) -> None:
        communicator = LocalCommunicator()
        if device is None or parse_device(device).kind == "GPU":
            bind_device(detect())  # as starting MPI does; a GPU that is already bound is kept
            bound = what_is_bound()
            if bound is not None and bound.problem:
                raise LaunchError(f"{bound.problem}. Set MPISTRAT_DEVICE=cpu to compute in host memory")
        ranks_of(own_device() if device is None else device, communicator.world)
        super().__init__(StrategyExtended(communicator))


_WITHOUT_COMMUNICATION = ("merge_call", "update")
_PACKAGE = str(Path(__file__).parents[1])


class DefaultReplicaContext(ReplicaContext):
    """The replica context of the default strategy, whose collectives return the value of this rank, as in TensorFlow.

    In a job of several ranks that is rarely intended: the first collective warns, and with MPISTRAT_STRICT every one raises.
    """

    _has_checked_peers = False

    def _require_current(self, method: str) -> None:
        super()._require_current(method)
        if self._has_checked_peers or method in _WITHOUT_COMMUNICATION:
            return
        view = detect()  # does not start MPI
        text = _text(method, view) if view is not None and view.has_peers else ""
        if text and settings.STRICT.read():
            raise RuntimeError(text)
        self._has_checked_peers = True
        if text:
            warnings.warn(text, UserWarning, stacklevel=_levels_to_user())


@register_default
def _default_mode() -> Mode:
    strategy = Strategy(StrategyExtended(LocalCommunicator()))
    strategy.replica_context = DefaultReplicaContext(strategy)
    return strategy.replica_context.mode


def _default_strategy() -> Any:
    """Return the default strategy of this process, for which that of another one stands in a pickle."""
    return default_mode().strategy


def _text(method: str, view: LauncherView) -> str:
    line = EXAMPLES[f"ctx.{method}"][0].partition("ctx.")[2]
    job = f"{view.size} ranks" if view.size else "several ranks"
    return (
        f"rank {view.rank}: ReplicaContext.{method} was called outside strategy.run, in a job of {job}. There it reduces "
        "nothing, as in TensorFlow: each rank gets its own value back.\n"
        f"    incorrect:  mpistrat.get_replica_context().{line}\n"
        f"    correct:    strategy.run(lambda: mpistrat.get_replica_context().{line}), of a strategy such as "
        "mpistrat.MultiWorkerMirroredStrategy()"
    )


def _levels_to_user() -> int:
    """Return the stacklevel at which the caller's warning names the innermost line outside this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    return level
