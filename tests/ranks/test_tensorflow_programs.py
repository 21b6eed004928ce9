"""What programs written for TensorFlow do with variables, results and datasets, over real collectives."""

import collections

import numpy as np
import pytest

import mpistrat
from mpistrat.communicator.sparse import IndexedSlices
from mpistrat.context.values import Mirrored
from mpistrat.errors import AgreementError
from tests.launches import needs_ranks, on_ranks

pytestmark = on_ranks(1, 3)

AGGREGATION = mpistrat.VariableAggregation
ON_READ = mpistrat.VariableSynchronization.ON_READ


class Metrics(dict):
    """A subclass of dict, as programs return it."""


def local(strategy, value):
    return strategy.experimental_local_results(value)[0]


def made(strategy, *arguments, **keywords):
    with strategy.scope():
        return mpistrat.Variable(*arguments, **keywords)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", [Metrics, collections.UserDict])
def test_mappings_go_through_run_and_reductions(comm, strategy, kind, strict):
    strategy.extended.communicator.is_strict = strict
    batch = kind(x=strategy.experimental_distribute_values_from_function(lambda context: np.full(2, comm.rank + 1.0)))

    def step(batch):
        total = mpistrat.get_replica_context().all_reduce("sum", kind(x=batch["x"]))
        return kind(loss=batch["x"], total=total["x"])

    result = strategy.run(step, args=(batch,))
    assert type(result) is kind
    reduced = strategy.reduce("mean", result, axis=None)
    expected = (comm.size + 1) / 2
    assert (reduced["loss"].tolist(), local(strategy, result["total"]).tolist()) == (
        [expected] * 2,
        [expected * comm.size] * 2,
    )


def test_a_reduced_variable_is_a_snapshot(comm, strategy):
    variable = made(strategy, [1.0, 2.0], aggregation=AGGREGATION.MEAN)
    metric = made(strategy, [1.0, 2.0], synchronization=ON_READ, aggregation=AGGREGATION.MEAN)
    for each in (variable, metric):
        results = [strategy.extended.reduce_to("mean", each, each), strategy.extended.read_var(each), each.read_value()]
        results += strategy.extended.batch_reduce_to("mean", [(each, each)])
        each.assign([7.0, 7.0])
        assert [np.asarray(result).tolist() for result in results] == [[1, 2]] * 4
    assert comm.size == 1 or type(results[0]) is Mirrored


def test_each_component_of_an_on_read_variable_is_updated_by_its_own_value(comm, strategy):
    variable = made(strategy, 0.0, synchronization=ON_READ, aggregation=AGGREGATION.SUM)
    value = strategy.run(lambda: np.asarray(comm.rank + 1.0))
    strategy.extended.update(variable, lambda v, x: v.assign_add(x), args=(value,))
    assert float(local(strategy, strategy.run(variable.read_value))) == comm.rank + 1
    assert float(variable) == comm.size * (comm.size + 1) / 2


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
@pytest.mark.parametrize("method", ["update", "update_non_slot", "assign_sub"])
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
        mpistrat.get_replica_context().merge_call(apply, args=(np.full(num_elements, comm.rank + 1.0),))
        mpistrat.get_replica_context().barrier()

    with pytest.raises(AgreementError, match=rf"{method}(.|\n)*checksum") as caught:
        strategy.run(step)
    assert len(str(caught.value)) < 4000


@pytest.mark.parametrize("strict", [False, True])
def test_a_captured_per_replica_value_is_the_part_of_this_replica(comm, strategy, strict):
    strategy.extended.communicator.is_strict = strict
    value = strategy.run(lambda: np.full(2, comm.rank + 1.0))
    rows = strategy.run(lambda: IndexedSlices([comm.rank + 1.0], [0]))
    total = comm.size * (comm.size + 1) / 2
    for aggregation, expected in ((AGGREGATION.SUM, total), (AGGREGATION.MEAN, total / comm.size)):
        variable = made(strategy, np.zeros(2), aggregation=aggregation)
        strategy.run(lambda variable=variable: variable.assign(value))
        assert variable.numpy().tolist() == [expected] * 2
        strategy.run(lambda variable=variable: variable.scatter_sub(rows))
        assert variable.numpy().tolist() == [0, expected]


def test_entries_of_all_replicas_are_scattered_and_read(comm, strategy):
    table = made(strategy, np.zeros((comm.size, 2)), aggregation=AGGREGATION.SUM)
    strategy.run(lambda: table.scatter_nd_add([[comm.rank, 1], [0, 0]], [5.0, 1.0]))
    assert table.gather_nd([[comm.rank, 1], [0, 0]]).tolist() == [5, comm.size]
    assert table.sparse_read([0]).tolist() == [[comm.size, 5]]


def test_batches_that_are_not_sharded_are_cut_anew(comm, strategy):
    options = mpistrat.InputOptions(auto_shard_policy=mpistrat.AutoShardPolicy.OFF)
    batches = strategy.experimental_distribute_dataset(mpistrat.ArrayDataset(np.arange(12.0), 8), options)
    lengths = [len(local(strategy, batch)) for batch in batches]
    expected = {1: [8, 4], 2: [4] * 3, 4: [2] * 6, 8: [1] * 12}
    assert lengths == expected.get(comm.size, lengths)


def test_a_batch_is_split_as_evenly_as_can_be(comm, strategy):
    [batch] = strategy.experimental_distribute_dataset(mpistrat.ArrayDataset(np.arange(9), 9))
    lengths = comm.allgather(len(local(strategy, batch)))
    assert lengths == {1: [9], 2: [5, 4], 4: [3, 2, 2, 2]}.get(comm.size, lengths)
    assert max(lengths) - min(lengths) <= 1


def test_elements_are_taken_outside_run(strategy):
    iterator = iter(strategy.experimental_distribute_dataset(mpistrat.ArrayDataset(np.arange(8), 8)))
    with pytest.raises(ValueError, match=r"next\(iterator\) must be called outside strategy.run"):
        strategy.run(lambda: next(iterator))
    assert len(strategy.gather(next(iterator), axis=0)) == 8


def test_a_strategy_is_an_instance_of_its_experimental_name(strategy):
    experimental = mpistrat.experimental.MultiWorkerMirroredStrategy
    assert isinstance(strategy, experimental)
    assert not isinstance(mpistrat.OneDeviceStrategy(), experimental)
    assert not isinstance(strategy, type("Heir", (experimental,), {}))
