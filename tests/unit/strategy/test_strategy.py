"""Strategy: run, reduce, gather, all_reduce, all_gather, merge_call, update, copies; and old names, each of which warns."""

import copy
import inspect
import operator
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import mpistrat
from mpistrat.communicator.local import LocalCommunicator
from mpistrat.communicator.sparse import IndexedSlices
from mpistrat.context.values import Mirrored, PerReplica, select_replica
from mpistrat.errors import InvalidArgumentError, UnsupportedDtypeError
from mpistrat.strategy.deprecated import RunOptions, accepts_hints, get_loss_reduction
from tests.unit.replicas import in_run, on_replicas
from tests.variable_matrix import made


def reduced(op, components, axis):
    """Return what ``strategy.reduce`` gives on each replica for these components."""

    def program(strategy):
        value = PerReplica(np.asarray(components[strategy.extended.communicator.rank]))
        return strategy.reduce(op, value, axis=axis)

    return on_replicas(len(components), program)


@pytest.mark.parametrize(
    ("op", "components", "axis", "expected"),
    [
        # what ranks make of rows and of all elements, test_properties.py of the lane `ranks` draws
        ("mean", [np.ones((2, 2)), 3 * np.ones((1, 2))], [0, 1], 10 / 6),
        ("mean", [np.ones((2, 2)), 3 * np.ones((1, 2))], (-1, 0), 10 / 6),
        ("MAX", [[1, 5], [3, 4]], None, [3, 5]),
        (mpistrat.ReduceOp.SUM, [np.ones((2, 2)), np.ones((2, 2))], [], [[2.0, 2.0], [2.0, 2.0]]),
        ("sum", [[True, False], [True, True]], [], [2, 1]),
        ("max", [[True, False], [False, False]], None, [True, False]),
        ("min", [[True, False], [True, True]], None, [True, False]),
        ("prod", [[True, False], [True, True]], None, [True, False]),
    ],
)
def test_known_reductions(op, components, axis, expected):
    for result in reduced(op, components, axis):
        assert (type(result), result.dtype) == (np.ndarray, np.asarray(expected).dtype)
        np.testing.assert_array_equal(result, expected)


def test_the_mean_over_an_axis_keeps_float_dtypes_and_is_exact():
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        # 70000 is more than float16 holds and the sum more than bfloat16 resolves: neither may be stored on the way
        for result in reduced("mean", [np.ones(70000, dtype), np.full(30000, 2, dtype)], 0):
            assert result.dtype == dtype
            assert result == np.asarray(1.3, dtype)
    for result in reduced("mean", [np.array([100, 100, 100], np.int8), np.array([101], np.int8)], 0):
        assert (result.dtype, result) == (np.float64, 100.25)
    for result in reduced("sum", [np.array([100, 27], np.int8), np.array([1], np.int8)], 0):
        assert (result.dtype, result) == (np.int8, -128)
    with np.errstate(all="raise"):
        assert reduced("sum", [np.full(40000, 1, np.float16)] * 2, 0)[0] == np.inf


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_results_share_no_memory_with_values(num_replicas):
    def program(strategy):
        variable = made(strategy, np.zeros(2))
        plain = np.zeros(2)
        for value, array in ((variable, variable.value), (plain, plain), (PerReplica(plain), plain)):
            for result in (strategy.reduce("max", value, axis=None), strategy.gather(value, axis=0)):
                assert not np.shares_memory(result, array)
        slices = IndexedSlices(np.zeros((1, 2)), np.zeros(1, int))
        assert not np.shares_memory(strategy.reduce("mean", slices, axis=None).values, slices.values)

    on_replicas(num_replicas, program)


@pytest.mark.parametrize("wrap", [lambda value: value, Mirrored, np.asarray])
def test_a_value_that_is_equal_on_all_replicas(wrap):
    def mean(strategy):
        return [strategy.reduce(op, wrap(5), axis=None) for op in ("mean", "min", "max")]

    assert on_replicas(2, mean) == [[5, 5, 5]] * 2
    assert on_replicas(2, lambda strategy: strategy.reduce("sum", wrap(0), axis=None)) == [0, 0]
    assert on_replicas(1, lambda strategy: strategy.reduce("sum", wrap(5), axis=None)) == [5]
    for value, axis in ((5, None), (np.array([5, 6]), 0)):
        with pytest.raises(InvalidArgumentError, match="SUM of a value that is not a per-rep.* is ambiguous with 2 replicas"):
            on_replicas(2, lambda strategy: strategy.reduce("sum", wrap(value), axis=axis))  # noqa: B023


@pytest.mark.parametrize(
    ("op", "axis", "error", "message"),
    [
        ("median", None, InvalidArgumentError, "unknown reduce_op 'median'; accepted are SUM, MEAN, MIN, MAX, PROD, in"),
        (3, None, TypeError, "reduce_op must be a ReduceOp or a str"),
        ("sum", 1, InvalidArgumentError, "axis 1 is out of range for a component of 1 axes; got axis=1"),
        ("sum", (0, -1), InvalidArgumentError, r"each axis can be reduced once; got axis=\(0, -1\) for"),
        ("sum", [0, -2], InvalidArgumentError, "axis -2 is out of range"),
        ("sum", "0", TypeError, "axis must be None, an int, or a list or tuple of int; got '0'"),
        ("sum", 1.0, TypeError, "axis must be"),
        ("max", 0, InvalidArgumentError, "takes SUM or MEAN, got MAX; use axis=None for MAX"),
    ],
)
def test_bad_reductions_are_refused(op, axis, error, message):
    with pytest.raises(error, match=message):
        reduced(op, [np.ones(2), np.ones(2)], axis)


def test_gather_takes_nests_and_plain_values():
    def program(strategy):
        plain = np.array([strategy.rank, 7])
        return strategy.gather({"a": PerReplica([strategy.rank]), "b": plain, "c": Mirrored([5])}, axis=0)

    for result in on_replicas(3, program):
        assert result["a"].tolist() == [0, 1, 2]
        assert result["b"].tolist() == [0, 7, 1, 7, 2, 7]
        assert result["c"].tolist() == [5, 5, 5]


@pytest.mark.parametrize("make", [float, np.float32, lambda x: np.array([x, -x]), lambda x: [x, -x]])
def test_plain_values_are_combined_as_what_each_rank_passes(make):
    def program(strategy):
        value = make(strategy.rank)
        combined = [strategy.reduce(op, value, axis=None) for op in ("mean", "min", "max")]
        if not isinstance(value, list):
            for op, found in zip(("mean", "min", "max"), combined, strict=True):
                np.testing.assert_array_equal(strategy.extended.reduce_to(op, value, {0, 1, 2}), found)
        nest = strategy.reduce("max", {"a": value, "b": PerReplica(strategy.rank), "c": Mirrored(9)}, axis=None)
        return combined, nest

    for combined, nest in on_replicas(3, program):
        for found, of_two in zip(combined, ([1, -1], [0, -2], [2, 0]), strict=True):
            expected = of_two if np.ndim(make(2)) else of_two[0]
            np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(nest["a"], combined[2])
        assert (nest["b"], nest["c"]) == (2, 9)


COMBINED_BOOLEANS = {
    "reduce": lambda strategy, op: strategy.reduce(op, PerReplica(np.array([True])), axis=None),
    "reduce of a plain value": lambda strategy, op: strategy.reduce(op, np.array([True]), axis=None),
    "all_reduce": lambda strategy, op: in_context(strategy, lambda c: c.all_reduce(op, {"a": np.ones(2), "b": True})),
    "start_all_reduce": lambda strategy, op: in_context(strategy, lambda c: c.start_all_reduce(op, [True]).wait()),
    "reduce_scatter": lambda strategy, op: in_context(strategy, lambda c: c.reduce_scatter(op, np.ones(4, bool))),
    "LocalCommunicator": lambda _, op: LocalCommunicator().all_reduce(op, [np.array([True])]),
    "slices": lambda strategy, op: in_context(strategy, lambda c: c.all_reduce(op, IndexedSlices(np.ones((1, 1), bool), [0]))),
    "reduce_to": lambda strategy, op: strategy.extended.reduce_to(op, PerReplica(True), "rank:0"),
    "batch_reduce_to": lambda strategy, op: strategy.extended.batch_reduce_to(op, [(PerReplica(True), "rank:0")]),
}


def in_context(strategy, fn):
    return strategy.run(lambda: fn(mpistrat.get_replica_context()))


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("call", COMBINED_BOOLEANS)
def test_booleans_have_neither_sum_nor_mean_across_replicas(call, num_replicas):
    def program(strategy):
        with pytest.raises(UnsupportedDtypeError, match="SUM is not defined for .*bool across replicas") as raised:
            COMBINED_BOOLEANS[call](strategy, "sum")
        for way in ("Use MAX", "MIN", "value.astype(np.int64)"):
            assert way in str(raised.value)
        with pytest.raises(UnsupportedDtypeError, match="MEAN is not defined for .* of dtype bool; cast it to float32"):
            COMBINED_BOOLEANS[call](strategy, "mean")

    on_replicas(num_replicas, program)


def test_local_is_the_component_of_this_replica_anywhere():
    def program(strategy):
        mine = made(strategy, 1.0, synchronization=mpistrat.VariableSynchronization.ON_READ)
        value = {"a": PerReplica(strategy.rank), "b": [Mirrored(5), 6, None], "c": mine}
        outside = strategy.local(value)
        inside = select_replica(strategy.run(lambda: strategy.local({"a": PerReplica(strategy.rank)})))
        return outside["a"], outside["b"], float(outside["c"]), inside["a"]

    assert on_replicas(2, program) == [(0, [5, 6, None], 1, 0), (1, [5, 6, None], 1, 1)]


def test_run_replaces_distributed_values_at_any_depth():
    def program(strategy):
        rank = strategy.extended.communicator.rank
        result = strategy.run(
            lambda pair, *, scale: {"sum": pair["a"] + pair["b"][0], "scale": scale},
            args=({"a": PerReplica(rank), "b": [10]},),
            kwargs={"scale": PerReplica(rank * 2)},
        )
        assert isinstance(result["sum"], PerReplica)
        return strategy.experimental_local_results(result)

    assert on_replicas(2, program) == [({"sum": 10, "scale": 0},), ({"sum": 11, "scale": 2},)]


def test_run_of_a_single_replica():
    strategy, options = mpistrat.OneDeviceStrategy(), RunOptions(experimental_xla_options="anything")
    assert options[:2] == (True, False)
    assert strategy.run(lambda x: [x], args=[3], options=options) == [3]  # the bare value; options have no effect
    assert mpistrat.get_strategy().run(lambda x: [x], args=(3,)) == [3]
    assert strategy.extended.call_for_each_replica(lambda x, *, y: x + y, (1,), {"y": 2}) == 3
    assert [strategy.experimental_local_results(value) for value in (3, [1, 2])] == [(3,), ([1, 2],)]
    with pytest.raises(InvalidArgumentError, match=r"args=\(batch,\); got ndarray"):
        strategy.run(lambda x: x, args=np.ones(3))
    with pytest.raises(TypeError, match=r"options must be a mpistrat.RunOptions or None; got CommunicationOptions\("):
        strategy.run(lambda: 5, options=mpistrat.experimental.CommunicationOptions())


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("reduce", ("sum", 0, None)),
        ("gather", (np.ones(1), 0)),
        ("broadcast", (np.ones(1),)),
        ("experimental_local_results", (np.ones(1),)),
        ("experimental_distribute_dataset", ([],)),
        ("distribute_datasets_from_function", (print,)),
        ("experimental_distribute_values_from_function", (print,)),
        ("close", ()),
        ("extended.reduce_to", ("sum", 1.0, 1.0)),
        ("extended.batch_reduce_to", ("sum", [])),
        ("extended.broadcast_to", (1.0, 1.0)),
        ("extended.update_non_slot", (None, print)),
        ("extended.read_var", (None,)),
    ],
)
def test_cross_replica_methods_are_refused_inside_run(method, arguments):
    strategy = mpistrat.OneDeviceStrategy()
    message = rf"strategy.{method} must be called in cross-replica context(.|\n)*incorrect: .*strategy.{method}(.|\n)*correct: "
    with pytest.raises(RuntimeError, match=message):
        strategy.run(lambda: operator.attrgetter(method)(strategy)(*arguments))


def test_a_strategy_of_one_device_can_be_copied_deeply_and_others_cannot():
    strategy = mpistrat.OneDeviceStrategy()
    copied = copy.deepcopy(strategy)
    assert copied.extended is not strategy.extended
    with copied.scope():
        assert mpistrat.get_strategy() is copied
        variable = mpistrat.Variable(1.0)
    assert copied.extended.variable_created_in_scope(variable)
    assert not strategy.extended.variable_created_in_scope(variable)
    assert copied.run(lambda: mpistrat.get_replica_context().strategy) is copied
    assert copy.deepcopy(mpistrat.get_strategy()) is mpistrat.get_strategy()
    with pytest.raises(RuntimeError, match=r"OneDeviceStr.*\(.*\) cannot be copied(.|\n)*correct: +copy.deepcopy\(strategy\)"):
        copy.copy(mpistrat.OneDeviceStrategy())
    with pytest.raises(InvalidArgumentError, match="cannot be copied: collectives of the copy"):
        on_replicas(2, copy.deepcopy)


def test_merge_call_groups_arguments_and_hands_components_back():
    def merged(strategy, value, *, scale):
        assert mpistrat.in_cross_replica_context()
        return {"total": strategy.reduce("sum", value, axis=None) * scale.values[0], "own": value}

    def fn(context, rank):
        result = context.merge_call(merged, args=(rank + 1,), kwargs={"scale": 10})
        assert mpistrat.get_replica_context() is context
        with pytest.raises(RuntimeError, match="ReplicaContext.merge_call must be called in the replica context"):
            context.merge_call(lambda strategy: context.merge_call(print))
        return result

    assert in_run(fn) == [{"total": 30, "own": 1}, {"total": 30, "own": 2}]
    context = mpistrat.get_replica_context()  # outside all scopes
    assert context.merge_call(lambda strategy, value: (strategy, value), args=(3,)) == (mpistrat.get_strategy(), 3)
    assert mpistrat.get_replica_context() is context


def test_update_applies_a_function_to_the_array_of_this_replica():
    def program(strategy):
        weights = made(strategy, np.zeros(2, np.float32))

        def in_place(array, gradient):
            array -= gradient

        def step():
            context = mpistrat.get_replica_context()
            gradient = context.all_reduce("sum", np.ones(2, np.float32))
            context.update(weights, lambda array, gradient: array - gradient, (gradient,))
            context.update(weights, in_place, (gradient,))
            context.update(weights, lambda array, *, scale: array * scale, kwargs={"scale": 10})

        strategy.run(step)
        return weights.numpy()

    for result in on_replicas(3, program):
        assert (result.dtype, result.tolist()) == (np.float32, [-60, -60])


def test_update_checks_shape_and_owner():
    strategy = mpistrat.OneDeviceStrategy()
    weights = made(strategy, np.zeros(2))
    with pytest.raises(InvalidArgumentError, match=r"Variable\('Variable', .*\) has shape \(2,\); a value of shape \(3,\)"):
        strategy.run(lambda: mpistrat.get_replica_context().update(weights, lambda array: np.ones(3)))
    other = mpistrat.OneDeviceStrategy()
    with pytest.raises(RuntimeError, match="two strategies cannot be mixed"):
        other.run(lambda: mpistrat.get_replica_context().update(weights, lambda array: array))


def closed():
    strategy = mpistrat.OneDeviceStrategy()
    strategy.close()
    strategy.close()
    return strategy


@pytest.mark.parametrize(
    "use",
    [
        lambda strategy: strategy.reduce("sum", PerReplica(1.0), axis=None),
        lambda strategy: strategy.gather(PerReplica(np.ones(1)), axis=0),
        lambda strategy: in_context(strategy, lambda context: context.all_reduce("sum", 1.0)),
        lambda strategy: in_context(strategy, lambda context: context.all_gather(np.ones(1), axis=0)),
        lambda strategy: strategy.extended.communicator.broadcast(np.ones(1)),
        lambda strategy: strategy.extended.communicator.barrier(),
        lambda strategy: strategy.extended.communicator.agree("anything"),
        lambda strategy: strategy.extended.communicator.explain(8, np.dtype(float)),
        lambda strategy: strategy.explain(np.ones(3)),
        lambda strategy: in_context(strategy, lambda context: mpistrat.Variable(1.0)),
    ],
)
def test_a_closed_strategy_does_not_communicate(use):
    message = r"this strategy was closed: OneDeviceStrategy\(replica=0\(1\), world=1x1\)(.|\n)*correct: .*strategy.close\(\)"
    with pytest.raises(RuntimeError, match=message):
        use(closed())
    mpistrat.get_strategy().close()  # which stays open
    assert float(mpistrat.Variable(1.0)) == 1


def test_names_are_for_humans():
    strategy = mpistrat.OneDeviceStrategy()
    assert repr(strategy) == "OneDeviceStrategy(replica=0(1), world=1x1)"
    assert strategy.array_module is mpistrat.get_strategy().array_module is np
    assert repr(strategy.run(mpistrat.get_replica_context)) == "ReplicaContext(replica=0(1))"
    assert strategy.cluster_resolver is None


@pytest.mark.parametrize(
    ("call", "message", "result"),
    [
        (lambda s: s.unwrap([PerReplica(5)]), "strategy.unwrap is deprecated; use strategy.experimental_local_results", ([5],)),
        (lambda s: s.group(PerReplica(1), name="all"), "strategy.group is deprecated; use the value itself", None),
        (lambda s: s.configure(session_config="anything"), "strategy.configure is deprecated", None),
        (lambda s: s.update_config_proto("config"), "strategy.update_config_proto is deprecated", "config"),
        (lambda s: s.experimental_run(lambda x: x + 1, iter([3])), "strategy.experimental_run is deprecated", 4),
        (lambda s: s.experimental_run(lambda: 5), "strategy.experimental_run is deprecated", 5),
        (lambda s: hasattr(s.colocate_vars_with(1), "__enter__"), "use strategy.extended.colocate_vars_with", True),
        (lambda s: get_loss_reduction(), r"get_loss_reduction\(\) is deprecated", mpistrat.ReduceOp.SUM),
    ],
)
def test_methods_of_old_names(call, message, result):
    with pytest.warns(DeprecationWarning, match=message):
        assert call(mpistrat.OneDeviceStrategy()) == result


def test_what_there_is_no_more_is_refused():
    moved = r"moved to another cluster: .*task_id=1.(.|\n)*correct: .*MultiWorkerMirroredStrategy\(cluster_resolver\)"
    with pytest.warns(DeprecationWarning, match="is deprecated"), pytest.raises(NotImplementedError, match=moved):
        mpistrat.OneDeviceStrategy().configure(task_type="worker", task_id=1)
    worker, mode = "takes .* PER_WORKER, got", SimpleNamespace(name="PER_REPLICA")
    with pytest.warns(DeprecationWarning, match="is deprecated"), pytest.raises(NotImplementedError, match=worker):
        mpistrat.OneDeviceStrategy().make_input_fn_iterator(print, mode)


def test_make_numpy_dataset_and_make_dataset_iterator():
    strategy = mpistrat.OneDeviceStrategy()
    with pytest.warns(DeprecationWarning, match=r"use mpistrat.ArrayDataset\(arrays, batch_size\)"):
        dataset = strategy.experimental_make_numpy_dataset({"x": np.arange(6)}, batch_size=4)
    assert isinstance(dataset, mpistrat.ArrayDataset)
    with pytest.warns(DeprecationWarning, match=r"use iter\(strategy.experimental_distribute_dataset\(dataset\)\)"):
        iterator = strategy.make_dataset_iterator(dataset)
    assert [batch["x"].tolist() for batch in iterator] == [[0, 1, 2, 3], [4, 5]]


@pytest.mark.parametrize("name", ["make_input_fn_iterator", "experimental_distribute_datasets_from_function"])
def test_datasets_from_functions(name):
    contexts = []

    def dataset_fn(context):
        contexts.append(context)
        return mpistrat.ArrayDataset(np.arange(4), 2)

    with pytest.warns(DeprecationWarning, match=rf"strategy.{name} is deprecated; use .*distribute_datasets_from_function"):
        dataset = getattr(mpistrat.OneDeviceStrategy(), name)(dataset_fn)
    assert [batch.tolist() for batch in dataset] == [[0, 1], [2, 3]]
    assert contexts == [mpistrat.InputContext(1, 0, 1)]


def test_options_win_over_hints_which_an_all_reduce_of_a_replica_takes_too():
    @accepts_hints
    def call(value, options=None):
        return options

    first, second = mpistrat.experimental.CommunicationOptions(1, 2.0), mpistrat.experimental.CommunicationOptions(3)
    assert call(0) is None
    assert call(0, first) is first
    for given in (lambda: call(0, second, experimental_hints=first), lambda: call(0, options=second, experimental_hints=first)):
        with pytest.warns(DeprecationWarning, match="experimental_hints= is deprecated; use options="):
            assert given() == mpistrat.experimental.CommunicationOptions(3, 2.0)
    hints = {"experimental_hints": mpistrat.experimental.CommunicationOptions(1)}
    with pytest.warns(DeprecationWarning, match="experimental_hints= is deprecated; use options="):
        assert mpistrat.OneDeviceStrategy().run(lambda: mpistrat.get_replica_context().all_reduce("sum", 1.0, **hints)) == 1


METHODS = ["Strategy.reduce", "Strategy.gather", "StrategyExtended.reduce_to", "StrategyExtended.batch_reduce_to"]


@pytest.mark.parametrize("name", [*METHODS, "ReplicaContext.all_reduce", "ReplicaContext.all_gather"])
def test_methods_that_take_options_take_hints(name):
    method = operator.attrgetter(name)(mpistrat)
    assert "experimental_hints" in inspect.signature(method, follow_wrapped=False).parameters
