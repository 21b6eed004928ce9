"""InputContext and ValueContext."""

import pytest

import mpistrat
from mpistrat.errors import InvalidArgumentError
from mpistrat.inputs.input_options import InputContext, ValueContext


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
