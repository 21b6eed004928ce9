"""Variables over real collectives: equal everywhere, whatever the ranks start from."""

import copy

import numpy as np
import pytest

import mpistrat
from mpistrat.errors import AgreementError, UnsupportedDtypeError
from tests.launches import needs_ranks, on_ranks

pytestmark = on_ranks(1, 3)

AGGREGATION = mpistrat.VariableAggregation
ON_READ = mpistrat.VariableSynchronization.ON_READ


def made(strategy, *arguments, **keywords):
    with strategy.scope():
        return mpistrat.Variable(*arguments, **keywords)


def test_the_initial_value_is_that_of_rank_zero(comm, strategy):
    with strategy.scope():
        variable = mpistrat.Variable(np.random.default_rng(comm.rank).normal(size=(3, 4)), dtype=np.float32)
        from_callable = mpistrat.Variable(lambda: np.full((), comm.rank, np.int64))
    np.testing.assert_array_equal(variable, np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32))
    assert int(from_callable) == 0


def test_one_rank_alone_cannot_change_a_variable(comm, strategy):
    with strategy.scope():
        variable = mpistrat.Variable(np.zeros(2))
    if comm.rank == 0:
        with pytest.raises(RuntimeError, match=r"ctx.update of Variable\(.*must be called inside strategy.run"):
            mpistrat.get_replica_context().update(variable, np.add, (1.0,))
    assert comm.allgather(variable.numpy().tolist()) == [[0, 0]] * comm.size


@pytest.mark.parametrize("kind", ["ON_WRITE", "ON_READ"])
def test_all_reduce_of_a_variable_combines_the_arrays_of_the_replicas(comm, strategy, kind):
    with strategy.scope():
        synchronization = mpistrat.VariableSynchronization[kind]
        variable = mpistrat.Variable(np.arange(3.0), synchronization=synchronization, aggregation=AGGREGATION.SUM)
    total = strategy.run(lambda: mpistrat.get_replica_context().all_reduce("sum", [variable]))
    mean = strategy.run(lambda: mpistrat.get_replica_context().all_reduce("mean", variable))
    assert strategy.experimental_local_results(total)[0][0].tolist() == [0, comm.size, 2 * comm.size]
    assert strategy.experimental_local_results(mean)[0].tolist() == [0, 1, 2]


def test_an_initial_value_that_one_rank_cannot_load_is_an_error_on_all(comm, strategy):
    strategy.extended.communicator.is_strict = True
    culprit = comm.size - 1

    def load():
        if comm.rank == culprit:
            raise OSError("the disk is gone")
        return 1.0

    with strategy.scope(), pytest.raises(OSError if comm.rank == culprit else AgreementError, match="the disk is gone"):
        mpistrat.Variable(load, name="w")


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


@needs_ranks(2)
def test_ranks_that_change_different_variables_without_a_name_are_told(comm, strategy):
    first, second = (made(strategy, np.zeros(2), aggregation=mpistrat.VariableAggregation.SUM) for _ in range(2))
    with pytest.raises(AgreementError, match=r"of variable 1(.|\n)*of variable 2"):
        strategy.run(lambda: (second if comm.rank else first).assign(np.ones(2)))


@needs_ranks(2)
def test_a_copy_of_a_variable_is_another_one(comm, strategy):
    variable = made(strategy, np.zeros(2), aggregation=mpistrat.VariableAggregation.SUM)
    with strategy.scope():
        copied = copy.deepcopy(variable)
    with pytest.raises(AgreementError, match=r"of variable 1, copied"):
        strategy.run(lambda: (copied if comm.rank else variable).assign(np.ones(2)))


@needs_ranks(2)
def test_a_variable_that_was_refused_on_one_rank_leaves_the_numbers_of_later_ones_equal(comm, strategy):
    strategy.extended.communicator.is_strict = True
    with pytest.raises((AgreementError, UnsupportedDtypeError)):
        made(strategy, "x" if comm.rank else 1.0)
    assert made(strategy, 2.0).numpy() == 2.0
