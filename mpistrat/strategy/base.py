"""Strategy: how one program runs on many replicas, and the default strategy of one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from mpistrat.context.stack import Mode, Scope, default_mode, in_replica_context_of, misplaced, register_default
from mpistrat.context.values import regroup, select_replica
from mpistrat.cross_device.closed import ClosedCollectives
from mpistrat.cross_device.collectives import LocalCollectives
from mpistrat.errors import InvalidArgumentError
from mpistrat.reduction import ReduceOp
from mpistrat.strategy.extended import StrategyExtended
from mpistrat.strategy.replica_context import ReplicaContext
from mpistrat.structures import flatten, rebuild

__all__ = ["Dataset", "Strategy"]

# method: the line as it is often written inside strategy.run, and as it should be
_ADVICE = {
    "reduce": (
        'def step(): return strategy.reduce("sum", value, axis=None)',
        'def step(): return mpistrat.get_replica_context().all_reduce("sum", value)',
    ),
    "gather": (
        "def step(): return strategy.gather(value, axis=0)",
        "def step(): return mpistrat.get_replica_context().all_gather(value, axis=0)",
    ),
    "experimental_local_results": (
        "def step(): return strategy.experimental_local_results(value)",
        "strategy.experimental_local_results(strategy.run(step))",
    ),
    "experimental_distribute_dataset": (
        "def step(): for batch in strategy.experimental_distribute_dataset(dataset): …",
        "for batch in strategy.experimental_distribute_dataset(dataset): strategy.run(step, args=(batch,))",
    ),
    "close": ("def step(): strategy.close()", "strategy.run(step); strategy.close()"),
}


class Dataset(Protocol):
    """What `Strategy.experimental_distribute_dataset` takes, `mpistrat.ArrayDataset` for example."""

    def distribute(self, strategy: Strategy) -> Iterable[Any]:
        """Return this rank's share of every global batch, as distributed values of `strategy`."""

    def __iter__(self) -> Iterator[Any]:
        """Return the global batches."""


class Strategy:
    """Runs one program on many replicas. One rank is one replica.

    Parameters
    ----------
    extended : StrategyExtended
        How it communicates; the strategies of this package make theirs themselves.
    """

    def __init__(self, extended: StrategyExtended) -> None:
        self._extended = extended
        self._replica_context = ReplicaContext(self, extended.collectives.rank)
        self.cross_replica_mode = Mode(self)

    @property
    def extended(self) -> StrategyExtended:
        """The part for authors of strategies and libraries."""
        return self._extended

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas whose values are combined."""
        return self._extended.collectives.size

    @property
    def cluster_resolver(self) -> Any:
        """Where the roles of the tasks come from; None where there are no roles."""
        return None

    def scope(self) -> Scope:
        """Return a context manager in which this strategy is the current one, and variables become its variables.

        Entering it communicates nothing.

        Raises
        ------
        RuntimeError
            On entering, if another strategy is current, or inside `run`. On leaving, if it is left out of order.
        """
        default = default_mode()
        return Scope(default if default.strategy is self else self.cross_replica_mode)

    def run(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Call `fn` once on each replica, in its replica context.

        Parameters
        ----------
        fn : callable
            What each replica computes. This rank calls it once, for its own replica.
        args, kwargs : list or tuple, mapping
            Passed on; distributed values in them, at any depth, are replaced by the component of this replica. Variables
            are passed whole.

        Returns
        -------
        nest
            What `fn` returned, each leaf a per-replica value; with one replica, just what it returned.

        Raises
        ------
        InvalidArgumentError
            If `args` is neither a list nor a tuple.
        RuntimeError
            If called inside `run`, or in the scope of another strategy.
        """
        if not isinstance(args, (list, tuple)):
            raise InvalidArgumentError(f"args must be a list or tuple, for example args=(batch,); got {type(args).__name__}")
        with self._replica_context:
            result = fn(*select_replica(args), **select_replica(dict(kwargs or {})))
        return regroup(result, self.num_replicas_in_sync)

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | Sequence[int] | None) -> Any:
        """Combine a per-replica value to plain arrays, which every rank receives.

        A collective call.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            SUM or MEAN, and with ``axis=None`` also MIN, MAX or PROD; in any case.
        value : nest of per-replica values
            The leaves are reduced together. A leaf that is no per-replica value is equal on all replicas: its mean is
            itself, its sum is refused unless it is zero.
        axis : int, sequence of int, or None
            Axes to reduce each component over first. The mean is exact then: the sum over all replicas divided by the
            number of elements on all replicas, so replicas with fewer or no rows weigh as they should.

        Raises
        ------
        RuntimeError
            If called inside `run`, or in the scope of another strategy.
        TypeError
            If `reduce_op` is neither ReduceOp nor str, or `axis` of another type.
        InvalidArgumentError
            If the operation is unknown, an axis is out of range, or the sum is ambiguous.
        """
        self._require_cross_replica("reduce")
        leaves, structure = flatten(value)
        return rebuild(structure, self._extended.reduce(reduce_op, leaves, axis, structure))

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenate the components of a per-replica value along an axis, in replica order; every rank receives the result.

        A collective call.

        Parameters
        ----------
        value : nest of per-replica values
            Components have at least one axis, and agree in all extents but that of `axis`.
        axis : int
            Where to concatenate.

        Raises
        ------
        RuntimeError
            If called inside `run`, or in the scope of another strategy.
        InvalidArgumentError
            If a component has no such axis, or other extents differ.
        """
        self._require_cross_replica("gather")
        leaves, structure = flatten(value)
        return rebuild(structure, self._extended.gather(leaves, axis, structure))

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the components that this rank holds, a tuple of one; a plain value is its own component.

        Raises
        ------
        RuntimeError
            If called inside `run`, or in the scope of another strategy.
        """
        self._require_cross_replica("experimental_local_results")
        return (select_replica(value),)

    def experimental_distribute_dataset(self, dataset: Dataset) -> Iterable[Any]:
        """Return the dataset whose elements are split over the replicas: global batches in, per-replica batches out.

        Parameters
        ----------
        dataset : ArrayDataset
            Batched with the global batch size. The default strategy returns it as it is.

        Raises
        ------
        RuntimeError
            If called inside `run`, or in the scope of another strategy.
        TypeError
            If it is no dataset.
        """
        self._require_cross_replica("experimental_distribute_dataset")
        if default_mode().strategy is self:
            return dataset
        if not hasattr(dataset, "distribute"):
            raise TypeError(
                f"experimental_distribute_dataset takes a mpistrat.ArrayDataset, or an object with a method "
                f"distribute(strategy); got {type(dataset).__name__}"
            )
        return dataset.distribute(self)

    def close(self) -> None:
        """Free the strategy's communicators and shared memory.

        A collective call. Afterwards what would communicate raises RuntimeError; closing again does nothing. Programs
        that end anyway need not call it. The default strategy holds nothing, and stays open.

        Raises
        ------
        RuntimeError
            If called inside `run`, or in the scope of another strategy.
        """
        self._require_cross_replica("close")
        ops = self._extended.collectives
        if default_mode().strategy is self or isinstance(ops, ClosedCollectives):
            return
        ops.close()
        self._extended.collectives = ClosedCollectives(repr(self), ops)
        # the replica context keeps the operations at hand: a new one, with those that are closed
        self._replica_context = ReplicaContext(self, ops.rank)

    def __repr__(self) -> str:
        ops = self._extended.collectives
        return f"{type(self).__name__}(replica={ops.rank}({ops.size}), world={ops.world.shape})"

    def _require_cross_replica(self, method: str) -> None:
        if in_replica_context_of(self, f"strategy.{method}"):
            raise misplaced(f"strategy.{method}", "in cross-replica context", *_ADVICE[method])


@register_default
def _default_mode() -> Mode:
    strategy = Strategy(StrategyExtended(LocalCollectives()))
    return strategy._replica_context.mode
