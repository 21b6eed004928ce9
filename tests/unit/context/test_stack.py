"""Which strategy and replica are current, and what happens when contexts are mixed up."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

import mpistrat
from mpistrat.context.stack import default_mode, enter_or_assert_strategy, get_update_replica_id, updating
from mpistrat.strategy.strategy import OneDeviceStrategy


def default_strategy():
    return default_mode().strategy


def on_another_thread(fn):
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(fn).result()


def test_outside_all_scopes_the_default_strategy_is_current():
    assert not mpistrat.has_strategy()
    assert mpistrat.get_strategy() is mpistrat.get_strategy()
    assert not mpistrat.in_cross_replica_context()
    context = mpistrat.get_replica_context()
    assert (context.replica_id_in_sync_group, context.num_replicas_in_sync) == (0, 1)
    assert context.strategy is mpistrat.get_strategy()


def test_scope_makes_a_strategy_current():
    strategy = OneDeviceStrategy()
    scope = strategy.scope()
    with scope as entered:
        assert entered is strategy
        with scope, strategy.scope():
            assert mpistrat.get_strategy() is strategy
        assert mpistrat.get_strategy() is strategy
        assert mpistrat.has_strategy()
        assert mpistrat.in_cross_replica_context()
        assert mpistrat.get_replica_context() is None
        assert not on_another_thread(mpistrat.has_strategy)
    assert not mpistrat.has_strategy()


def test_the_default_scope_changes_nothing():
    default = mpistrat.get_strategy()
    with default.scope() as entered:
        assert entered is default
        assert not mpistrat.has_strategy()
        assert not mpistrat.in_cross_replica_context()
        assert mpistrat.get_replica_context() is not None
        with OneDeviceStrategy().scope():
            assert mpistrat.has_strategy()


@pytest.mark.parametrize("which", ["other", "default"])
def test_strategies_cannot_be_mixed(which):
    strategy = OneDeviceStrategy()
    second = mpistrat.get_strategy() if which == "default" else OneDeviceStrategy()
    with strategy.scope():
        with pytest.raises(RuntimeError, match="two strategies cannot be mixed"), second.scope():
            pass
        with pytest.raises(RuntimeError, match="two strategies cannot be mixed"):
            second.run(lambda: None)
        with pytest.raises(RuntimeError, match="two strategies cannot be mixed"):
            second.reduce("sum", 0, axis=None)
        assert mpistrat.get_strategy() is strategy
    assert not mpistrat.has_strategy()


def test_scope_cannot_be_entered_inside_run():
    strategy = OneDeviceStrategy()

    def step():
        with strategy.scope():
            pass

    with pytest.raises(
        RuntimeError, match="strategy.scope must be called outside strategy.run, but this is inside strategy.run"
    ):
        strategy.run(step)
    with pytest.raises(RuntimeError, match="two strategies"), strategy.scope():
        OneDeviceStrategy().run(lambda: None)
    assert not mpistrat.has_strategy()


def test_run_cannot_be_nested_but_that_of_the_default_strategy():
    strategy, default = OneDeviceStrategy(), mpistrat.get_strategy()
    with pytest.raises(RuntimeError, match=r"correct: +strategy.run\(fn\), where fn calls other\(\)"):
        strategy.run(lambda: strategy.run(lambda: None))
    assert default.run(lambda: default.run(lambda x: x + 1, args=(1,))) == 2


def test_scopes_left_out_of_order():
    strategy = OneDeviceStrategy()
    scope = strategy.scope()

    def step():
        scope.__exit__(None, None, None)

    with scope, pytest.raises(RuntimeError, match="left out of order: this is inside strategy.run"):
        strategy.run(step)
    with pytest.raises(RuntimeError, match="left out of order: this is outside all scopes"):
        scope.__exit__(None, None, None)


def test_an_exception_restores_the_context():
    strategy = OneDeviceStrategy()

    def fail(*_):
        raise KeyError("planted")

    with strategy.scope():
        weights = mpistrat.Variable(0.0)
    for call in (
        lambda: strategy.run(lambda: mpistrat.get_replica_context().merge_call(fail)),
        lambda: strategy.extended.update(weights, fail),
    ):
        with pytest.raises(KeyError, match="planted"):
            call()
        assert get_update_replica_id() is None
        assert not mpistrat.has_strategy()


def test_a_strategy_set_without_a_block_holds_for_every_thread_until_another_is_set():
    first, second = OneDeviceStrategy(), OneDeviceStrategy()
    try:
        for strategy in (first, second):
            mpistrat.experimental_set_strategy(strategy)
            assert on_another_thread(mpistrat.get_strategy) is mpistrat.get_strategy() is strategy
            assert mpistrat.in_cross_replica_context()
            with strategy.scope():
                assert mpistrat.get_strategy() is strategy
            assert strategy.run(lambda: mpistrat.get_replica_context().replica_id_in_sync_group) == 0
            for other in (default_strategy(), OneDeviceStrategy()):
                with pytest.raises(RuntimeError, match="two strategies cannot be mixed"), other.scope():
                    pass
        for none in (default_strategy(), None, None):
            mpistrat.experimental_set_strategy(none)
            assert mpistrat.get_strategy() is default_strategy()
            assert not mpistrat.has_strategy()
    finally:
        mpistrat.experimental_set_strategy(None)


def test_a_strategy_cannot_be_set_inside_a_scope():
    strategy = OneDeviceStrategy()
    with pytest.raises(RuntimeError, match="experimental_set_strategy must be called outside all scopes"):
        strategy.run(mpistrat.experimental_set_strategy, (strategy,))
    for wrong in ("mirrored", OneDeviceStrategy):
        with pytest.raises(TypeError, match=f"takes a strategy, or None for the default one; got {re.escape(repr(wrong))}"):
            mpistrat.experimental_set_strategy(wrong)
    assert not mpistrat.has_strategy()
    with strategy.scope(), pytest.raises(RuntimeError, match="experimental_set_strategy must be called outside all scopes"):
        mpistrat.experimental_set_strategy(None)


def test_enter_or_assert_strategy():
    strategy, other = OneDeviceStrategy(), OneDeviceStrategy()
    with enter_or_assert_strategy(strategy) as entered:
        assert entered is mpistrat.get_strategy() is strategy
        with enter_or_assert_strategy(strategy) as again:
            assert again is strategy
        assert mpistrat.get_strategy() is strategy
        with pytest.raises(RuntimeError, match="two strategies cannot be mixed"), enter_or_assert_strategy(other):
            pass
        with pytest.raises(RuntimeError, match="two strategies"), enter_or_assert_strategy(default_strategy()):
            pass
    assert not mpistrat.has_strategy()
    assert strategy.run(lambda: enter_or_assert_strategy(strategy).__enter__()) is strategy
    with enter_or_assert_strategy(default_strategy()):
        assert not mpistrat.has_strategy()


def test_the_replica_that_is_updated_is_known_on_its_thread():
    assert get_update_replica_id() is None
    with updating(2):
        assert get_update_replica_id() == 2
        with updating(3):
            assert get_update_replica_id() == 3
        assert get_update_replica_id() == 2
        assert on_another_thread(get_update_replica_id) is None
    assert get_update_replica_id() is None


def test_a_variable_that_was_made_outside_the_scope_is_named_as_such():
    strategy, outside = OneDeviceStrategy(), mpistrat.Variable(0.0)
    for call, use in (
        ("Variable.assign", lambda context: outside.assign(1.0)),
        ("ctx.update of a variable", lambda context: context.update(outside, lambda old: old + 1)),
        ("strategy.extended.update", lambda context: context.merge_call(lambda s: s.extended.update(outside, lambda old: old))),
    ):
        with pytest.raises(RuntimeError, match=f"^{call}: the variable or strategy was created outside all scopes") as raised:
            strategy.run(lambda: use(mpistrat.get_replica_context()))  # noqa: B023
        assert "correct:    with strategy.scope(): variable = mpistrat.Variable(value)" in str(raised.value)
    assert outside.numpy() == 0
