"""Every cell of the behaviour of variables, on replicas of one process: see `tests.variable_matrix`."""

import numpy as np
import pytest

import mpistrat
from mpistrat.errors import InvalidArgumentError
from tests.unit.replicas import on_replicas
from tests.variable_matrix import ALONE, CELLS, METHODS, Refused, check_cell, check_per_replica, check_plain, check_refused

SYNCHRONIZATIONS = [mpistrat.VariableSynchronization.ON_WRITE, mpistrat.VariableSynchronization.ON_READ]


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_replicas(num_replicas, cell):
    on_replicas(num_replicas, lambda strategy: check_cell(strategy, cell))


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_one_device(cell):
    check_cell(mpistrat.OneDeviceStrategy(), cell)


@pytest.mark.parametrize("operation", ALONE)
@pytest.mark.parametrize("synchronization", SYNCHRONIZATIONS)
@pytest.mark.parametrize("aggregation", mpistrat.VariableAggregation)
def test_outside_all_scopes(operation, synchronization, aggregation):
    check_plain(operation, synchronization, aggregation, lambda fn: fn())
    check_plain(operation, synchronization, aggregation, mpistrat.get_strategy().run)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("synchronization", SYNCHRONIZATIONS)
@pytest.mark.parametrize("where", ["scope", "update"])
def test_per_replica_values_outside_run(method, synchronization, where):
    check_per_replica(mpistrat.OneDeviceStrategy(), method, synchronization, where)
    on_replicas(2, lambda strategy: check_per_replica(strategy, method, synchronization, where))


@pytest.mark.parametrize("synchronization", SYNCHRONIZATIONS)
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int64"])
def test_a_mean_of_integers_is_refused_when_the_variable_is_made(synchronization, dtype):
    def make(strategy):
        with strategy.scope():
            array = np.zeros(2, dtype)
            mpistrat.Variable(array, name="v", synchronization=synchronization, aggregation=mpistrat.VariableAggregation.MEAN)

    refused = Refused(InvalidArgumentError, (f"v has dtype {dtype}, which cannot hold a mean", "use aggregation SUM"))
    check_refused(refused, lambda: make(mpistrat.OneDeviceStrategy()))
    check_refused(refused, lambda: make(mpistrat.get_strategy()))
    check_refused(refused, lambda: on_replicas(2, make))


def test_no_cell_is_missing():
    aggregations = len(mpistrat.VariableAggregation)
    operations, contexts = len(METHODS) + 1, len(["run", "scope", "update"])
    assert len({str(cell) for cell in CELLS}) == len(CELLS) == operations * contexts * len(SYNCHRONIZATIONS) * aggregations
    assert operations == len(ALONE)
