"""Which strategy and replica are current, what happens when contexts are mixed up, and what is said outside all scopes."""

import re
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

import mpistrat
from mpistrat.context.stack import default_mode, get_update_replica_id, updating
from mpistrat.launch.environment import LAUNCHERS
from mpistrat.strategy.strategy import OneDeviceStrategy
from tests.processes import python
from tests.unit import replicas
from tests.unit.replicas import IN_REPLICA


def default_strategy():
    return default_mode().strategy


def on_another_thread(fn):
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(fn).result()


def test_the_strategy_of_the_scope_is_current_or_the_default_one():
    assert not mpistrat.has_strategy()
    assert mpistrat.get_strategy() is mpistrat.get_strategy()
    assert not mpistrat.in_cross_replica_context()
    context = mpistrat.get_replica_context()
    assert (context.replica_id_in_sync_group, context.num_replicas_in_sync) == (0, 1)
    assert context.strategy is mpistrat.get_strategy()
    default = mpistrat.get_strategy()
    with default.scope() as entered:
        assert entered is default
        assert not mpistrat.has_strategy()
        assert not mpistrat.in_cross_replica_context()
        assert mpistrat.get_replica_context() is not None
        with OneDeviceStrategy().scope():
            assert mpistrat.has_strategy()
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


@pytest.mark.parametrize("which", ["other", "default"])
def test_strategies_cannot_be_mixed(which):
    strategy = OneDeviceStrategy()
    second = mpistrat.get_strategy() if which == "default" else OneDeviceStrategy()
    with strategy.scope():
        for use in (second.scope().__enter__, lambda: second.run(lambda: None), lambda: second.reduce("sum", 0, axis=None)):
            with pytest.raises(RuntimeError, match="two strategies cannot be mixed"):
                use()
        assert mpistrat.get_strategy() is strategy
    assert not mpistrat.has_strategy()


def test_neither_scope_nor_run_is_entered_inside_run_nor_left_out_of_order():
    strategy, default = OneDeviceStrategy(), mpistrat.get_strategy()
    with pytest.raises(RuntimeError, match="strategy.scope must be called outside strategy.run, but this is inside strategy.r"):
        strategy.run(lambda: strategy.scope().__enter__())
    assert not mpistrat.has_strategy()
    with pytest.raises(RuntimeError, match=r"correct: +strategy.run\(fn\), where fn calls other\(\)"):
        strategy.run(lambda: strategy.run(lambda: None))
    assert default.run(lambda: default.run(lambda x: x + 1, args=(1,))) == 2
    scope = strategy.scope()
    with scope, pytest.raises(RuntimeError, match="left out of order: this is inside strategy.run"):
        strategy.run(scope.__exit__, (None, None, None))
    with pytest.raises(RuntimeError, match="left out of order: this is outside all scopes"):
        scope.__exit__(None, None, None)


def test_an_exception_restores_the_context():
    strategy = OneDeviceStrategy()

    def fail(*_):
        raise KeyError("planted")

    with strategy.scope():
        weights = mpistrat.Variable(0.0)
    merge = lambda: mpistrat.get_replica_context().merge_call(fail)  # noqa: E731
    for call in (lambda: strategy.run(merge), lambda: strategy.extended.update(weights, fail)):
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


@pytest.fixture
def launched(monkeypatch):
    """Return what sets the variables of a launcher, and gives the context, which has not looked at them yet."""
    for launcher in LAUNCHERS:
        monkeypatch.delenv(launcher.rank, raising=False)
    monkeypatch.delenv("MPISTRAT_STRICT", raising=False)

    def launch(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        context = mpistrat.get_replica_context()
        monkeypatch.setattr(context, "_has_checked_peers", False)
        return context

    return launch


OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}


@pytest.mark.parametrize("method", IN_REPLICA)
def test_a_collective_outside_run_warns_once_and_returns_the_local_value(launched, method):
    context = launched(**OPEN_MPI)
    said = rf"rank 1: ReplicaContext.{method} was called outside strategy.run, in a job of 4"
    with pytest.warns(UserWarning, match=said) as seen:
        assert IN_REPLICA[method](context) == 3.0
    assert rf"correct:    strategy.run(lambda: mpistrat.get_replica_context().{method}(" in str(seen[0].message)
    assert seen[0].filename == replicas.__file__, "the line is the user's, who makes the call there"
    for again in IN_REPLICA.values():
        assert again(context) == 3.0  # a second warning would be an error here


@pytest.mark.parametrize("method", IN_REPLICA)
def test_in_strict_mode_each_collective_outside_run_raises(launched, method):
    context = launched(**OPEN_MPI, MPISTRAT_STRICT="1")
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"rank 1: ReplicaContext.{method} was called outside strategy.run"):
            IN_REPLICA[method](context)
    variable = mpistrat.Variable(1.0)  # what does not communicate is as it was
    context.update(variable, lambda old: old + 1)
    assert variable.numpy() == 2
    assert context.merge_call(lambda strategy, value: value, args=(5,)) == 5


@pytest.mark.parametrize(
    "variables", [{}, {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, {"PMIX_RANK": "0"}, {"SLURM_PROCID": "0"}]
)
def test_a_single_process_hears_nothing(launched, variables):
    context = launched(**variables, MPISTRAT_STRICT="1")
    for collective in IN_REPLICA.values():
        assert collective(context) == 3.0


def test_a_launcher_that_does_not_count_its_ranks_has_several_where_this_is_not_the_first(launched):
    with pytest.warns(UserWarning, match="rank 2: .* in a job of several ranks"):
        launched(PMIX_RANK="2").all_reduce("sum", 3.0)


def test_one_replica_that_was_asked_for_is_silent(launched):
    launched(**OPEN_MPI)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert mpistrat.OneDeviceStrategy().run(lambda: mpistrat.get_replica_context().all_reduce("sum", 3.0)) == 3


def test_mpi_is_not_started_for_the_question():
    program = (
        "import sys, warnings, mpistrat\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    mpistrat.get_replica_context().all_reduce('sum', 1.0)\n"
        "print(len(seen), 'mpi4py.MPI' in sys.modules)"
    )
    assert python(program, **OPEN_MPI, MPISTRAT_STRICT="0").stdout.split() == ["1", "False"]


@pytest.mark.parametrize("line", ["mpistrat.PerReplica(3.0).read()", "mpistrat.Variable(3.0)", "mpistrat.Mirrored(3.0) + 1"])
def test_any_public_name_finds_the_default_strategy(line):
    program = f"import mpistrat\ntry: {line}\nexcept mpistrat.errors.InvalidArgumentError as error: print(error)"
    done = python(program)
    assert (done.returncode, "a per-replica value was read" in done.stdout) == (0, "PerReplica" in line)
