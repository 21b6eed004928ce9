"""ReplicaContext: what a function inside ``strategy.run`` knows about its replica, and may ask of the others."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from mpistrat.arrays import Array
from mpistrat.context.fitting import fitted
from mpistrat.context.stack import Mode, in_replica_context_of, misplaced, pop, push
from mpistrat.context.values import regroup, select_replica
from mpistrat.errors import InvalidArgumentError
from mpistrat.strategy.advice import ADVICE
from mpistrat.strategy.replica_reduction import ReplicaReduction
from mpistrat.structures import flatten

if TYPE_CHECKING:
    from mpistrat.strategy.base import Strategy

__all__ = ["ReplicaContext", "Updatable"]


class Updatable(Protocol):
    """What `ReplicaContext.update` changes: a variable of the context's strategy."""

    def writable(self) -> Array:
        """Return the array of this replica, to be written to."""


class ReplicaContext(ReplicaReduction):
    """One replica inside ``strategy.run``; a context manager.

    Parameters
    ----------
    strategy : Strategy
        Whose replica it is.
    replica_id_in_sync_group : int, integer array or None
        The number of the replica, counted over all nodes; None for that of this rank.

    Raises
    ------
    InvalidArgumentError
        If the id is not an integer of the strategy's replicas.
    """

    def __init__(self, strategy: Strategy, replica_id_in_sync_group: Any = None) -> None:
        super().__init__(strategy.extended)
        self._strategy = strategy
        if replica_id_in_sync_group is None:
            replica_id_in_sync_group = self._ops.rank
        self._replica_id = _checked_id(replica_id_in_sync_group, self._ops.size)
        self.mode = Mode(strategy, self)

    @property
    def strategy(self) -> Strategy:
        """The strategy whose replica this is."""
        return self._strategy

    @property
    def replica_id_in_sync_group(self) -> int:
        """The number of this replica, 0 … `num_replicas_in_sync` - 1 over all nodes."""
        return self._replica_id

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas whose values are combined."""
        return self._ops.size

    @property
    def devices(self) -> tuple[str]:
        """The device of this replica, in a tuple.

        .. deprecated:: TensorFlow 2.4
            A replica has one device; ``strategy.extended.worker_devices`` names those of the strategy.
        """
        warnings.warn(
            "ReplicaContext.devices is deprecated; use strategy.extended.worker_devices", DeprecationWarning, stacklevel=2
        )
        return (self._extended.replica_device,)

    def merge_call(
        self, merge_fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Leave the replica, call ``merge_fn(strategy, *args, **kwargs)`` in cross-replica context, and come back.

        A collective call: every replica makes it. `merge_fn` runs once on every rank, with the replicas' arguments grouped into
        per-replica values.

        Returns
        -------
        nest
            The component of this replica of what `merge_fn` returned.

        Raises
        ------
        RuntimeError
            If this replica context is not the current one: in cross-replica context, or on another thread.
        AgreementError
            On every replica, if some make another call instead, or pass another structure: from the next collective.
        """
        self._require_current("merge_call")
        outside = self._strategy.cross_replica_mode
        passed = (tuple(args), dict(kwargs or {}))
        self._ops.note(f"merge_call with {flatten(passed)[1]}")
        grouped_args, grouped_kwargs = regroup(passed, self.num_replicas_in_sync)
        push(outside)
        try:
            return select_replica(merge_fn(self._strategy, *grouped_args, **grouped_kwargs))
        finally:
            pop(outside)

    def update(
        self, variable: Updatable, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Change the component of a variable by a function of values that are equal on all replicas.

        The way to apply a gradient that `all_reduce` has reduced: no further communication takes place, so the arguments
        must be the same on every replica for the variable to stay mirrored.

        Parameters
        ----------
        variable : Variable
            The variable to change.
        fn : callable
            Called as ``fn(array, *args, **kwargs)`` with the array of this replica. It returns the new value, or writes
            into the array and returns None.

        Raises
        ------
        RuntimeError
            If this replica context is not the current one, or the variable belongs to another strategy.
        InvalidArgumentError
            If the new value has another shape than the variable.
        """
        self._require_current("update")
        component = variable.writable()
        given_args, given_kwargs = select_replica((tuple(args), dict(kwargs or {})))
        result = fn(component, *given_args, **given_kwargs)
        if result is not None:
            component[...] = fitted(result, component, variable)

    def __enter__(self) -> ReplicaContext:  # noqa: PYI034 - Self is newer than Python 3.10
        if in_replica_context_of(self._strategy, "strategy.run"):
            raise misplaced("strategy.run", "outside strategy.run", *ADVICE["ctx.__enter__"])
        push(self.mode)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        pop(self.mode)

    def __repr__(self) -> str:
        return f"ReplicaContext(replica={self._replica_id}({self._ops.size}))"


def _checked_id(replica_id: Any, num_replicas: int) -> int:
    try:
        index = operator.index(replica_id)
    except TypeError:
        index = -1
    if not 0 <= index < num_replicas:
        raise InvalidArgumentError(
            f"replica_id_in_sync_group must be None or an integer from 0 to {num_replicas - 1}; got {replica_id!r}"
        )
    return index
