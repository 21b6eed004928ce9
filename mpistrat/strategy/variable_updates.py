"""VariableUpdates: changing variables from outside ``strategy.run``, one component after the other, as optimisers do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mpistrat.communicator.base import Communicator
from mpistrat.context.stack import current, enter_or_assert_strategy, in_replica_context_of, misplaced, updating
from mpistrat.context.values import PerReplica, container_of, select_replica
from mpistrat.cross_device.destinations import OnSomeReplicas
from mpistrat.errors import InvalidArgumentError
from mpistrat.strategy.advice import ADVICE
from mpistrat.structures import flatten, map_leaves

if TYPE_CHECKING:
    from mpistrat.strategy.base import Strategy

__all__ = ["VariableUpdates"]


class VariableUpdates:
    """The methods of `StrategyExtended` that concern variables. It knows the strategy that it is a part of."""

    communicator: Communicator
    _strategy: Strategy
    _parameter_devices: tuple[str, ...]

    def bind(self, strategy: Strategy) -> None:
        """Become the extended part of `strategy`, which calls this once when it is made."""
        self._strategy = strategy

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
