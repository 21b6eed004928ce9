"""InputOptions, InputContext and ValueContext: their defaults, and what they refuse."""

import pytest

import mpistrat
from mpistrat.errors import InvalidArgumentError
from mpistrat.inputs.input_options import (
    AutoShardPolicy,
    InputContext,
    InputOptions,
    InputReplicationMode,
    ValueContext,
    read_options,
)

PER_REPLICA = InputReplicationMode.PER_REPLICA


def test_defaults():
    options = InputOptions()
    assert options.experimental_fetch_to_device is None
    assert options.experimental_replication_mode is InputReplicationMode.PER_WORKER
    assert options.experimental_place_dataset_on_device is False
    assert options.experimental_per_replica_buffer_size == 1
    assert options.auto_shard_policy is AutoShardPolicy.AUTO
    assert read_options(None) == options
    assert read_options(options) is options


def test_members():
    assert {policy.name: policy.value for policy in AutoShardPolicy} == {"OFF": -1, "AUTO": 0, "FILE": 1, "DATA": 2, "HINT": 3}
    assert [mode.name for mode in InputReplicationMode] == ["PER_WORKER", "PER_REPLICA"]


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        (
            {"experimental_place_dataset_on_device": True},
            InvalidArgumentError,
            "place_dataset_on_device=True needs .*PER_REPLICA; got PER_WORKER",
        ),
        (
            {"experimental_place_dataset_on_device": True, "experimental_replication_mode": PER_REPLICA},
            InvalidArgumentError,
            "needs experimental_fetch_to_device=False; got None, and None means True",
        ),
        ((True, PER_REPLICA, True), InvalidArgumentError, "needs experimental_fetch_to_device=False; got True"),
        ({"experimental_per_replica_buffer_size": -1}, InvalidArgumentError, "buffer_size must be at least 0; got -1"),
        ({"experimental_per_replica_buffer_size": 1.5}, TypeError, "buffer_size must be an int; got 1.5"),
        ({"experimental_fetch_to_device": "no"}, TypeError, "experimental_fetch_to_device must be bool or None; got 'no'"),
        ({"experimental_replication_mode": "PER_REPLICA"}, TypeError, "must be InputReplicationMode; got 'PER_REPLICA'"),
        (
            {"experimental_place_dataset_on_device": None},
            TypeError,
            "experimental_place_dataset_on_device must be bool; got None",
        ),
        ({"auto_shard_policy": "DATA"}, TypeError, "auto_shard_policy must be AutoShardPolicy; got 'DATA'"),
    ],
)
def test_what_cannot_be_meant_is_refused(fields, error, message):
    with pytest.raises(error, match=message):
        InputOptions(**fields) if isinstance(fields, dict) else InputOptions(*fields)


def test_a_dataset_on_the_device_is_not_fetched():
    options = InputOptions(False, PER_REPLICA, True)
    assert options.experimental_place_dataset_on_device


def test_options_are_options():
    with pytest.raises(TypeError, match=r"options must be mpistrat.InputOptions or None; got dict"):
        read_options({})


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"num_replicas_in_sync": 0}, "num_replicas_in_sync must be at least 1; got 0"),
        ({"num_input_pipelines": 0}, "num_input_pipelines must be at least 1; got 0"),
        ({"num_input_pipelines": 2, "input_pipeline_id": 2}, "input_pipeline_id must be one of 0 to 1; got 2"),
        ({"input_pipeline_id": -1}, "input_pipeline_id must be one of 0 to 0; got -1"),
    ],
)
def test_an_input_context_of_nothing_is_refused(keywords, message):
    with pytest.raises(InvalidArgumentError, match=message):
        InputContext(**keywords)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"num_replicas_in_sync": 0}, "num_replicas_in_sync must be at least 1; got 0"),
        ({"replica_id_in_sync_group": 3, "num_replicas_in_sync": 3}, "replica_id_in_sync_group must be one of 0 to 2; got 3"),
    ],
)
def test_a_value_context_of_nothing_is_refused(keywords, message):
    with pytest.raises(InvalidArgumentError, match=message):
        ValueContext(**keywords)


def test_defaults_are_those_of_one_replica():
    assert InputContext() == InputContext(num_input_pipelines=1, input_pipeline_id=0, num_replicas_in_sync=1)
    assert ValueContext() == ValueContext(replica_id_in_sync_group=0, num_replicas_in_sync=1)
    assert mpistrat.InputContext is InputContext


def test_contexts_print_what_they_hold():
    assert repr(InputContext(4, 3, 8)) == "InputContext(num_input_pipelines=4, input_pipeline_id=3, num_replicas_in_sync=8)"
    assert repr(ValueContext(1, 2)) == "ValueContext(replica_id_in_sync_group=1, num_replicas_in_sync=2)"


def test_per_replica_batch_size():
    assert InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(16) == 4
    with pytest.raises(InvalidArgumentError, match="global_batch_size 10 is not divisible by 4 replicas; 8 and 12 are"):
        InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(10)
