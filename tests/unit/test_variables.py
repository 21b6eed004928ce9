"""Variable: creation, reading and assigning, in every context, at several replicas."""

import ml_dtypes
import numpy as np
import pytest

import mpistrat
from mpistrat.context.values import PerReplica
from mpistrat.errors import InvalidArgumentError, UnsupportedDtypeError
from tests.unit.replicas import on_replicas

AGGREGATION = mpistrat.VariableAggregation
SYNCHRONIZATION = mpistrat.VariableSynchronization


def made(strategy, *arguments, **keywords):
    with strategy.scope():
        return mpistrat.Variable(*arguments, **keywords)


def test_the_initial_value_is_that_of_replica_zero():
    def program(strategy):
        variable = made(strategy, lambda: np.full(2, strategy.extended.collectives.rank + 5.0))
        return variable.numpy().tolist()

    assert on_replicas(3, program) == [[5, 5]] * 3


def test_outside_all_scopes_a_variable_is_plain():
    variable = mpistrat.Variable([1.0, 2.0], name="plain", trainable=False)
    assert variable.distribute_strategy is mpistrat.get_strategy()
    assert (variable.name, variable.trainable) == ("plain", False)
    assert variable.assign([3, 4]).assign_add([1, 1]).assign_sub([0, 2]) is variable
    assert variable.numpy().tolist() == [4, 3]


def test_a_variable_owns_its_array():
    initial = np.zeros(2)
    variable = mpistrat.Variable(initial)
    variable.assign(np.ones(2))
    assert initial.tolist() == [0, 0]
    copy = variable.numpy()
    copy += 1
    assert variable.numpy().tolist() == [1, 1]
    with pytest.raises(ValueError, match="read-only"):
        variable.value[0] = 5
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(variable)[0] = 5


def test_a_variable_can_be_used_like_an_array():
    variable = mpistrat.Variable(np.arange(6).reshape(2, 3), dtype=np.float32)
    assert (variable.shape, variable.dtype, variable.size, variable.ndim, len(variable)) == ((2, 3), np.float32, 6, 2, 2)
    assert variable[1, 0] == 3
    assert (variable @ np.ones(3, np.float32)).tolist() == [3, 12]
    assert (2 * variable - variable).tolist() == variable.numpy().tolist()
    assert np.sqrt(variable).dtype == np.float32
    assert np.sum(variable) == 15
    assert np.concatenate([variable, variable]).shape == (4, 3)
    assert (variable > 4).sum() == 1
    assert float(mpistrat.Variable(2.0)) == 2.0


def test_augmented_assignment_does_not_lose_the_variable():
    variable = mpistrat.Variable(1.0)
    with pytest.raises(TypeError, match="cannot be the target of an in-place operation"):
        variable += 1


def test_scalar_variables():
    variable = mpistrat.Variable(0, dtype=np.int64)
    variable.assign_add(2)
    variable.assign(variable + 1)
    assert (variable.shape, int(variable)) == ((), 3)


@pytest.mark.parametrize(
    ("aggregation", "op", "expected"),
    [
        (AGGREGATION.SUM, "assign", 6.0),
        (AGGREGATION.MEAN, "assign", 2.0),
        (AGGREGATION.ONLY_FIRST_REPLICA, "assign", 1.0),
        (AGGREGATION.SUM, "assign_add", 16.0),
        (AGGREGATION.MEAN, "assign_sub", 8.0),
        (AGGREGATION.ONLY_FIRST_REPLICA, "assign_sub", 9.0),
    ],
)
def test_on_write_assigned_by_replicas(aggregation, op, expected):
    def program(strategy):
        variable = made(strategy, 10.0, aggregation=aggregation)
        strategy.run(lambda: getattr(variable, op)(mpistrat.get_replica_context().replica_id_in_sync_group + 1.0))
        return float(variable)

    assert on_replicas(3, program) == [expected] * 3


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_on_write_without_aggregation_cannot_be_assigned_by_replicas(num_replicas):
    def program(strategy):
        variable = made(strategy, 10.0, name="w")
        strategy.run(lambda: variable.assign(1.0))

    message = (
        r"Variable\('w', float64 \(\)\) has aggregation NONE(.|\n)*correct: .*aggregation=mpistrat.VariableAggregation.MEAN"
    )
    with pytest.raises(InvalidArgumentError, match=message):
        on_replicas(num_replicas, program)


def test_on_write_assigned_outside_run():
    def program(strategy):
        variable = made(strategy, 10.0)
        variable.assign(1.0)
        with strategy.scope():
            variable.assign_add(2.0)
        strategy.run(lambda: mpistrat.get_replica_context().merge_call(lambda _: variable.assign_sub(0.5)))
        return float(variable)

    assert on_replicas(2, program) == [2.5, 2.5]


def test_per_replica_values_cannot_be_assigned():
    variable = mpistrat.Variable(1.0)
    with pytest.raises(TypeError, match=r'got a per-replica value(.|\n)*correct: +variable.assign\(strategy.reduce\("mean"'):
        variable.assign(PerReplica(1.0))


@pytest.mark.parametrize(
    ("aggregation", "expected"), [(AGGREGATION.SUM, 36.0), (AGGREGATION.MEAN, 12.0), (AGGREGATION.ONLY_FIRST_REPLICA, 11.0)]
)
def test_on_read_is_combined_when_it_is_read(aggregation, expected):
    def program(strategy):
        variable = made(strategy, 10.0, synchronization=SYNCHRONIZATION.ON_READ, aggregation=aggregation)
        assert not variable.trainable

        def step():
            replica = mpistrat.get_replica_context().replica_id_in_sync_group
            variable.assign_add(replica + 1.0)
            assert float(variable) == 11.0 + replica

        strategy.run(step)
        return float(variable)

    assert on_replicas(3, program) == [expected] * 3


@pytest.mark.parametrize(("value", "dtype"), [(6, np.float32), (7, np.int8), (-7, np.int64), (200, np.uint8), (True, np.bool_)])
def test_on_read_sum_reads_back_what_was_assigned(value, dtype):
    def program(strategy):
        variable = made(strategy, np.zeros((), dtype), synchronization=SYNCHRONIZATION.ON_READ, aggregation=AGGREGATION.SUM)
        variable.assign(np.asarray(value, dtype))
        return float(np.asarray(strategy.run(lambda: variable.numpy()).values[0])), float(variable)

    results = on_replicas(3, program)
    assert [total for _, total in results] == [value] * 3
    if value == 6:
        assert [part for part, _ in results] == [2, 2, 2]


def test_on_read_outside_run():
    def mean(strategy):
        variable = made(strategy, 0.0, synchronization=SYNCHRONIZATION.ON_READ, aggregation=AGGREGATION.MEAN)
        variable.assign(4.0)
        variable.assign_add(1.0)
        return float(variable)

    def total(strategy):
        variable = made(strategy, 0.0, synchronization=SYNCHRONIZATION.ON_READ, aggregation=AGGREGATION.SUM)
        variable.assign_add(1.0)

    def none(strategy):
        return float(made(strategy, 0.0, synchronization=SYNCHRONIZATION.ON_READ))

    assert on_replicas(2, mean) == [5, 5]
    with pytest.raises(InvalidArgumentError, match=r"Variable\(.*ON_READ SUM\).assign_add outside strategy.run is undefined"):
        on_replicas(2, total)
    with pytest.raises(InvalidArgumentError, match="has aggregation NONE"):
        on_replicas(2, none)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"synchronization": SYNCHRONIZATION.NONE}, "synchronization must be one of .*AUTO, .*ON_WRITE, .*ON_READ; got"),
        ({"synchronization": "ON_READ"}, "synchronization must be one of"),
        ({"aggregation": "SUM"}, "aggregation must be one of .*NONE, .*SUM, .*MEAN, .*ONLY_FIRST_REPLICA; got 'SUM'"),
        ({"synchronization": SYNCHRONIZATION.ON_READ, "trainable": True}, "Variable: .* cannot be trainable"),
        ({"aggregation": AGGREGATION.MEAN}, "has dtype int64, whose mean it cannot hold"),
    ],
)
def test_bad_arguments_are_refused(keywords, message):
    with pytest.raises(InvalidArgumentError, match=message):
        mpistrat.Variable(1, **keywords)


def test_values_that_do_not_fit_are_refused():
    variable = mpistrat.Variable(np.zeros(2, np.int32), name="n")
    with pytest.raises(InvalidArgumentError, match=r"Variable\('n', int32 \(2,\)\) has shape \(2,\); a value of shape \(\)"):
        variable.assign_add(1)
    with pytest.raises(UnsupportedDtypeError, match="a value of dtype float64 would lose its kind"):
        variable.assign([0.5, 0.5])
    with pytest.raises(UnsupportedDtypeError, match="n has dtype"):
        mpistrat.Variable(["text"], name="n")


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (1.0, object, "n has dtype object, which no collective can carry"),
        (1.0, "U4", "n has dtype <U4, which no collective can carry"),
        (1.7, int, r"n is to have dtype int64; an initial value of dtype float64 .*value.astype\('int64'\)"),
        (1j, np.float32, "n is to have dtype float32; an initial value of dtype complex128 would lose its kind"),
        (2, bool, "n is to have dtype bool; an initial value of dtype int64 would lose its kind"),
    ],
)
def test_an_initial_value_keeps_its_kind(value, dtype, message):
    with pytest.raises(UnsupportedDtypeError, match=message):
        mpistrat.Variable(value, name="n", dtype=dtype)


@pytest.mark.parametrize(("value", "dtype"), [(1, np.float32), (1, np.uint8), (1.5, ml_dtypes.bfloat16), (True, np.int8)])
def test_an_initial_value_takes_another_dtype_of_its_kind(value, dtype):
    variable = mpistrat.Variable(value, dtype=dtype)
    assert (variable.dtype, float(variable)) == (dtype, value)
    assert float(variable.assign(value)) == value


def test_the_length_of_an_on_read_variable_is_known_without_reading_it():
    def program(strategy):
        variable = made(strategy, np.zeros((3, 2)), synchronization=SYNCHRONIZATION.ON_READ)
        return len(variable)

    assert on_replicas(2, program) == [3, 3]  # reading it is refused: its aggregation is NONE


def test_a_variable_of_a_strategy_is_updated_in_its_run_only():
    def program(strategy):
        weights = made(strategy, 1.0, name="w")
        message = (
            r"ctx.update of Variable\('w'.*must be called inside strategy.run(.|\n)*incorrect: .*(.|\n)*correct: +def step"
        )
        with pytest.raises(RuntimeError, match=message):
            mpistrat.get_replica_context().update(weights, np.add, (1.0,))
        unchanged = float(weights)
        strategy.run(lambda: mpistrat.get_replica_context().update(weights, np.add, (1.0,)))
        return unchanged, float(weights)

    assert on_replicas(2, program) == [(1, 2)] * 2


def test_a_plain_variable_is_updated_outside_all_scopes():
    variable = mpistrat.Variable(1.0)
    mpistrat.get_replica_context().update(variable, np.add, (1.0,))
    assert float(variable) == 2


def test_a_variable_belongs_to_its_strategy():
    first, second = mpistrat.OneDeviceStrategy(), mpistrat.OneDeviceStrategy()
    variable = made(first, 1.0)
    assert variable.distribute_strategy is first
    with second.scope():
        for use in (lambda: variable.assign(2.0), lambda: variable + 1, lambda: float(variable)):
            with pytest.raises(RuntimeError, match="two strategies cannot be mixed"):
                use()
    assert first.run(lambda: variable + 1) == 2


def test_a_plain_variable_can_be_read_under_a_strategy_but_not_assigned():
    variable = mpistrat.Variable(1.0)
    strategy = mpistrat.OneDeviceStrategy()
    assert strategy.run(lambda: variable + 1) == 2
    with pytest.raises(RuntimeError, match="two strategies cannot be mixed"):
        strategy.run(lambda: variable.assign(2.0))


def test_variables_of_half_precision():
    variable = mpistrat.Variable(np.ones(2), dtype=ml_dtypes.bfloat16)
    variable.assign(np.full(2, 1.5, np.float32))
    variable.assign_add(np.ones(2))
    assert (variable.dtype, np.asarray(variable, np.float32).tolist()) == (ml_dtypes.bfloat16, [2.5, 2.5])


def test_names_are_for_humans():
    variable = mpistrat.Variable(np.zeros((2, 3)), name="w", aggregation=AGGREGATION.MEAN)
    assert repr(variable) == "Variable('w', float64 (2, 3), ON_WRITE MEAN)"
