"""Every cell of the behaviour of variables over real collectives, in strict mode: see `tests.variable_matrix`."""

import numpy as np
import pytest

import mpistrat
from mpistrat.communicator.sparse import IndexedSlices
from mpistrat.errors import AgreementError, InvalidArgumentError
from mpistrat.strategy.mirrored import CentralStorageStrategy
from tests.launches import needs_ranks, on_ranks
from tests.variable_matrix import CELLS, METHODS, check_cell, check_per_replica, declared, of_central_storage

pytestmark = on_ranks(1, 3)

NONE, SUM, MEAN, ONLY_FIRST_REPLICA = mpistrat.VariableAggregation
SYNCHRONIZATIONS = [mpistrat.VariableSynchronization.ON_WRITE, mpistrat.VariableSynchronization.ON_READ]


# one strategy for many cells: making one for each would take longer than all of them
@pytest.mark.parametrize("where", ["run", "scope", "update"])
def test_cells(strategy, where):
    failures = []
    for cell in (cell for cell in CELLS if cell.where == where):
        try:
            check_cell(strategy, cell)
        except (Exception, pytest.fail.Exception) as error:
            failures.append(f"{cell}: {error!r}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("where", ["scope", "update"])
def test_per_replica_values_outside_run(strategy, where):
    for method in METHODS:
        for synchronization in SYNCHRONIZATIONS:
            check_per_replica(strategy, method, synchronization, where)


def test_cells_of_central_storage(comm, monkeypatch):
    monkeypatch.setenv("MPISTRAT_VIRTUAL_NODES", f"1x{comm.size}")
    strategy = CentralStorageStrategy(parameter_device=f"rank:{comm.size - 1}")
    for cell in CELLS:
        if cell.synchronization is mpistrat.VariableSynchronization.ON_WRITE:
            check_cell(strategy, of_central_storage(cell))
    with strategy.scope():
        variable = mpistrat.Variable(0.0)
    assert float(variable.assign(comm.rank)) == comm.size - 1  # what the rank passed that keeps the variable
    strategy.close()


def test_replicas_scatter_different_numbers_of_rows(comm, strategy):
    with strategy.scope():
        table = mpistrat.Variable(np.zeros((comm.size + 1, 2), np.float32), aggregation=SUM)
    # replica r adds r + 1 to each of the rows 1 … r; replica 0 has none
    rows = np.arange(1, comm.rank + 1)
    strategy.run(lambda: table.scatter_add(IndexedSlices(np.full((len(rows), 2), comm.rank + 1.0), rows)))
    expected = [0.0] + [float(sum(range(row + 1, comm.size + 1))) for row in range(1, comm.size + 1)]
    assert table.numpy()[:, 1].tolist() == expected


@needs_ranks(2)
def test_replicas_without_aggregation_must_put_equal_rows(comm, strategy):
    variable = declared(strategy, mpistrat.VariableSynchronization.ON_WRITE, NONE)
    with pytest.raises(AgreementError, match=r"Variable\('v', float64 \(3,\)\).scatter_update of float64 \(1,\) \[0\.\]"):
        strategy.run(lambda: variable.scatter_update(IndexedSlices([float(comm.rank)], [0])))
    assert comm.allgather(variable.numpy().tolist()) == [[9, 4, 16]] * comm.size


@pytest.mark.parametrize("strict", [False, True])
def test_replicas_without_aggregation_may_assign_what_is_equal(comm, strategy, strict):
    strategy.extended.communicator.is_strict = strict
    variable = declared(strategy, mpistrat.VariableSynchronization.ON_WRITE, NONE)
    strategy.run(lambda: variable.assign([1.0, 2.0, 3.0]))
    strategy.run(lambda: variable.assign_add(np.ones(3)).assign_sub([0.0, 0.0, 1.0]))
    strategy.run(lambda: variable.scatter_add(IndexedSlices([5.0, 5.0], [0, 0])))
    assert comm.allgather(variable.numpy().tolist()) == [[12, 3, 3]] * comm.size


@needs_ranks(2)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_replicas_without_aggregation_that_change_a_variable_differently_all_raise(comm, strategy, method, strict):
    strategy.extended.communicator.is_strict = strict
    variable = declared(strategy, mpistrat.VariableSynchronization.ON_WRITE, NONE)
    number = 1.0 + (comm.rank == comm.size - 1)
    value = IndexedSlices([number], [0]) if method.startswith("scatter") else np.full(3, number)
    message = rf"has aggregation NONE(.|\n)*rank {comm.size - 1}: Variable.*\.{method} of (.|\n)*correct: .*aggregation="
    with pytest.raises(AgreementError, match=message):
        strategy.run(lambda: getattr(variable, method)(value))
    assert comm.allgather(variable.numpy().tolist()) == [[9, 4, 16]] * comm.size


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
def test_ranks_must_change_the_same_variable_in_the_same_way(comm, strategy):
    with strategy.scope():
        first, second = (mpistrat.Variable(0.0, name=name, aggregation=SUM) for name in "ab")
    last = comm.rank == comm.size - 1
    with pytest.raises(AgreementError, match=r"Variable\('a', .*\).assign of variable 1\n(.|\n)*Variable\('b', .*\).assign of"):
        strategy.run(lambda: (second if last else first).assign(1.0))
    with pytest.raises(AgreementError, match=r"\.assign_add of (.|\n)*\.assign_sub of"):
        strategy.run(lambda: first.assign_sub(1.0) if last else first.assign_add(1.0))
    assert (float(first), float(second)) == (0, 0)


@needs_ranks(2)
def test_where_one_replica_cannot_assign_all_raise(comm, strategy):
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
        strategy.run(lambda: table.scatter_add(IndexedSlices(np.zeros((1, 2)), [9 if last else 0])))
    assert comm.allreduce(1) == comm.size


@needs_ranks(2)
def test_ranks_must_make_the_same_variables(comm, strategy):
    last = comm.rank == comm.size - 1
    with strategy.scope():
        with pytest.raises(AgreementError, match=r"Variable\('w', float64 \(2,\), ON_WRITE, NONE, trainable=True\)"):
            mpistrat.Variable(np.zeros(3 if last else 2), name="w")
        with pytest.raises(AgreementError, match="ON_WRITE, MEAN, trainable"):
            mpistrat.Variable(np.zeros(2), name="w", aggregation=SUM if last else MEAN)
        error, message = (TypeError, "w has dtype") if last else (AgreementError, r"Variable\(name='w'\), which failed: Unsupp")
        with pytest.raises(error, match=message):
            mpistrat.Variable(np.array(["text"]) if last else np.zeros(2), name="w")
    assert comm.allreduce(1) == comm.size
