"""The context stack: the current strategy and replica context of each thread.

====================  =================  ===============  =============
where                 strategy           replica context  cross-replica
====================  =================  ===============  =============
outside all scopes    the default one    its default one  no
``strategy.scope()``  that strategy      none             yes
``strategy.run(fn)``  that strategy      this replica's   no
``merge_call(fn)``    that strategy      none             yes
====================  =================  ===============  =============

Invariant: of this library only errors are imported. The module of the default strategy registers a factory for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any


@dataclass(frozen=True, eq=False)
class Mode:
    """One entry of the stack: a strategy, and a replica context if this is inside ``strategy.run``."""

    strategy: Any
    replica_context: Any = None


class _Thread(threading.local):
    """The modes that this thread has entered, innermost last, and the replica whose component it is updating."""

    def __init__(self) -> None:
        self.modes: list[Mode] = []
        self.update_replica_id: int | None = None


entered = _Thread()
"""What this thread has entered."""
_lock = threading.Lock()
_make_default: Callable[[], Mode]
_default: Mode | None = None
_process_wide: Mode | None = None


def register_default(factory: Callable[[], Mode]) -> None:
    """Set the factory of the mode outside all scopes; it is called once, when that mode is first needed."""
    global _make_default
    _make_default = factory


def default_mode() -> Mode:
    """Return the mode of the default strategy."""
    global _default
    if _default is None:
        with _lock:
            _default = _default or _make_default()
    return _default


def current() -> Mode:
    """Return the innermost mode of this thread."""
    modes = entered.modes
    return modes[-1] if modes else (_process_wide or default_mode())


def get_strategy() -> Any:
    """Return the current strategy, or the default one outside all scopes; never None."""
    return current().strategy


def has_strategy() -> bool:
    """Return whether the current strategy is not the default one."""
    return current().strategy is not default_mode().strategy


def get_replica_context() -> Any:
    """Return the current replica context: that of the default strategy outside all scopes, None in cross-replica context."""
    return current().replica_context


def in_cross_replica_context() -> bool:
    """Return whether the thread is in cross-replica context: in ``strategy.scope()`` or a ``merge_fn``, and not in ``run``."""
    return current().replica_context is None


def experimental_set_strategy(strategy: Any) -> None:
    """Make `strategy` the current one on every thread, without a ``with`` block; None restores the default strategy."""
    global _process_wide
    if entered.modes:
        raise misplaced("experimental_set_strategy", "outside all scopes")
    if not (strategy is None or hasattr(strategy, "extended")) or isinstance(strategy, type):
        raise TypeError(f"experimental_set_strategy takes a strategy, or None for the default one; got {strategy!r}")
    _process_wide = None if strategy is None or strategy is default_mode().strategy else Mode(strategy)


def get_update_replica_id() -> int | None:
    """Return the replica whose component ``strategy.extended.update`` is updating on this thread; None outside of it."""
    return entered.update_replica_id


@contextmanager
def updating(replica_id: int) -> Iterator[None]:
    """Set the replica whose component this thread is updating, for the time of a ``with`` block."""
    outer, entered.update_replica_id = entered.update_replica_id, replica_id
    try:
        yield
    finally:
        entered.update_replica_id = outer


def push(mode: Mode) -> None:
    """Enter a mode on this thread."""
    entered.modes.append(mode)


def pop(mode: Mode) -> None:
    """Leave the innermost mode of this thread, which must be `mode`."""
    modes = entered.modes
    if not modes or modes[-1] is not mode:
        raise RuntimeError(
            f"a context of {mode.strategy!r} was left out of order: {_where(current())}.\n"
            "Leave contexts in the reverse order of entering them, on the same thread; a with block does both."
        )
    modes.pop()


class StrategyScope:
    """Context manager that enters the cross-replica context of a strategy. It is reentrant."""

    def __init__(self, mode: Mode) -> None:
        self._mode = mode

    def __enter__(self) -> Any:
        found, wanted = current(), self._mode.strategy
        if found is default_mode() or (found.strategy is wanted and found.replica_context is None):
            push(self._mode)
        elif found.strategy is wanted:
            raise misplaced("strategy.scope", "outside strategy.run")
        else:
            raise _mixed("strategy.scope", wanted, found)
        return wanted

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        pop(self._mode)


def enter_or_assert_strategy(strategy: Any) -> AbstractContextManager[Any]:
    """Return a context manager in which `strategy` is current: its scope, or a null context if it is current already."""
    return nullcontext(strategy) if current().strategy is strategy else strategy.scope()


@contextmanager
def inside(mode: Mode) -> Iterator[None]:
    """Make a mode the current one for the time of a ``with`` block, whatever the one before."""
    push(mode)
    try:
        yield
    finally:
        pop(mode)


def outside_replica() -> AbstractContextManager[None]:
    """Leave replica context for the time of a ``with`` block; that of the default strategy stays."""
    found = current()
    return inside(found if found is default_mode() else found.strategy.cross_replica_mode)


def in_replica_context_of(strategy: Any, call: str) -> bool:
    """Return whether this thread is inside ``strategy.run``; False in its scope and outside all scopes."""
    found = current()
    if found is default_mode():
        return False
    if found.strategy is not strategy:
        raise _mixed(call, strategy, found)
    return found.replica_context is not None


def require_no_default_scope(call: str) -> None:
    """Check that the current scope is not nested in the scope of the default strategy."""
    found = current()
    if found.strategy is not default_mode().strategy and default_mode() in entered.modes:
        raise RuntimeError(
            f"{call} was called in the scope of {found.strategy!r}, which was entered inside that of the default strategy: two "
            "strategies cannot be mixed.\n"
            "    incorrect:  with mpistrat.get_strategy().scope(): with strategy.scope(): mpistrat.Variable(0.0)\n"
            "    correct:    with strategy.scope(): mpistrat.Variable(0.0), outside all other scopes"
        )


def misplaced(call: str, wanted: str, example: str = "") -> RuntimeError:
    """Return the error of a call in the wrong context, with the example of that name, or for the call."""
    incorrect, correct = EXAMPLES[example or call]
    return RuntimeError(
        f"{call} must be called {wanted}, but {_where(current())}.\n    incorrect:  {incorrect}\n    correct:    {correct}"
    )


def _mixed(call: str, wanted: Any, found: Mode) -> RuntimeError:
    if wanted is default_mode().strategy:
        return RuntimeError(
            f"{call}: the variable or strategy was created outside all scopes, so it belongs to the default strategy of this "
            f"rank, but {_where(found)}: two strategies cannot be mixed.\n"
            "    incorrect:  variable = mpistrat.Variable(value); strategy.run(lambda: variable.assign(value))\n"
            "    correct:    with strategy.scope(): variable = mpistrat.Variable(value)\n"
            "    incorrect:  default = mpistrat.get_strategy(); with strategy.scope(): default.run(fn)\n"
            "    correct:    with strategy.scope(): mpistrat.get_strategy().run(fn)"
        )
    return RuntimeError(
        f"{call} was called on {wanted!r}, but {_where(found)}: two strategies cannot be mixed.\n"
        "    incorrect:  with first.scope(): second.run(fn)\n"
        "    correct:    leave the scope of the first strategy, then call the second one"
    )


def _where(found: Mode) -> str:
    if _default is not None and found is _default:
        return "this is outside all scopes"
    if found.replica_context is None:
        return f"this is the cross-replica context of {found.strategy!r}"
    return f"this is inside strategy.run of {found.strategy!r}"


# Of calls in the wrong context: the call and what is correct, where {} is the call, and `ctx.` a call on the replica context.
_INSIDE_RUN = (
    ('strategy.reduce("sum", value, axis=None)', 'ctx.all_reduce("sum", value)'),
    ("strategy.gather(value, axis=0)", "ctx.all_gather(value, axis=0)"),
    ("strategy.broadcast(value)", "ctx.broadcast(value)"),
    ("strategy.experimental_local_results(value)", "strategy.experimental_local_results(strategy.run(step))"),
    ("strategy.experimental_distribute_dataset(dataset)", "for batch in {}: strategy.run(step, args=(batch,))"),
    ("strategy.distribute_datasets_from_function(dataset_fn)", "for batch in {}: strategy.run(step, args=(batch,))"),
    ("strategy.experimental_distribute_values_from_function(value_fn)", "strategy.run(step, args=({},))"),
    ("strategy.close()", "strategy.run(step); {}"),
    ("checkpoint.save(path)", "strategy.run(step); {}"),
    ("checkpoint.restore(path)", "{}; strategy.run(step)"),
    ("handler.run(step)", "handler.run(lambda: strategy.run(step))"),
    ('strategy.extended.reduce_to("sum", value, destinations)', 'ctx.all_reduce("sum", value)'),
    ('strategy.extended.batch_reduce_to("sum", [(value, value), (other, other)])', 'ctx.all_reduce("sum", [value, other])'),
    ("strategy.extended.broadcast_to(value, destinations)", "ctx.broadcast(value)"),
    ("strategy.extended.update_non_slot(devices, fn)", "ctx.merge_call(lambda strategy: {})"),
    ("strategy.extended.read_var(variable)", "def step(): return variable.value"),
    ('ops.reduce("sum", value, destinations)', 'ctx.all_reduce("sum", value); or ops.reduce(…) in strategy.scope()'),
    (
        'ops.batch_reduce("sum", [(value, destinations), (other, destinations)])',
        'ctx.all_reduce("sum", [value, other]); or ops.batch_reduce(…) in strategy.scope()',
    ),
    ("ops.broadcast(array, destinations)", "with strategy.scope(): {}"),
)
_OUTSIDE_RUN = (
    ('ctx.all_reduce("sum", value)', 'strategy.reduce("sum", value, axis=None)'),
    ('ctx.start_all_reduce("sum", value)', 'strategy.reduce("sum", value, axis=None)'),
    ("ctx.all_gather(value, axis=0)", "strategy.gather(value, axis=0)"),
    ("ctx.broadcast(value)", "strategy.broadcast(value)"),
    ('ctx.reduce_scatter("sum", value)', "strategy.run(lambda: {})"),
    ("ctx.all_to_all(values)", "strategy.run(lambda: {})"),
    ("ctx.sum_of_parts(fn, batch, virtual_replicas)", "strategy.run(lambda: {})"),
    ("ctx.barrier()", "strategy.run(lambda: {})"),
    ("ctx.update(variable, fn)", "with strategy.scope(): variable.assign(value)"),
)


def _example(prefix: str, call: str, correct: str) -> tuple[str, str]:
    step = f"def step(): return {correct}" if correct.startswith("ctx.") else correct
    return prefix + call, step.format(call).replace("ctx.", "mpistrat.get_replica_context().")


EXAMPLES = {
    **{call.partition("(")[0]: _example("def step(): return ", call, correct) for call, correct in _INSIDE_RUN},
    **{call.partition("(")[0]: _example("with strategy.scope(): ", call, correct) for call, correct in _OUTSIDE_RUN},
    "ctx.merge_call": ("def merge_fn(strategy): ctx.merge_call(other_fn)", "def merge_fn(strategy): other_fn(strategy)"),
    "ctx.update of a variable": (
        "mpistrat.get_replica_context().update(variable, fn), outside strategy.run",
        "def step(): mpistrat.get_replica_context().update(variable, fn), then strategy.run(step)",
    ),
    "strategy.run": ("strategy.run(fn), where fn calls strategy.run(other)", "strategy.run(fn), where fn calls other()"),
    "strategy.scope": ("strategy.run(fn), where fn enters strategy.scope()", "with strategy.scope(): strategy.run(fn)"),
    "strategy.extended.colocate_vars_with": (
        "with strategy.extended.colocate_vars_with(variable): other = mpistrat.Variable(value)",
        "with strategy.scope(), strategy.extended.colocate_vars_with(variable): other = mpistrat.Variable(value)",
    ),
    "ops of a value": (
        'ops.reduce("sum", strategy.run(fn), destinations)',
        'with strategy.scope(): ops.reduce("sum", strategy.run(fn), destinations)',
    ),
    "experimental_set_strategy": (
        "with strategy.scope(): mpistrat.experimental_set_strategy(other)",
        "mpistrat.experimental_set_strategy(other), before any scope is entered",
    ),
}
"""Of each call in the wrong context: an incorrect line, and the correct one."""
