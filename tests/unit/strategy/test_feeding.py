"""What a strategy hands to the inputs layer, and values made by a function."""

import pytest

import mpistrat
from mpistrat.context.values import PerReplica
from mpistrat.inputs.input_options import InputContext, ValueContext
from tests.unit.replicas import on_replicas


def test_a_dataset_that_distributes_itself_does():
    class Own:
        def distribute(self, strategy, options):
            return [strategy, options]

    strategy, dataset = mpistrat.OneDeviceStrategy(), Own()
    assert strategy.experimental_distribute_dataset(dataset, "options") == [strategy, "options"]
    assert mpistrat.get_strategy().experimental_distribute_dataset(dataset) is dataset


def test_what_is_not_a_dataset_is_refused():
    with pytest.raises(TypeError):
        mpistrat.OneDeviceStrategy().experimental_distribute_dataset(3)


def test_the_default_strategy_hands_out_datasets_as_they_are():
    dataset, seen = [1, 2], []
    strategy = mpistrat.get_strategy()
    assert strategy.experimental_distribute_dataset(dataset) is dataset

    def dataset_fn(context):
        seen.append(context)
        return dataset

    assert strategy.distribute_datasets_from_function(dataset_fn) is dataset
    assert seen == [InputContext()]
    assert strategy.experimental_distribute_values_from_function(lambda context: context) == ValueContext()


def test_values_from_a_function_are_per_replica_values():
    def program(strategy):
        value = strategy.experimental_distribute_values_from_function(
            lambda context: {"id": context.replica_id_in_sync_group, "of": [context.num_replicas_in_sync]}
        )
        assert isinstance(value["id"], PerReplica)
        return strategy.experimental_local_results(value)

    assert on_replicas(2, program) == [({"id": 0, "of": [2]},), ({"id": 1, "of": [2]},)]


def test_a_single_replica_gets_the_bare_value():
    value = mpistrat.OneDeviceStrategy().experimental_distribute_values_from_function(lambda context: [context])
    assert value == [ValueContext(0, 1)]
