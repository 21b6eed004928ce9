"""Positions in data: an iteration that goes on where another one has stopped, on other replicas too."""

import numpy as np
import pytest

import mpistrat
from mpistrat.context.values import select_replica
from mpistrat.errors import InvalidArgumentError
from mpistrat.inputs.distribute import distribute_dataset, distribute_from_function
from mpistrat.inputs.input_options import AutoShardPolicy, InputOptions
from tests.unit.replicas import on_replicas

ROWS = np.arange(22)
SOURCES = {
    "arrays": lambda: mpistrat.ArrayDataset(ROWS, 4, shuffle=True),
    "samples": lambda: mpistrat.MapDataset(ROWS.tolist(), 4, shuffle=True),
    "files": lambda: mpistrat.FileDataset(["0", "1"], lambda name: ROWS[int(name) :: 2], 4, shuffle=True),
    "list": lambda: [ROWS[first : first + 4] for first in range(0, 22, 4)],
}


def rows(batches):
    return [np.asarray(batch).ravel().tolist() for batch in batches]


def taken(distribute, num_replicas, state=None, num_batches=None):
    """Return the rows of each global batch of an epoch that begins at a position, and the position after some of them."""

    def program(strategy):
        dataset = distribute(strategy)
        if state is not None:
            dataset.load_state_dict(state)
        iterator = iter(dataset)
        got = [batch for _, batch in zip(range(num_batches or 99), iterator, strict=False)]
        return [select_replica(batch) for batch in got], dataset.state_dict()

    found = on_replicas(num_replicas, program)
    return rows(np.concatenate(shares) for shares in zip(*(got for got, _ in found), strict=True)), found[0][1]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 3)])
def test_an_epoch_that_is_cut_goes_on_at_the_same_batch_on_other_replicas(source, before, after):
    def distribute(strategy):
        return distribute_dataset(strategy, SOURCES[source](), InputOptions(auto_shard_policy=AutoShardPolicy.DATA))

    whole, end = taken(distribute, 1)
    assert end == {"epoch": 1, "batch": 0}
    head, position = taken(distribute, before, num_batches=2)
    assert position == {"epoch": 0, "batch": 2}
    tail, end = taken(distribute, after, position)
    assert (head + tail, end) == (whole, {"epoch": 1, "batch": 0})


@pytest.mark.parametrize("make", [lambda strategy: distribute_dataset(strategy, SOURCES["files"]()), None])
def test_data_of_each_replica_go_on_with_as_many_replicas_or_at_an_epoch(make):
    distribute = make or (lambda strategy: distribute_from_function(strategy, lambda context: SOURCES["list"]()))
    whole, _ = taken(distribute, 2)
    head, position = taken(distribute, 2, num_batches=1)
    assert position == {"epoch": 0, "batch": 1, "num_replicas": 2}
    assert head + taken(distribute, 2, position)[0] == whole
    for dataset in (lambda: taken(distribute, 1, position), lambda: SOURCES["files"]().load_state_dict(position)):
        with pytest.raises(InvalidArgumentError, match=r"batch 1 of an epoch cannot be found again: 2 ranks .* now 1 do"):
            dataset()
    assert taken(distribute, 1, {**position, "batch": 0})[0] == taken(distribute, 1)[0]


def test_without_a_strategy_a_dataset_has_its_own_position():
    dataset, other = SOURCES["arrays"](), SOURCES["arrays"]()
    first, second = rows(dataset), rows(dataset)
    iterator = iter(other)
    assert rows([next(iterator)]) == first[:1]
    assert other.state_dict() == {"epoch": 0, "batch": 1}
    dataset.load_state_dict(other.state_dict())
    assert dataset.state_dict() == other.state_dict()
    assert (rows(dataset), rows(dataset)) == (first[1:], second)
    iter(other)  # a newer iteration: the older one tells nothing any more
    next(iterator)
    assert other.state_dict() == {"epoch": 1, "batch": 0}


@pytest.mark.parametrize("state", [{}, {"epoch": 1}, {"epoch": 1.5, "batch": 0}, {"epoch": 0, "batch": -1}, None])
def test_what_is_no_position_is_refused(state):
    dataset = SOURCES["arrays"]()
    with pytest.raises(InvalidArgumentError):
        dataset.load_state_dict(state)
    assert dataset.state_dict() == {"epoch": 0, "batch": 0}
