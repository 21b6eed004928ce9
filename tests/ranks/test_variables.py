"""Variables over real collectives: every cell of their behaviour, and equal everywhere, whatever the ranks start from.

The cells are those of `tests.variable_matrix`; calls are compared in strict mode.
"""

import copy

import numpy as np
import pytest

import mpistrat
from mpistrat.errors import AgreementError, InvalidArgumentError
from tests.launches import needs_ranks, on_ranks
from tests.variable_matrix import CELLS, METHODS, check_cell, check_cells, check_per_replica, declared, made, of_central_storage

pytestmark = on_ranks(1, 3)

NONE, SUM, MEAN, ONLY_FIRST_REPLICA = mpistrat.VariableAggregation
SYNCHRONIZATIONS = [mpistrat.VariableSynchronization.ON_WRITE, mpistrat.VariableSynchronization.ON_READ]


@pytest.mark.parametrize("where", ["run", "scope", "update"])
def test_cells(strategy, where):
    check_cells(strategy, [cell for cell in CELLS if cell.where == where])


@pytest.mark.parametrize("where", ["scope", "update"])
def test_per_replica_values_outside_run(strategy, where):
    for method in METHODS:
        for synchronization in SYNCHRONIZATIONS:
            check_per_replica(strategy, method, synchronization, where)


def test_cells_of_central_storage(comm, monkeypatch):
    monkeypatch.setenv("MPISTRAT_VIRTUAL_NODES", f"1x{comm.size}")
    strategy = mpistrat.experimental.CentralStorageStrategy(parameter_device=f"rank:{comm.size - 1}")
    for cell in CELLS:
        if cell.synchronization is mpistrat.VariableSynchronization.ON_WRITE:
            check_cell(strategy, of_central_storage(cell))
    variable = made(strategy, 0.0)
    assert float(variable.assign(comm.rank)) == comm.size - 1  # what the rank passed that keeps the variable
    strategy.close()


def test_replicas_scatter_different_numbers_of_rows(comm, strategy):
    table = made(strategy, np.zeros((comm.size + 1, 2), np.float32), aggregation=SUM)
    # replica r adds r + 1 to each of the rows 1 … r; replica 0 has none
    rows = np.arange(1, comm.rank + 1)
    strategy.run(lambda: table.scatter_add(mpistrat.IndexedSlices(np.full((len(rows), 2), comm.rank + 1.0), rows)))
    expected = [0.0] + [float(sum(range(row + 1, comm.size + 1))) for row in range(1, comm.size + 1)]
    assert table.numpy()[:, 1].tolist() == expected


@needs_ranks(2)
@pytest.mark.parametrize("strict", [False, True])
def test_replicas_without_aggregation_that_change_a_variable_differently_all_raise(comm, strategy, strict):
    strategy.extended.communicator.is_strict = strict
    variable = declared(strategy, mpistrat.VariableSynchronization.ON_WRITE, NONE)
    number = 1.0 + (comm.rank == comm.size - 1)
    for method in METHODS:
        value = mpistrat.IndexedSlices([number], [0]) if method.startswith("scatter") else np.full(3, number)
        message = rf"has aggregation NONE(.|\n)*rank {comm.size - 1}: Variable.*\.{method} of (.|\n)*correct: .*aggregation="
        with pytest.raises(AgreementError, match=message):
            strategy.run(lambda method=method, value=value: getattr(variable, method)(value))
        assert comm.allgather(variable.numpy().tolist()) == [[9, 4, 16]] * comm.size, method


@needs_ranks(2)
@pytest.mark.parametrize("synchronization", SYNCHRONIZATIONS)
def test_ranks_must_assign_equal_values_outside_run(comm, strategy, synchronization):
    variable = declared(strategy, synchronization, ONLY_FIRST_REPLICA)
    with pytest.raises(AgreementError, match=r"rank 0: Variable\('v', .*\).assign of float64 \(3,\) \[0\., 0\., 0\.\]"):
        variable.assign(np.full(3, float(comm.rank)))
    with pytest.raises(AgreementError, match="ranks made different calls"):
        variable.assign_add(np.full(3, float(comm.rank)))
    assert comm.allgather(variable.numpy().tolist()) == [[9, 4, 16]] * comm.size


@needs_ranks(2)
def test_ranks_must_change_the_same_variable_in_the_same_way_and_raise_where_one_cannot(comm, strategy):
    with strategy.scope():
        first, second = (mpistrat.Variable(0.0, name="v", aggregation=SUM) for _ in range(2))
        copied = copy.deepcopy(first)
    last = comm.rank == comm.size - 1
    for other, number in ((second, "2"), (copied, "1, copied")):
        with pytest.raises(AgreementError, match=rf"\.assign of variable 1\n(.|\n)*\.assign of variable {number}"):
            strategy.run(lambda other=other: (other if last else first).assign(1.0))
    with pytest.raises(AgreementError, match=r"\.assign_add of (.|\n)*\.assign_sub of"):
        strategy.run(lambda: first.assign_sub(1.0) if last else first.assign_add(1.0))
    assert (float(first), float(second)) == (0, 0)
    with strategy.scope():
        variable = mpistrat.Variable(np.zeros(2), name="v", aggregation=SUM)
        table = mpistrat.Variable(np.zeros((2, 2)), name="t", aggregation=SUM)
    last = comm.rank == comm.size - 1
    error, message = (InvalidArgumentError, "a value of shape") if last else (AgreementError, r"assign, which failed: Inv")
    for run in (strategy.run, lambda fn: fn()):
        with pytest.raises(error, match=message):
            run(lambda: variable.assign(np.zeros(3 if last else 2)))
    error, message = (InvalidArgumentError, "index 9 is out of range") if last else (AgreementError, "which failed: Inv")
    with pytest.raises(error, match=message):
        strategy.run(lambda: table.scatter_add(mpistrat.IndexedSlices(np.zeros((1, 2)), [9 if last else 0])))
    assert comm.allreduce(1) == comm.size


def load():
    raise OSError("the disk is gone")


@needs_ranks(2)
def test_ranks_must_make_the_same_variables(comm, strategy):
    last = comm.rank == comm.size - 1
    with strategy.scope():
        with pytest.raises(AgreementError, match=r"Variable\('w', float64 \(2,\), ON_WRITE, NONE, trainable=True\)"):
            mpistrat.Variable(np.zeros(3 if last else 2), name="w")
        with pytest.raises(AgreementError, match="ON_WRITE, MEAN, trainable"):
            mpistrat.Variable(np.zeros(2), name="w", aggregation=SUM if last else MEAN)
        for wrong, error, message in ((np.array(["text"]), TypeError, "w has dtype"), (load, OSError, "the disk is gone")):
            with pytest.raises(error if last else AgreementError, match=message) as caught:
                mpistrat.Variable(wrong if last else np.zeros(2), name="w")
            assert last or "Variable(name='w'), which failed: " in str(caught.value)
        assert float(mpistrat.Variable(2.0)) == 2, "the numbers of later ones are equal"


def test_the_initial_value_is_that_of_rank_zero(comm, strategy):
    with strategy.scope():
        variable = mpistrat.Variable(np.random.default_rng(comm.rank).normal(size=(3, 4)), dtype=np.float32)
        from_callable = mpistrat.Variable(lambda: np.full((), comm.rank, np.int64))
    np.testing.assert_array_equal(variable, np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32))
    assert int(from_callable) == 0


@pytest.mark.parametrize("kind", ["ON_WRITE", "ON_READ"])
def test_all_reduce_of_a_variable_combines_the_arrays_of_the_replicas(comm, strategy, kind):
    with strategy.scope():
        synchronization = mpistrat.VariableSynchronization[kind]
        variable = mpistrat.Variable(np.arange(3.0), synchronization=synchronization, aggregation=SUM)
    total = strategy.run(lambda: mpistrat.get_replica_context().all_reduce("sum", [variable]))
    mean = strategy.run(lambda: mpistrat.get_replica_context().all_reduce("mean", variable))
    assert strategy.experimental_local_results(total)[0][0].tolist() == [0, comm.size, 2 * comm.size]
    assert strategy.experimental_local_results(mean)[0].tolist() == [0, 1, 2]


def apply_gradients(strategy, gradients_and_variables, apply, rate, name=None):
    assert name is None
    for gradient, variable in gradients_and_variables:
        strategy.extended.update(variable, apply, (gradient,), {"rate": rate}, group=False)
        variable.assign_sub(gradient)
        strategy.extended.update_non_slot(None, lambda g: None, (gradient,))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("num_elements", [2, 1 << 18])
def test_an_optimizer_updates_by_what_replicas_have_reduced(comm, strategy, strict, num_elements):
    strategy.extended.communicator.is_strict = strict
    variable = made(strategy, np.zeros(num_elements))

    def step():
        context = mpistrat.get_replica_context()
        gradient = context.all_reduce("sum", np.full(num_elements, comm.rank + 1.0))
        pairs, apply = [(gradient, variable)], lambda v, g, rate: v.assign_sub(rate * g)
        context.merge_call(apply_gradients, args=(pairs, apply, 0.5), kwargs={"name": None})

    strategy.run(step)
    strategy.extended.communicator.barrier()
    assert set(variable.numpy()) == {-1.5 * comm.size * (comm.size + 1) / 2}


@needs_ranks(2)
@pytest.mark.parametrize("num_elements", [2, 1 << 18])
@pytest.mark.parametrize("method", ["update", "update in run", "update_non_slot", "assign_sub"])
def test_an_update_that_differs_between_replicas_is_found_afterwards(comm, strategy, method, num_elements):
    variable = made(strategy, np.zeros(num_elements))

    def apply(strategy, gradient):
        if method == "assign_sub":
            variable.assign_sub(gradient)
        elif method == "update":
            strategy.extended.update(variable, lambda v, g: v.assign_sub(g), (gradient,))
        else:
            strategy.extended.update_non_slot(None, lambda g: None, (gradient,))

    def step():
        gradient = np.full(num_elements, comm.rank + 1.0)
        if method == "update in run":
            strategy.extended.update(variable, lambda v, g: v.assign_sub(g), kwargs={"g": gradient})
        else:
            mpistrat.get_replica_context().merge_call(apply, args=(gradient,))
        mpistrat.get_replica_context().barrier()

    with pytest.raises(AgreementError, match=rf"{method.split()[0]}(.|\n)*checksum") as caught:
        strategy.run(step)
    assert len(str(caught.value)) < 4000
