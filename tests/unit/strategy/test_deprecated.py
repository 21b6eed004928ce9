"""Old names: each warns, and does what the present one does."""

import inspect
import operator
from types import SimpleNamespace

import numpy as np
import pytest

import mpistrat
from mpistrat.context.values import PerReplica
from mpistrat.inputs.input_options import InputContext
from mpistrat.strategy.deprecated import accepts_hints, get_loss_reduction


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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda s: s.configure(task_type="worker", task_id=1),
            r"moved to another cluster: .*task_id=1.(.|\n)*correct: .*MultiWorkerMirroredStrategy\(cluster_resolver\)",
        ),
        (lambda s: s.make_input_fn_iterator(print, SimpleNamespace(name="PER_REPLICA")), "takes .* PER_WORKER, got"),
    ],
)
def test_what_there_is_no_more_is_refused(call, message):
    with pytest.warns(DeprecationWarning, match="is deprecated"), pytest.raises(NotImplementedError, match=message):
        call(mpistrat.OneDeviceStrategy())


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
    assert contexts == [InputContext(1, 0, 1)]


def test_options_win_over_hints():
    @accepts_hints
    def call(value, options=None):
        return options

    first, second = mpistrat.experimental.CommunicationOptions(1, 2.0), mpistrat.experimental.CommunicationOptions(3)
    assert call(0) is None
    assert call(0, first) is first
    for given in (lambda: call(0, second, experimental_hints=first), lambda: call(0, options=second, experimental_hints=first)):
        with pytest.warns(DeprecationWarning, match="experimental_hints= is deprecated; use options="):
            assert given() == mpistrat.experimental.CommunicationOptions(3, 2.0)


METHODS = ["Strategy.reduce", "Strategy.gather", "StrategyExtended.reduce_to", "StrategyExtended.batch_reduce_to"]


@pytest.mark.parametrize("name", [*METHODS, "ReplicaContext.all_reduce", "ReplicaContext.all_gather"])
def test_methods_that_take_options_take_hints(name):
    method = operator.attrgetter(name)(mpistrat)
    assert "experimental_hints" in inspect.signature(method, follow_wrapped=False).parameters


def test_an_all_reduce_of_a_replica_takes_hints():
    hints = {"experimental_hints": mpistrat.experimental.CommunicationOptions(1)}
    with pytest.warns(DeprecationWarning, match="experimental_hints= is deprecated; use options="):
        assert mpistrat.OneDeviceStrategy().run(lambda: mpistrat.get_replica_context().all_reduce("sum", 1.0, **hints)) == 1
