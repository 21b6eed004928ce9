"""InputOptions, InputContext and ValueContext: their defaults, and what they refuse."""

import pytest

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
    assert options == InputOptions(None, InputReplicationMode.PER_WORKER, False, 1, AutoShardPolicy.AUTO) == read_options(None)
    assert read_options(options) is options
    assert InputOptions(False, PER_REPLICA, True).experimental_place_dataset_on_device
    assert {policy.name: policy.value for policy in AutoShardPolicy} == {"OFF": -1, "AUTO": 0, "FILE": 1, "DATA": 2, "HINT": 3}
    assert [mode.name for mode in InputReplicationMode] == ["PER_WORKER", "PER_REPLICA"]
    assert repr(InputContext()) == "InputContext(num_input_pipelines=1, input_pipeline_id=0, num_replicas_in_sync=1)"
    assert repr(ValueContext()) == "ValueContext(replica_id_in_sync_group=0, num_replicas_in_sync=1)"


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ((None, InputReplicationMode.PER_WORKER, True), InvalidArgumentError, "True needs .*PER_REPLICA; got PER_WORKER"),
        ((None, PER_REPLICA, True), InvalidArgumentError, "needs .*_fetch_to_device=False; got None, and None means True"),
        ((True, PER_REPLICA, True), InvalidArgumentError, "needs experimental_fetch_to_device=False; got True"),
        ({"experimental_per_replica_buffer_size": -1}, InvalidArgumentError, "buffer_size must be at least 0; got -1"),
        ({"experimental_per_replica_buffer_size": 1.5}, TypeError, "buffer_size must be an int; got 1.5"),
        ({"experimental_fetch_to_device": "no"}, TypeError, "experimental_fetch_to_device must be bool or None; got 'no'"),
        ({"experimental_replication_mode": "PER_REPLICA"}, TypeError, "must be InputReplicationMode; got 'PER_REPLICA'"),
        ({"experimental_place_dataset_on_device": None}, TypeError, "experimental_place_dataset_on_device must be bool; got N"),
        ({"auto_shard_policy": "DATA"}, TypeError, "auto_shard_policy must be AutoShardPolicy; got 'DATA'"),
        (lambda: InputContext(num_replicas_in_sync=0), InvalidArgumentError, "num_replicas_in_sync must be at least 1; got 0"),
        (lambda: InputContext(num_input_pipelines=0), InvalidArgumentError, "num_input_pipelines must be at least 1; got 0"),
        (lambda: InputContext(2, 2), InvalidArgumentError, "input_pipeline_id must be one of 0 to 1; got 2"),
        (lambda: InputContext(input_pipeline_id=-1), InvalidArgumentError, "input_pipeline_id must be one of 0 to 0; got -1"),
        (lambda: ValueContext(num_replicas_in_sync=0), InvalidArgumentError, "num_replicas_in_sync must be at least 1; got 0"),
        (lambda: ValueContext(3, 3), InvalidArgumentError, "replica_id_in_sync_group must be one of 0 to 2; got 3"),
    ],
)
def test_what_cannot_be_meant_is_refused(given, error, message):
    with pytest.raises(error, match=message):
        given() if callable(given) else InputOptions(**given) if isinstance(given, dict) else InputOptions(*given)


def test_per_replica_batch_size():
    assert InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(16) == 4
    with pytest.raises(InvalidArgumentError, match="global_batch_size 10 is not divisible by 4 replicas; 8 and 12 are"):
        InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(10)
