"""Variable: creation, reading and assigning, in every context, at several replicas; every cell of `tests.variable_matrix`."""

import copy
import pickle

import ml_dtypes
import numpy as np
import pytest

import mpistrat
from mpistrat.communicator.sparse import IndexedSlices
from mpistrat.errors import InvalidArgumentError, UnsupportedDtypeError
from tests.other_arrays import installed, jax_array, tensor
from tests.unit.replicas import on_replicas
from tests.variable_matrix import ALONE, CELLS, METHODS, check_cells, made, of_default_strategy

AGGREGATION = mpistrat.VariableAggregation
SYNCHRONIZATION = mpistrat.VariableSynchronization
SYNCHRONIZATIONS = [SYNCHRONIZATION.ON_WRITE, SYNCHRONIZATION.ON_READ]


def test_a_variable_owns_its_array_and_does_not_keep_the_value_that_it_began_with():
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
    variable = mpistrat.Variable(1.0)
    assert variable.is_initialized()
    with pytest.raises(RuntimeError, match=r"does not keep its initial value(.|\n)*correct: +initial_value = variable.numpy"):
        _ = variable.initial_value


EXPRESSIONS = """
1 - x; 1 / x; 2**x; 7 // x; 7 % x; divmod(x, 2); -x; abs(x); [1.0, 2.0] @ x; x @ x; x.T @ array; x == 2.0; x != array;
x[index]; array[index]; list(x); 3.0 in x; (x.shape, x.dtype, x.size, x.ndim, len(x)); -x / 2 + x @ x - abs(x) ** 2;
np.array(x, np.float32); np.stack([np.ones((2, 2)), x]); np.concatenate([x, [[5.0, 6.0]], x]);
np.clip(x, a_min=0, a_max=x); np.einsum("ij->j", x); np.add.reduce(x, axis=0); np.zeros_like(x); np.where(x > 2, x, 0);
np.copyto(src=x, dst=np.ones((2, 2)))
"""


@pytest.mark.parametrize("kind", ["ON_WRITE", "ON_READ"])
def test_numpy_sees_what_is_read(kind):
    aggregation = AGGREGATION.SUM if kind == "ON_READ" else AGGREGATION.NONE

    def program(strategy):
        table = made(strategy, [[1.0, 2.0], [3.0, 4.0]], synchronization=SYNCHRONIZATION[kind], aggregation=aggregation)
        index = made(strategy, [1, 0])
        factor = strategy.num_replicas_in_sync if kind == "ON_READ" else 1
        array = factor * np.array([[1.0, 2.0], [3.0, 4.0]])
        for text in EXPRESSIONS.strip().split(";"):
            for value in (table, mpistrat.Mirrored(array)):
                result, expected = (eval(text, {"np": np, "index": index, "array": array, "x": x}) for x in (value, array))
                assert type(result) is type(expected), text
                np.testing.assert_equal(result, expected, text)
        array += table
        return array.tolist()

    assert on_replicas(2, program) == [(np.array([[1.0, 2.0], [3.0, 4.0]]) * (4 if kind == "ON_READ" else 2)).tolist()] * 2


def test_the_arrays_of_an_on_read_variable_can_be_combined_in_another_way():
    def program(strategy):
        variable = made(strategy, [0.0], synchronization=SYNCHRONIZATION.ON_READ, aggregation=AGGREGATION.SUM)
        strategy.run(lambda: variable.assign([mpistrat.get_replica_context().replica_id_in_sync_group + 1.0]))
        local = strategy.experimental_local_results(variable)[0]
        ways = [strategy.reduce(op, variable, axis=None) for op in ("sum", "mean", "max")]
        ways += [strategy.reduce("mean", variable, axis=0), strategy.extended.reduce_to("mean", variable, variable)]
        return local.tolist(), [float(np.squeeze(way)) for way in ways], strategy.gather(variable, axis=0).tolist()

    assert on_replicas(3, program) == [([replica + 1], [6, 2, 3, 2, 2], [1, 2, 3]) for replica in range(3)]


@pytest.mark.parametrize(("value", "dtype"), [(6, np.float32), (7, np.int8), (-7, np.int64), (200, np.uint8)])
def test_on_read_sum_reads_back_what_was_assigned(value, dtype):
    def program(strategy):
        variable = made(strategy, np.zeros((), dtype), synchronization=SYNCHRONIZATION.ON_READ, aggregation=AGGREGATION.SUM)
        variable.assign(np.asarray(value, dtype))
        return float(np.asarray(strategy.run(lambda: variable.numpy()).values[0])), float(variable)

    results = on_replicas(3, program)
    assert [total for _, total in results] == [value] * 3
    if value == 6:
        assert [part for part, _ in results] == [2, 2, 2]


@pytest.mark.parametrize(
    ("value", "keywords", "error", "message"),
    [
        (1, {"synchronization": SYNCHRONIZATION.NONE}, InvalidArgumentError, "one of .*AUTO, .*ON_WRITE, .*ON_READ; got"),
        (1, {"synchronization": "ON_READ"}, InvalidArgumentError, "synchronization must be one of"),
        (1, {"aggregation": "SUM"}, InvalidArgumentError, "aggregation must be one of .*NONE, .*MEAN, .*REPLICA; got 'SUM'"),
        (1, {"constraint": 3}, InvalidArgumentError, "n: constraint must be None or a function of a value; got 3"),
        ([[0], [0]], {"shape": (1, 2)}, InvalidArgumentError, r"n must have shape .*; got an initial value of shape \(2, 1\)"),
        ([[0], [0]], {"shape": (None, 1)}, InvalidArgumentError, r"n must have shape .*; got .* of shape \(2, 1\)"),
        ([[0], [0]], {"shape": ()}, InvalidArgumentError, r"n must have shape .*; got .* of shape \(2, 1\)"),
        (True, {"aggregation": AGGREGATION.MEAN}, InvalidArgumentError, "n has dtype bool, which .* a mean: use SUM"),
        (1, {"aggregation": AGGREGATION.MEAN}, InvalidArgumentError, "n has dtype int64, which cannot hold a mean"),
        ([300, -1], {"dtype": np.uint8}, InvalidArgumentError, "'n' has dtype uint8, .* 0 to 255; .* from -1 to 300 would"),
        (["text"], {}, UnsupportedDtypeError, "n has dtype"),
        (1.0, {"dtype": object}, UnsupportedDtypeError, "n has dtype object, which collectives do not support"),
        (1.0, {"dtype": "U4"}, UnsupportedDtypeError, "n has dtype <U4, which collectives do not support"),
        (1.7, {"dtype": int}, UnsupportedDtypeError, r"'n' .* int64, .* value of dtype float64; .*value.astype\('int64'\)"),
        (1j, {"dtype": np.float32}, UnsupportedDtypeError, "'n' has dtype float32, which cannot hold .* dtype complex128"),
        (2, {"dtype": bool}, UnsupportedDtypeError, "'n' has dtype bool, which cannot hold a value of dtype int64"),
    ],
)
def test_bad_arguments_are_refused(value, keywords, error, message):
    with pytest.raises(error, match=message):
        mpistrat.Variable(value, name="n", **keywords)


@pytest.mark.parametrize(("value", "dtype"), [(1, np.float32), (1, np.uint8), (1.5, ml_dtypes.bfloat16), (True, np.int8)])
def test_a_value_takes_another_dtype_of_its_kind(value, dtype):
    variable = mpistrat.Variable(value, dtype=dtype)
    assert (variable.dtype, float(variable)) == (dtype, value)
    variable.assign(np.asarray(value)).assign_add(np.ones((), type(value)))
    assert (variable.dtype, float(variable)) == (dtype, value + 1)


def test_a_variable_belongs_to_its_strategy_and_is_updated_in_its_run_only():
    first, second = mpistrat.OneDeviceStrategy(), mpistrat.OneDeviceStrategy()
    variable, plain = made(first, 1.0), mpistrat.Variable(1.0)
    assert (variable.distribute_strategy, plain.distribute_strategy) == (first, mpistrat.get_strategy())
    with second.scope():
        for use in (lambda: variable.assign(2.0), lambda: variable + 1, lambda: float(variable), lambda: plain.assign(2.0)):
            with pytest.raises(RuntimeError, match="two strategies cannot be mixed"):
                use()
    assert first.run(lambda: variable + plain) == 2  # a plain one can be read anywhere

    def program(strategy):
        weights, plain = made(strategy, 1.0, name="w"), mpistrat.Variable(1.0)
        message = r"ctx.update of Variable\('w'.*must be called inside strategy.run(.|\n)*incorrect: (.|\n)*correct: +def step"
        with pytest.raises(RuntimeError, match=message):
            mpistrat.get_replica_context().update(weights, np.add, (1.0,))
        mpistrat.get_replica_context().update(plain, np.add, (1.0,))
        unchanged = float(weights)
        strategy.run(lambda: mpistrat.get_replica_context().update(weights, np.add, (1.0,)))
        return unchanged, float(weights), float(plain)

    assert on_replicas(2, program) == [(1, 2, 2)] * 2


@pytest.mark.parametrize(("library", "make"), [("torch", tensor), ("jax", jax_array)])
def test_arrays_of_other_libraries_come_in(library, make):
    module = installed(library)
    variable = mpistrat.Variable(make(module, np.array([1, 2], ml_dtypes.bfloat16)), dtype=np.float32)
    variable.assign_add(make(module, np.ones(2, np.float32)))
    variable.scatter_sub(IndexedSlices(make(module, np.ones(1, np.float32)), make(module, np.ones(1, np.int32))))
    assert (variable.dtype, variable.numpy().tolist()) == (np.float32, [2, 2])


def test_arguments_that_tensorflow_users_pass():
    variable = mpistrat.Variable(np.zeros((2, 1)), False, "w", np.float32, abs, None, None, shape=[2, 1])
    assert (variable.trainable, variable.name, variable.dtype, variable.shape) == (False, "w", np.float32, (2, 1))
    assert (variable.synchronization, variable.aggregation) == (SYNCHRONIZATION.ON_WRITE, AGGREGATION.NONE)
    assert variable.values[0].tolist() == variable.value.tolist() == [[0], [0]]
    assert (variable.constraint, mpistrat.Variable(1.0).constraint) == (abs, None)
    assert float(mpistrat.Variable(-1.0, constraint=abs)) == -1
    meant = mpistrat.Variable(np.zeros(3), name="w", aggregation=AGGREGATION.MEAN)
    assert repr(meant) == "Variable('w', float64 (3,), ON_WRITE MEAN)"
    for synchronization, trainable, is_trainable in ((None, None, True), ("ON_READ", None, False), ("ON_READ", True, True)):
        kind = SYNCHRONIZATION[synchronization] if synchronization else None
        assert mpistrat.Variable(1.0, trainable, synchronization=kind).trainable is is_trainable


def test_a_deep_copy_is_another_variable_of_the_same_strategy():
    strategy, other = mpistrat.OneDeviceStrategy(), mpistrat.OneDeviceStrategy()
    variable = made(strategy, [1.0], name="w", aggregation=AGGREGATION.SUM)
    with strategy.scope():
        copied = copy.deepcopy({"model": variable, "tied": [variable]})
    assert copied["model"] is copied["tied"][0]
    copied["model"].assign_add([1.0])
    assert (variable.numpy().tolist(), copied["model"].numpy().tolist(), copied["model"].values[0].tolist()) == ([1], [2], [2])
    assert (repr(copied["model"]), copied["model"].distribute_strategy) == (repr(variable), strategy)
    with pytest.raises(ValueError, match="read-only"):
        copied["model"].value[0] = 5
    with other.scope(), pytest.raises(RuntimeError, match=r"copy.deepcopy of a variable(.|\n)*two strategies cannot be mixed"):
        copy.deepcopy(variable)


@pytest.mark.parametrize("strategy", [None, mpistrat.OneDeviceStrategy()])
@pytest.mark.parametrize("synchronization", SYNCHRONIZATIONS)
def test_an_unpickled_variable_is_read_as_it_was_assigned(strategy, synchronization):
    owner = strategy or mpistrat.get_strategy()
    variable = made(owner, [1.0], synchronization=synchronization, aggregation=AGGREGATION.MEAN)
    found = pickle.loads(pickle.dumps(variable)).assign_add([1.0])
    assert (found.numpy().tolist(), found.values[0].tolist(), variable.numpy().tolist()) == ([2], [2], [1])
    assert (found.distribute_strategy is owner) == (strategy is None)  # the default one is that of each process
    with pytest.raises(ValueError, match="read-only"):
        found.values[0][0] = 5


ROWS = np.arange(6.0).reshape(3, 2)


FIRST_ROW = {"add": [3, 5], "sub": [-3, -3], "mul": [0, 3], "div": [0, 1 / 3], "min": [0, 1], "max": [2, 3], "update": [2, 3]}


@pytest.mark.parametrize("kind", FIRST_ROW)
def test_rows_of_one_index_are_applied_one_after_the_other(kind):
    variable = mpistrat.Variable(ROWS)
    getattr(variable, f"scatter_{kind}")(IndexedSlices([[1.0, 1.0], [2.0, 3.0]], [0, 0]))
    np.testing.assert_allclose(variable.numpy(), [FIRST_ROW[kind], *ROWS[1:].tolist()], rtol=1e-15)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_rows_of_half_precision_are_applied_in_float32(dtype):
    variable = mpistrat.Variable(np.full(2, 256), dtype=dtype)
    variable.scatter_add(IndexedSlices(np.full(8, 0.5, dtype), [1] * 8))
    assert variable.numpy().astype(np.float32).tolist() == [256, 260]  # 256 + 0.5 is 256 in bfloat16


@pytest.mark.parametrize("dtype", [np.int8, np.uint32, np.int64, np.bool_, np.complex64])
def test_rows_of_other_dtypes(dtype):
    variable = mpistrat.Variable(np.zeros(3, dtype))
    variable.scatter_update(IndexedSlices(np.ones(1, dtype), [2])).scatter_add(IndexedSlices(np.ones(1, dtype), [1]))
    assert variable.numpy().tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("start", "method", "delta", "kind", "message"),
    [
        (ROWS, "scatter_add", ROWS, TypeError, r"takes IndexedSlices; got ndarray(.|\n)*correct: +variable.scatter_add\(mpi"),
        (ROWS, "scatter_add", IndexedSlices([[1.0]], [0]), InvalidArgumentError, r"rows of shape \(1,\) cannot be scattered"),
        (1.0, "scatter_add", IndexedSlices([1.0], [0]), InvalidArgumentError, r"has shape \(\); rows of shape \(\)"),
        (ROWS, "scatter_add", IndexedSlices([[1.0, 1.0]], [3]), InvalidArgumentError, "index 3 is out of range .* 0 to 2 are"),
        (ROWS[:0], "scatter_add", IndexedSlices([[1.0, 1.0]], [0]), InvalidArgumentError, "index 0 is .* it has no rows"),
        ([1, 2], "scatter_add", IndexedSlices([0.5], [0]), UnsupportedDtypeError, r"hold .* float64; .*astype\('int64'\)"),
        (np.int8([0]), "scatter_update", IndexedSlices([200], [0]), InvalidArgumentError, "-128 to 127; .* from 200 to 200"),
        (np.uint8([0, 0]), "assign", [300, -1], InvalidArgumentError, "0 to 255; numbers from -1 to 300 would wrap"),
        (np.int16([0, 0]), "assign_add", [70000, 1], InvalidArgumentError, "-32768 to 32767; numbers from 1 to 70000"),
        ([1, 2], "assign_add", 1, InvalidArgumentError, r"'n', int64 \(2,\)\) has shape .*; a value of shape \(\)"),
        ([1, 2], "assign", [0.5, 0.5], UnsupportedDtypeError, "cannot hold a value of dtype float64"),
        ([1, 2], "scatter_div", IndexedSlices([1], [0]), UnsupportedDtypeError, "scatter_div is not defined for int64"),
        ([True], "scatter_sub", IndexedSlices([True], [0]), UnsupportedDtypeError, "scatter_sub is not defined for bool"),
        ([1j], "scatter_min", IndexedSlices([1j], [0]), UnsupportedDtypeError, "complex numbers have no order"),
        ([True], "assign_sub", [True], UnsupportedDtypeError, "assign_sub is not defined for bool"),
        (ROWS, "sparse_read", [3], InvalidArgumentError, r"n.*\.sparse_read: .* along axis 0 must be 0 to 2; got 3 to 3"),
        (ROWS, "sparse_read", [-1, 1], InvalidArgumentError, "must be 0 to 2; got -1 to 1"),
        (ROWS, "sparse_read", [0.5], UnsupportedDtypeError, "indices must be integers; got dtype float64"),
        (ROWS, "gather_nd", [[0, 2]], InvalidArgumentError, "indices along axis 1 must be 0 to 1; got 2 to 2"),
        (ROWS, "gather_nd", 0, InvalidArgumentError, r"holds up to 2 indices, .*; got indices of shape \(\)"),
        (ROWS, "gather_nd", [[0, 1, 0]], InvalidArgumentError, r"got indices of shape \(1, 3\)"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(start, method, delta, kind, message):
    variable = mpistrat.Variable(start, name="n")
    with pytest.raises(kind, match=message) as caught:
        getattr(variable, method)(*(delta if isinstance(delta, tuple) else [delta]))
    assert caught.type is kind
    assert variable.numpy().tolist() == np.asarray(start).tolist()


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("kind", ["ON_WRITE", "ON_READ"])
def test_read_value_does_not_change_with_the_variable(num_replicas, kind):
    def program(strategy):
        variable = made(strategy, [1.0, 2.0], synchronization=SYNCHRONIZATION[kind], aggregation=AGGREGATION.MEAN)
        before, inside = variable.read_value(), strategy.run(lambda: variable.read_value())
        variable.assign([7.0, 7.0])
        held = strategy.experimental_local_results(inside)[0]
        held += 1  # it is the program's own
        return before.tolist(), held.tolist(), variable.read_value().tolist()

    assert on_replicas(num_replicas, program) == [([1, 2], [2, 3], [7, 7])] * num_replicas


@pytest.mark.parametrize("kind", ["ON_WRITE", "ON_READ"])
def test_rows_and_entries_are_read(kind):
    def program(strategy):
        array = np.arange(12.0).reshape(3, 2, 2)
        table = made(strategy, array, synchronization=SYNCHRONIZATION[kind], aggregation=AGGREGATION.SUM)
        array = array * (strategy.num_replicas_in_sync if kind == "ON_READ" else 1)
        for found, expected in (
            (table.sparse_read([2, 0, 2], name="rows"), array[[2, 0, 2]]),
            (table.sparse_read(1), array[1]),
            (table.sparse_read([[0], [1]]), array[[[0], [1]]]),
            (table.sparse_read([]), array[:0]),
            (table.gather_nd([[2, 1], [0, 0]], name="entries"), array[[2, 0], [1, 0]]),
            (table.gather_nd([1]), array[1]),
            (table.gather_nd([[[1, 0, 1]]]), array[[[1]], [[0]], [[1]]]),
            (table.gather_nd([1, 0, 1]), array[1, 0, 1]),
            (table.gather_nd([]), array),
        ):
            assert isinstance(found, np.ndarray)
            np.testing.assert_array_equal(found, expected)
        taken = table.sparse_read([0])
        taken += 1
        held = strategy.experimental_local_results(strategy.run(lambda: table.sparse_read([1])))[0]
        return held.tolist(), table.numpy().tolist() == array.tolist()

    assert on_replicas(2, program) == [([[[4, 5], [6, 7]]], True)] * 2


def test_a_variable_of_no_elements_is_read_and_scattered_into():
    table = mpistrat.Variable(np.zeros((3, 0)))
    assert table.scatter_add(IndexedSlices(np.zeros((0, 0)), np.zeros(0, np.int64))).shape == (3, 0)
    assert table.sparse_read([2, 2]).shape == (2, 0)
    assert table.gather_nd(np.zeros((0, 2), int)).shape == (0,)
    assert float(mpistrat.Variable(2.0).gather_nd(np.zeros(0, int))) == 2


def test_assignments_take_the_other_arguments_of_tensorflow():
    variable = mpistrat.Variable([1.0, 2.0])
    for method in (variable.assign, variable.assign_add, variable.assign_sub):
        assert method([1.0, 1.0], use_locking=True, name="assign", read_value=True) is variable
        assert method([1.0, 1.0], False, None, False) is None
    assert variable.numpy().tolist() == [1 + 2 - 2 - 0, 1]
    slices = IndexedSlices([2.0], [1])
    for kind in ("add", "sub", "mul", "div", "min", "max", "update"):
        assert getattr(variable, f"scatter_{kind}")(slices, use_locking=True, name="scatter") is variable
        assert getattr(variable, f"scatter_{kind}")(slices, False, None) is variable


@pytest.mark.parametrize("synchronization", ["ON_WRITE", "ON_READ"])
def test_a_per_replica_value_from_outside_stands_for_the_part_of_this_replica(synchronization):
    def program(strategy):
        number = strategy.rank + 1.0
        value, rows = mpistrat.PerReplica(np.array([number])), mpistrat.PerReplica(IndexedSlices([number], [0]))
        variable = made(strategy, [0.0], synchronization=SYNCHRONIZATION[synchronization], aggregation=AGGREGATION.SUM)
        changes = [lambda: variable.assign(value), lambda: variable.assign_add(value), lambda: variable.assign_sub(value)]
        if synchronization == "ON_WRITE":
            equal = mpistrat.PerReplica(np.array([7.0]))  # in a merge call it is the value of this replica
            merge = lambda: mpistrat.get_replica_context().merge_call(lambda _: variable.assign(equal))  # noqa: E731
            changes += [lambda: variable.scatter_add(rows), merge]
        return [strategy.run(change) and float(variable.numpy()[0]) for change in changes]

    assert on_replicas(3, program) == [[6, 12, 6, 12, 7] if synchronization == "ON_WRITE" else [6, 12, 6]] * 3


def test_no_variable_is_made_in_a_scope_inside_that_of_the_default_strategy():
    strategy = mpistrat.OneDeviceStrategy()
    for _ in range(2):
        with mpistrat.get_strategy().scope():
            assert float(mpistrat.Variable(1.0)) == 1
            with strategy.scope(), pytest.raises(RuntimeError, match=r"two strategies cannot be mixed(.|\n)*correct: "):
                mpistrat.Variable(1.0)
    assert made(strategy, 1.0).distribute_strategy is strategy


def test_cells_of_one_device_and_outside_all_scopes_of_which_none_is_missing():
    check_cells(mpistrat.OneDeviceStrategy(), CELLS)
    check_cells(mpistrat.get_strategy(), list(map(of_default_strategy, CELLS)))
    aggregations = len(mpistrat.VariableAggregation)
    operations, contexts = len(METHODS) + 1, len(["run", "scope", "update"])
    assert len({str(cell) for cell in CELLS}) == len(CELLS) == operations * contexts * len(SYNCHRONIZATIONS) * aggregations
    assert operations == len(ALONE)
