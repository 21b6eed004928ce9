"""StrategyExtended: destinations, updates of variables, devices, roles; ReplicaContext: weighted means, handles, own verbs."""

import ml_dtypes
import numpy as np
import pytest

import mpistrat
from mpistrat.context.stack import get_update_replica_id
from mpistrat.context.values import Mirrored, PerReplica
from mpistrat.errors import InvalidArgumentError, UnsupportedDtypeError
from mpistrat.structures import flatten
from tests.unit.replicas import IN_REPLICA, in_run, on_replicas
from tests.variable_matrix import made


def test_every_reduction_of_a_strategy_goes_through_its_cross_device_ops():
    class Spy(mpistrat.CrossDeviceOps):
        def __init__(self):
            self.seen = []

        def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
            self.seen.append((reduce_op.name, len(value_destination_pairs)))
            return [np.asarray(value.values[0]) * 10 for value, _ in value_destination_pairs]

    def program(strategy):
        ops = Spy()
        strategy = mpistrat.Strategy(mpistrat.StrategyExtended(strategy.extended.communicator, ops))
        assert strategy.extended.cross_device_ops is ops
        variable = made(strategy, np.zeros(1), aggregation=mpistrat.VariableAggregation.SUM)

        def step():
            context = mpistrat.get_replica_context()
            variable.assign_add([1.0])
            return context.all_reduce("mean", {"a": 1.0, "b": 2.0}), context.start_all_reduce("max", 3.0).wait()

        value = PerReplica(np.ones(2))
        found = strategy.reduce("sum", [value, PerReplica(2.0)], axis=None)
        found += [strategy.reduce("mean", PerReplica(np.arange(4.0)), axis=0), *strategy.local(strategy.run(step)), variable]
        found += [strategy.extended.reduce_to("min", value, value)]
        found += strategy.extended.batch_reduce_to("prod", [(value, value)])
        return [np.asarray(leaf).tolist() for leaf in flatten(found)[0]], ops.seen

    reduced = [[10, 10], 20, 60 / 40, 10, 20, 30, [10], [10, 10], [10, 10]]
    seen = [("SUM", 2), ("SUM", 2), ("SUM", 1), ("MEAN", 2), ("MAX", 1), ("MIN", 1), ("PROD", 1)]
    assert on_replicas(2, program) == [(reduced, seen)] * 2


@pytest.mark.parametrize("root", [0, 2])
def test_gathering_and_broadcasting_go_through_the_cross_device_ops_of_a_strategy(root):
    class Own(mpistrat.HierarchicalAllReduce):
        def gather_implementation(self, per_replica_value, destinations, axis, options):
            assert isinstance(options, mpistrat.experimental.CommunicationOptions)
            whole = super().gather_implementation(per_replica_value, destinations, axis, options)
            return Mirrored(np.asarray(whole)[::-1])

        def broadcast_implementation(self, tensor, destinations):
            assert mpistrat.in_cross_replica_context()
            return Mirrored(2 * np.asarray(super().broadcast_implementation(tensor, destinations)))

    def program(strategy):
        strategy = mpistrat.Strategy(mpistrat.StrategyExtended(strategy.extended.communicator, Own()))
        value = PerReplica(np.array([strategy.rank + 1]))

        def step(array):
            context = mpistrat.get_replica_context()
            return context.all_gather(array, axis=0), context.broadcast(array, root)

        gathered = strategy.gather([value, np.array([7, 8])], axis=0)
        found = *gathered, strategy.broadcast(value, root), strategy.extended.broadcast_to(value.values[0], value)
        assert not mpistrat.has_strategy()
        return [np.asarray(each).tolist() for each in strategy.local([*found, *strategy.run(step, (value,))])]

    sent = [2 * root + 2]
    assert on_replicas(3, program) == [[[3, 2, 1], [8, 7] * 3, sent, [2], [3, 2, 1], sent]] * 3


def test_ops_are_not_asked_for_nothing():
    def program(strategy):
        strategy = mpistrat.Strategy(mpistrat.StrategyExtended(strategy.extended.communicator, mpistrat.NcclAllReduce()))
        summed = strategy.run(lambda: mpistrat.get_replica_context().all_reduce("sum", {}))
        return strategy.reduce("mean", Mirrored(5.0), axis=None), summed

    assert on_replicas(2, program) == [(5, {})] * 2


def test_update_changes_the_component_of_this_rank():
    def program(strategy):
        weights = made(strategy, np.zeros(2))
        seen = []

        def add(variable, delta, *, scale):
            seen.append(get_update_replica_id())
            variable.assign_add(delta * scale)
            return variable.numpy()

        arguments = (weights, add, (Mirrored(np.ones(2)),), {"scale": 3})
        assert strategy.extended.update(*arguments) is None
        assert strategy.extended.update(*arguments, group=False)[0].tolist() == [6, 6]
        strategy.run(lambda: strategy.extended.update(weights, add, (np.ones(2),), {"scale": 1}))
        assert seen == [strategy.rank] * 3
        assert get_update_replica_id() is None
        return weights.numpy().tolist()

    assert on_replicas(3, program) == [[7, 7]] * 3
    variable = mpistrat.Variable(1.0)
    mpistrat.get_strategy().extended.update(variable, lambda v: v.assign_add(1.0))
    assert float(variable) == 2


def test_update_refuses_foreign_variables_and_a_value_that_only_some_replicas_have():
    strategy, other = mpistrat.OneDeviceStrategy(), mpistrat.OneDeviceStrategy()
    weights = made(strategy, 0.0)
    update = strategy.extended.update
    with pytest.raises(TypeError, match="extended.update changes a mpistrat.Variable of replicas; got array"):
        update(np.ones(1), print)
    with pytest.raises(TypeError, match="^update changes a mpistrat.Variable of replicas; got array"):
        strategy.run(lambda: mpistrat.get_replica_context().update(np.zeros(2), np.add, (1,)))
    with pytest.raises(RuntimeError, match="two strategies cannot be mixed"):
        other.extended.update(weights, print)
    with pytest.raises(RuntimeError, match="two strategies cannot be mixed"), other.scope():
        update(weights, print)

    def program(strategy):
        extended = strategy.extended
        weights = made(strategy, 0.0)
        total = extended.reduce_to("sum", PerReplica(1.0), "rank:0")
        message = r"every replica runs the update: reduce the value to the variable(.|\n)*correct: "
        with pytest.raises(TypeError, match=message):
            extended.update(weights, print, ([total],))
        with pytest.raises(TypeError, match=message):
            extended.update_non_slot(None, print, kwargs={"total": total})

    on_replicas(2, program)


def test_update_gives_each_component_of_an_on_read_variable_its_own_value():
    def program(strategy):
        on_read, total = mpistrat.VariableSynchronization.ON_READ, mpistrat.VariableAggregation.SUM
        variable, mirrored = made(strategy, [1.0], synchronization=on_read, aggregation=total), made(strategy, [1.0])
        value = strategy.run(lambda: np.array([strategy.rank + 1.0]))
        strategy.extended.update(variable, lambda v, x, scale: v.assign_add(scale * x), (value,), {"scale": value})
        strategy.extended.update(variable, lambda v, text: None, (PerReplica(np.array(["of any dtype"])),))
        strategy.extended.update(mirrored, lambda v, x: v.assign(x), (PerReplica(np.array([7.0])),))
        assert mirrored.numpy().tolist() == [7]
        held = strategy.experimental_local_results(strategy.run(variable.read_value))[0]
        return held.tolist(), variable.numpy().tolist()

    assert on_replicas(3, program) == [([2], [17]), ([5], [17]), ([10], [17])]


def test_update_non_slot_calls_the_function_once():
    def program(strategy):
        state = {"step": 0}

        def advance(by):
            state["step"] += by
            return {"step": state["step"], "replica": get_update_replica_id()}

        devices = strategy.extended.non_slot_devices([])
        assert devices == strategy.extended.parameter_devices
        assert strategy.extended.update_non_slot(devices, advance, (Mirrored(2),)) is None
        return strategy.extended.update_non_slot(devices, advance, kwargs={"by": 3}, group=False)

    assert on_replicas(2, program) == [{"step": [5], "replica": [0]}, {"step": [5], "replica": [1]}]
    assert mpistrat.get_strategy().extended.non_slot_devices([]) == ("/cpu:0",)


def test_value_container_finds_the_value_that_a_component_came_from():
    strategy, container = mpistrat.OneDeviceStrategy(), mpistrat.get_strategy().extended.value_container
    variable = made(strategy, np.zeros(2))
    mirrored, array = Mirrored(np.ones(1)), np.ones(1)
    for value in (variable, mirrored, PerReplica(np.ones(2))):
        assert container(value) is value
        assert container(value.values[0]) is value
    assert container(array) is array
    assert (Mirrored(1).values, container(1), type(container(1))) == ((1,), 1, int)
    (component,) = mirrored.values
    del mirrored, value
    assert container(component) is component


def test_colocate_vars_with():
    strategy, other = mpistrat.OneDeviceStrategy(), mpistrat.OneDeviceStrategy()
    foreign = mpistrat.Variable(0.0)
    with strategy.scope():
        variable = mpistrat.Variable(0.0)
        with strategy.extended.colocate_vars_with(variable):
            assert strategy.extended.variable_created_in_scope(mpistrat.Variable(1.0))
        with pytest.raises(InvalidArgumentError, match=r"Variable\(.*\) was not created in the scope of OneDeviceStrategy"):
            strategy.extended.colocate_vars_with(foreign).__enter__()
    assert not other.extended.variable_created_in_scope(variable)
    assert not strategy.extended.variable_created_in_scope(np.ones(1))
    message = "colocate_vars_with must be called in the strategy's scope, but this is outside all"
    with pytest.raises(RuntimeError, match=message):
        strategy.extended.colocate_vars_with(variable).__enter__()
    with pytest.raises(RuntimeError, match="colocate_vars_with must be called in cross-replica context"):
        strategy.run(lambda: strategy.extended.colocate_vars_with(variable).__enter__())


def test_devices_and_roles_of_a_strategy():
    extended = mpistrat.get_strategy().extended
    for name in ("worker_devices", "parameter_devices"):
        with pytest.raises(RuntimeError, match=rf"the default strategy has no {name}(.|\n)*correct: .*OneDeviceStrategy"):
            getattr(extended, name)
    extended = mpistrat.OneDeviceStrategy().extended
    assert extended.worker_devices == extended.parameter_devices == ("/cpu:0",)

    def program(strategy):
        strategy = mpistrat.Strategy(mpistrat.StrategyExtended(strategy.extended.communicator, None, ("a", "b"), ["c"]))
        assert (strategy.extended.worker_devices, strategy.extended.parameter_devices) == (("a", "b"), ("c",))
        with pytest.warns(DeprecationWarning, match="ReplicaContext.devices is deprecated"):
            return strategy.run(lambda: mpistrat.get_replica_context().devices)[0].values[0]

    assert on_replicas(2, program) == ["a", "b"]
    for number in (1, 2):
        assert on_replicas(number, lambda s: s.extended.experimental_between_graph) == [number > 1] * number
    extended = mpistrat.OneDeviceStrategy().extended
    assert extended.experimental_should_init
    assert not extended.experimental_require_static_shapes


def test_slices_and_plain_rows_are_reduced():
    def program(strategy):
        slices = mpistrat.IndexedSlices(np.full((1, 2), strategy.rank + 1.0), [strategy.rank], (3, 2))
        total = strategy.reduce("sum", PerReplica(slices), axis=None)
        plain = strategy.reduce("mean", slices, axis=None).to_dense().tolist()
        rows = strategy.reduce("mean", np.full((strategy.rank + 1, 2), strategy.rank + 1.0), axis=0).tolist()
        inside = strategy.run(lambda: mpistrat.get_replica_context().all_reduce("mean", {"e": slices, "w": 1.0}))
        with pytest.raises(NotImplementedError, match="reduce over axis=0 is not supported for IndexedSlices"):
            strategy.reduce("sum", PerReplica(slices), axis=0)
        with pytest.raises(NotImplementedError, match="cannot be gathered"):
            strategy.gather(PerReplica(slices), axis=0)
        with pytest.raises(NotImplementedError, match="cannot be gathered"):
            strategy.run(lambda: mpistrat.get_replica_context().all_gather([slices], axis=0))
        return total.to_dense().tolist(), plain, inside["e"].values[0].to_dense().tolist(), float(inside["w"].values[0]), rows

    mean = [[0.5, 0.5], [1, 1], [0, 0]]
    expected = ([[1, 1], [2, 2], [0, 0]], mean, mean, 1.0, [5 / 3, 5 / 3])
    assert on_replicas(2, program) == [expected] * 2


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, np.complex64])
def test_the_weighted_mean_counts_each_replica_as_it_weighs(dtype):
    def fn(context, rank):
        total = context.all_reduce("mean", {"a": np.full(2, rank, dtype), "b": np.asarray(2 * rank, dtype)}, weight=rank + 1)
        assert context.strategy.extended.communicator.num_collectives == 1
        return total

    for result in in_run(fn, num_replicas=3):  # (0 * 1 + 1 * 2 + 2 * 3) / 6
        assert result["a"].dtype == result["b"].dtype == dtype
        np.testing.assert_array_equal(result["a"], np.full(2, 4 / 3).astype(dtype))
        np.testing.assert_array_equal(result["b"], np.asarray(8 / 3).astype(dtype))


def test_a_replica_without_weight_contributes_nothing_even_if_it_has_nothing():
    results = in_run(lambda context, rank: context.all_reduce("mean", np.nan if rank else 3.0, weight=0 if rank else 5))
    assert results == [3, 3]
    assert np.isnan(in_run(lambda context, rank: context.all_reduce("mean", np.ones(2), weight=0))).all()


def weighted(value, weight, op="mean"):
    return lambda context: context.all_reduce(op, value, weight=weight)


def reducing(op, value, error, message):
    """Return a row of `REFUSED` for each call that reduces."""
    return [(lambda c, call=call: getattr(c, call)(op, value), error, message) for call in ("all_reduce", "start_all_reduce")]


OPTIONS, WEIGHT = "options must be CommunicationOptions or None; got 'RING'", "weight must be one finite number"
REFUSED = [
    (lambda c: c.all_reduce("mean", [np.ones(2)], out=np.ones(2)), InvalidArgumentError, "out must have the structure of"),
    (lambda c: c.all_reduce("mean", [1.0], out=[2.0]), InvalidArgumentError, r"out\[0\] must be an array to .*; got float"),
    (lambda c: c.all_reduce("mean", np.ones(2), out=np.ones(3)), InvalidArgumentError, "out must be a writable, C-contiguous"),
    (lambda c: c.all_reduce("mean", [1.0], out=[1.0], weight=1), InvalidArgumentError, "out= is for reductions without"),
    (weighted(1.0, 1, "sum"), InvalidArgumentError, "weight= is for MEAN, got SUM: use MEAN"),
    (weighted(1.0, -1), InvalidArgumentError, f"{WEIGHT} that is not negative; got -1"),
    *((weighted(1.0, weight), InvalidArgumentError, WEIGHT) for weight in (np.nan, np.inf, [1, 2], 1j)),
    (weighted(np.ones(1, "f4"), 1e39), InvalidArgumentError, "weight 1e.39 is out of the range of float32, the dtype"),
    (weighted(np.ones(1, "f2"), 1e-50), InvalidArgumentError, "weight 1e-50 .* values of dtype float16 are weighted"),
    (weighted(1.0, "2"), UnsupportedDtypeError, "weight has dtype <U1"),
    (weighted(1, 2), UnsupportedDtypeError, "the weighted mean is not supported for dtype int64"),
    (weighted(True, 2), UnsupportedDtypeError, "the weighted mean is not supported for dtype bool"),
    *((weighted(np.ones(1, ">f8"), w), UnsupportedDtypeError, r"value has non-native byte order \(>f8\)") for w in (2, 0)),
    (weighted(mpistrat.IndexedSlices(np.ones((1, 1)), [0]), 2), NotImplementedError, "the weighted mean of IndexedSlices"),
    (lambda c: c.all_reduce("sum", 1.0, "RING"), InvalidArgumentError, OPTIONS),
    (lambda c: c.start_all_reduce("sum", 1.0, "RING"), InvalidArgumentError, OPTIONS),
    (lambda c: c.all_gather(np.ones(1), 0, "RING"), InvalidArgumentError, OPTIONS),
    (lambda c: c.broadcast(1.0, 0, "RING"), InvalidArgumentError, OPTIONS),
    (lambda c: c.reduce_scatter("sum", np.ones(1), 0, "RING"), InvalidArgumentError, OPTIONS),
    (lambda c: c.all_to_all([1.0], "RING"), InvalidArgumentError, OPTIONS),
    *reducing("median", 1.0, InvalidArgumentError, "unknown reduce_op 'median'"),
    *reducing(None, 1.0, TypeError, "reduce_op must be a ReduceOp or a str"),
    *reducing("sum", {"a": "text"}, UnsupportedDtypeError, r"value\['a'\] has dtype <U4"),
    *reducing("sum", object(), UnsupportedDtypeError, "value has dtype object, .* a value of type object"),
    *reducing("sum", {"b": [np.array([object()])]}, UnsupportedDtypeError, r"value\['b'\]\[0\] has dtype object"),
    *reducing("mean", [True], UnsupportedDtypeError, r"MEAN is not defined for value\[0\] of dtype bool"),
    (lambda c: c.broadcast(1.0, root=1), InvalidArgumentError, "root must be one of 0 to 0; got 1"),
    (lambda c: c.broadcast({"a": "text"}), UnsupportedDtypeError, r"value\['a'\] has dtype <U4"),
    (lambda c: c.reduce_scatter("sum", 1.0), InvalidArgumentError, "reduce_scatter needs arrays with at least one axis"),
    (lambda c: c.reduce_scatter("sum", np.ones(1), axis=1), InvalidArgumentError, "axis 1 is out of range"),
    (lambda c: c.reduce_scatter("median", np.ones(1)), InvalidArgumentError, "unknown reduce_op"),
    (lambda c: c.reduce_scatter(1, np.ones(1)), TypeError, "reduce_op must be"),
    (lambda c: c.all_to_all([np.ones(1)] * 2), InvalidArgumentError, "one array for each of the 1 replicas; got 2"),
    (lambda c: c.all_to_all(["text"]), UnsupportedDtypeError, r"values\[0\] has dtype <U4"),
    (lambda c: c.all_gather(1.0, 0), InvalidArgumentError, "all_gather needs arrays with at least one axis; got a scalar"),
    (lambda c: c.all_gather(np.ones(1), 1), InvalidArgumentError, "axis 1 is out of range"),
    (lambda c: c.all_gather(object(), 0), UnsupportedDtypeError, "value has dtype object"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_what_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        mpistrat.OneDeviceStrategy().run(lambda: call(mpistrat.get_replica_context()))


CALLS = {**IN_REPLICA, "merge_call": lambda context: context.merge_call(print), "update": lambda c: c.update(None, print)}


@pytest.mark.parametrize("method", CALLS)
def test_a_replica_calls_in_its_own_context_only(method):
    strategy = mpistrat.OneDeviceStrategy()
    context = strategy.run(mpistrat.get_replica_context)
    message = rf"ReplicaContext.{method} must be called in the replica context .*, but this is outside all scopes"
    with pytest.raises(RuntimeError, match=rf"{message}(.|\n)*incorrect: (.|\n)*correct: "):
        CALLS[method](context)
    with strategy.scope(), pytest.raises(RuntimeError, match="cross-replica context of OneDeviceStrategy"):
        CALLS[method](context)
    with pytest.raises(RuntimeError, match="must be called in the replica context it belongs to"):
        mpistrat.OneDeviceStrategy().run(CALLS[method], (context,))


def test_a_replica_context_is_entered_and_left_in_order_and_is_of_one_of_the_replicas():
    strategy, other = mpistrat.OneDeviceStrategy(), mpistrat.OneDeviceStrategy()
    context = mpistrat.ReplicaContext(strategy, 0)
    with context as entered:
        assert entered is mpistrat.get_replica_context()
        assert entered.strategy is strategy
        with pytest.raises(RuntimeError, match="must be called outside strategy.run"):
            context.__enter__()
    with pytest.raises(RuntimeError, match="left out of order"):
        context.__exit__(None, None, None)
    with other.scope(), pytest.raises(RuntimeError, match="two strategies cannot be mixed"):
        context.__enter__()
    strategy = mpistrat.OneDeviceStrategy()
    for replica_id in (0, np.array(0), np.int32(0), None):
        assert mpistrat.ReplicaContext(strategy, replica_id).replica_id_in_sync_group == 0
    for replica_id in (1, -1, "0", 0.0, np.array([0, 0])):
        with pytest.raises((InvalidArgumentError, TypeError), match="must be (one of 0 to 0|an int); got"):
            mpistrat.ReplicaContext(strategy, replica_id)
