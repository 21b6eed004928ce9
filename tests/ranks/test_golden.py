"""Golden vectors of tf.distribute on real replicas, in every node shape.

A vector of two components has them on replicas 0 and 1, and what changes nothing on the others; a single replica holds both.
"""

from __future__ import annotations

import numpy as np
import pytest

import mpistrat
from mpistrat.context.values import PerReplica
from tests.launches import needs_ranks, up_to_ranks

pytestmark = up_to_ranks(4)

ON_READ = mpistrat.VariableSynchronization.ON_READ
SUM = mpistrat.VariableAggregation.SUM


def in_rows(strategy, first, second):
    """Return the value whose components are rows: those of `first`, those of `second`, and none."""
    first, second = np.asarray(first), np.asarray(second)
    if strategy.num_replicas_in_sync == 1:
        return np.concatenate([first, second])

    def component():
        replica = mpistrat.get_replica_context().replica_id_in_sync_group
        return [first, second][replica] if replica < 2 else np.empty((0, *first.shape[1:]), first.dtype)

    return strategy.run(component)


@pytest.mark.parametrize("op", ["sum", "SUM", mpistrat.ReduceOp.SUM])
def test_reduce_sum_axis_0(strategy, op):
    assert strategy.reduce(op, in_rows(strategy, [1, 2, 3], [4]), axis=0) == 10


def test_reduce_mean_axis_0(strategy):
    mean = strategy.reduce("mean", in_rows(strategy, [1, 2, 3], [4]), axis=0)
    assert (float(mean), mean.dtype) == (2.5, np.float64)


@pytest.mark.parametrize("axis", [[0, 1], (0, 1), (1, 0), (-2, -1)])
def test_reduce_mean_two_axes(strategy, axis):
    assert strategy.reduce("mean", in_rows(strategy, np.ones((2, 2)), 3 * np.ones((1, 2))), axis=axis) == 10 / 6


@pytest.mark.parametrize("order", [1, -1], ids=["first is empty", "second is empty"])
def test_reduce_mean_axis_0_one_empty_replica(strategy, order):
    first, second = [np.array([]), np.array([2.0, 4.0])][::order]
    assert strategy.reduce("mean", in_rows(strategy, first, second), axis=0) == 3


def test_reduce_mean_axis_none(comm, strategy):
    # two more with the mean of the two do not change it
    component = 2.0 if comm.size == 1 else [1.0, 3.0, 2.0][min(comm.rank, 2)]
    assert strategy.reduce("mean", strategy.run(lambda: component), axis=None) == 2.0


def test_reduce_of_a_value_that_is_not_distributed(comm, strategy):
    assert strategy.reduce("sum", 0, axis=None) == 0
    assert strategy.reduce("mean", 5, axis=None) == 5
    if comm.size == 1:
        assert strategy.reduce("sum", 5, axis=None) == 5
    else:
        with pytest.raises(ValueError, match=f"SUM .* is ambiguous with {comm.size} replicas"):
            strategy.reduce("sum", 5, axis=None)


def test_gather_axis_0(strategy):
    gathered = strategy.gather(in_rows(strategy, [[1], [2]], [[3]]), axis=0)
    assert gathered.tolist() == [[1], [2], [3]]


@needs_ranks(2)
def test_gather_axis_1_unequal_axis_0(comm, strategy):
    component = np.zeros((2, 1) if comm.rank == 0 else (1, 1))
    with pytest.raises(ValueError, match="equal extents on all other axes"):
        strategy.gather(PerReplica(component), axis=1)
    assert comm.allreduce(1) == comm.size, "every rank raised, none is stuck"


def test_gather_scalar(comm, strategy):
    with pytest.raises(ValueError, match="at least one axis; got a scalar"):
        strategy.gather(strategy.run(lambda: np.float64(comm.rank)), axis=0)


def test_input_context(comm, strategy):
    seen = []

    def dataset_fn(context):
        seen.append(context)
        return [np.zeros(context.get_per_replica_batch_size(4 * comm.size))]

    for batch in strategy.distribute_datasets_from_function(dataset_fn):
        [component] = strategy.experimental_local_results(batch)
        assert component.shape == (4,)
    [context] = seen
    found = (context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync)
    assert found == (comm.size, comm.rank, comm.size)
    if comm.size > 1:
        with pytest.raises(ValueError, match=f"{4 * comm.size + 1} is not divisible by {comm.size} replicas"):
            context.get_per_replica_batch_size(4 * comm.size + 1)


@pytest.mark.parametrize(("rows", "batch"), [(6, 4), (4, 4), (8, 4), (1, 4), (13, 5), (9, 9)])
def test_re_batch(comm, strategy, rows, batch):
    given = np.arange(rows, dtype=np.int16)
    dataset = mpistrat.ArrayDataset(given, batch_size=batch)
    found = [strategy.experimental_local_results(step)[0] for step in strategy.experimental_distribute_dataset(dataset)]
    pieces = [given[first : first + batch] for first in range(0, rows, batch)]
    wanted = [np.array_split(piece, comm.size)[comm.rank] for piece in pieces]  # no two differ by more than a row
    assert [component.tolist() for component in found] == [component.tolist() for component in wanted]
    assert all(component.dtype == np.int16 for component in found)
    table = {(6, 2): [[[0, 1], [4]], [[2, 3], [5]]], (8, 3): [[[0, 1], [4, 5]], [[2], [6]], [[3], [7]]]}
    if (rows, comm.size) in table:
        assert [component.tolist() for component in found] == table[rows, comm.size][comm.rank]


def test_div_partition(comm, strategy):
    mine = strategy.run(lambda: mpistrat.get_replica_context().reduce_scatter("sum", np.arange(10), axis=0))
    [part] = strategy.experimental_local_results(mine)
    lengths = comm.allgather(len(part))
    assert lengths == [10 // comm.size + (rank < 10 % comm.size) for rank in range(comm.size)]
    if comm.size == 3:
        assert lengths == [4, 3, 3]
    first = sum(lengths[: comm.rank])
    assert part.tolist() == [comm.size * row for row in range(first, first + len(part))]


def test_on_read_sum_restore(comm, strategy):
    saved = 2.0 * comm.size  # 6 with three replicas
    with strategy.scope():
        variable = mpistrat.Variable(0.0, synchronization=ON_READ, aggregation=SUM)
        variable.assign(saved)
        assert float(variable) == saved
    [part] = strategy.experimental_local_results(strategy.run(lambda: float(variable)))
    assert part == 2


def test_cross_assign_add_on_read_sum(strategy):
    with strategy.scope():
        variable = mpistrat.Variable(0.0, synchronization=ON_READ, aggregation=SUM)
        with pytest.raises(ValueError, match="assign_add outside strategy.run is undefined"):
            variable.assign_add(1.0)
        assert float(variable) == 0


def test_mean_on_int_variable(strategy):
    with strategy.scope(), pytest.raises(ValueError, match="mean"):
        mpistrat.Variable(1, aggregation=mpistrat.VariableAggregation.MEAN)


def test_nested_different_scope(strategy):
    other = mpistrat.OneDeviceStrategy()
    for outer, inner in ((strategy, other), (other, strategy)):
        with outer.scope(), pytest.raises(RuntimeError, match="two strategies cannot be mixed"), inner.scope():
            pass
        assert not mpistrat.has_strategy()


def test_same_scope_twice(strategy):
    with strategy.scope():
        with strategy.scope():
            assert mpistrat.in_cross_replica_context()
        assert mpistrat.get_strategy() is strategy
    assert not mpistrat.has_strategy()


def test_merge_call_in_cross_context(strategy):
    [context] = strategy.experimental_local_results(strategy.run(mpistrat.get_replica_context))
    with strategy.scope(), pytest.raises(RuntimeError, match=r"(?s)merge_call must be called in .*incorrect: .*correct: "):
        context.merge_call(lambda strategy: None)


def test_chief(comm, strategy):
    roles = comm.allgather((strategy.extended.should_checkpoint, strategy.extended.should_save_summary))
    assert roles == [(rank == 0, rank == 0) for rank in range(comm.size)]
