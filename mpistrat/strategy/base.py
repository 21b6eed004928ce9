"""Strategy: how one program runs on many replicas, and the default strategy of one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from mpistrat.arrays import array_module, as_array
from mpistrat.communicator.closed import ClosedCommunicator
from mpistrat.communicator.explain import Explanation
from mpistrat.communicator.local import LocalCommunicator
from mpistrat.communicator.options import CommunicationOptions, check_options
from mpistrat.context.stack import Mode, Scope, default_mode, register_default
from mpistrat.context.values import across_replicas, regroup, select_replica
from mpistrat.errors import InvalidArgumentError
from mpistrat.execution.memory import MemoryReport
from mpistrat.strategy.combining import Combining
from mpistrat.strategy.default_context import DefaultReplicaContext
from mpistrat.strategy.deprecated import DeprecatedNames
from mpistrat.strategy.extended import StrategyExtended
from mpistrat.strategy.feeding import Feeding
from mpistrat.strategy.feeding import register_inputs as register_inputs
from mpistrat.strategy.replica_context import ReplicaContext
from mpistrat.strategy.run_options import RunOptions
from mpistrat.structures import flatten

__all__ = ["Strategy", "register_inputs"]


class Strategy(Combining, Feeding, DeprecatedNames):
    """Runs one program on many replicas. One rank is one replica.

    Parameters
    ----------
    extended : StrategyExtended
        How it communicates; the strategies of this package make theirs themselves.
    """

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

    def scope(self) -> Scope:
        """Return a context manager in which this strategy is the current one, and variables become its variables.

        Entering it communicates nothing, and selects no device: a rank is bound to its own when it starts.

        Raises
        ------
        RuntimeError
            On entering, if another strategy is current, or inside `run`. On leaving, if it is left out of order.
        """
        default = default_mode()
        return Scope(default if default.strategy is self else self.cross_replica_mode)

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
            If `options` are no RunOptions.
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
        return self._extended.communicator.explain_batch([as_array(leaf) for leaf in leaves], options)

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
        ops = self._extended.communicator
        if default_mode().strategy is self or isinstance(ops, ClosedCommunicator):
            return
        ops.close()
        self._extended.communicator = ClosedCommunicator(repr(self), ops)
        # the replica context keeps the operations at hand: a new one, with those that are closed
        self.replica_context = ReplicaContext(self, ops.rank)

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


@register_default
def _default_mode() -> Mode:
    strategy = Strategy(StrategyExtended(LocalCommunicator()))
    strategy.replica_context = DefaultReplicaContext(strategy)
    return strategy.replica_context.mode
