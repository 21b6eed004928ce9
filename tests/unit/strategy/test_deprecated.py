"""Old names: each warns, and does what the present one does."""

import numpy as np
import pytest

import mpistrat
from mpistrat.context.values import PerReplica
from mpistrat.inputs.input_options import InputContext
from mpistrat.strategy.deprecated import accepts_hints
from tests.unit.replicas import on_replicas


def test_unwrap_returns_the_local_results():
    def program(strategy):
        with pytest.warns(DeprecationWarning, match="strategy.unwrap is deprecated; use strategy.experimental_local_results"):
            return strategy.unwrap([PerReplica(strategy.extended.communicator.rank)])

    assert on_replicas(2, program) == [([0],), ([1],)]


def test_group_has_nothing_to_wait_for():
    with pytest.warns(DeprecationWarning, match="strategy.group is deprecated; use the value itself"):
        assert mpistrat.OneDeviceStrategy().group(PerReplica(1), name="all") is None


def test_configure_does_nothing_or_refuses():
    strategy = mpistrat.OneDeviceStrategy()
    with pytest.warns(DeprecationWarning, match="strategy.configure is deprecated"):
        assert strategy.configure(session_config="anything") is None
    message = (
        r"cannot be moved to another cluster: .*task_id=1.(.|\n)*correct: .*MultiWorkerMirroredStrategy\(cluster_resolver\)"
    )
    with pytest.warns(DeprecationWarning, match="configure"), pytest.raises(NotImplementedError, match=message):
        strategy.configure(task_type="worker", task_id=1)


def test_update_config_proto_hands_back_what_it_got():
    config = object()
    with pytest.warns(DeprecationWarning, match="strategy.update_config_proto is deprecated"):
        assert mpistrat.OneDeviceStrategy().update_config_proto(config) is config


def test_experimental_run_takes_the_next_element():
    strategy, iterator = mpistrat.OneDeviceStrategy(), iter([3])
    with pytest.warns(DeprecationWarning, match="strategy.experimental_run is deprecated"):
        assert strategy.experimental_run(lambda x: x + 1, iterator) == 4
    with pytest.warns(DeprecationWarning, match="experimental_run"):
        assert strategy.experimental_run(lambda: 5) == 5


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


def test_make_input_fn_iterator_takes_one_replication_mode():
    strategy = mpistrat.OneDeviceStrategy()

    class Mode:
        name = "PER_REPLICA"

    with (
        pytest.warns(DeprecationWarning, match="input_fn"),
        pytest.raises(NotImplementedError, match="takes .* PER_WORKER, got"),
    ):
        strategy.make_input_fn_iterator(print, Mode())


def test_colocate_vars_with():
    strategy = mpistrat.OneDeviceStrategy()
    with strategy.scope():
        variable = mpistrat.Variable(0.0)
        with pytest.warns(DeprecationWarning, match="use strategy.extended.colocate_vars_with"):
            place = strategy.colocate_vars_with(variable)
        with place:
            assert float(mpistrat.Variable(1.0)) == 1


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
