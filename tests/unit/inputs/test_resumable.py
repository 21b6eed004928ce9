"""Positions in data: an iteration that goes on where another one has stopped, on other replicas too."""

from itertools import chain, product

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


def sharing(make):
    return lambda strategy: distribute_dataset(strategy, make(), InputOptions(auto_shard_policy=AutoShardPolicy.DATA))


def at(position):
    return position["epoch"], position["batch"]


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
    distribute = sharing(SOURCES[source])
    whole, end = taken(distribute, 1)
    assert at(end) == (1, 0)
    head, position = taken(distribute, before, num_batches=2)
    assert at(position) == (0, 2)
    tail, end = taken(distribute, after, position)
    assert (head + tail, at(end)) == (whole, (1, 0))


@pytest.mark.parametrize("make", [lambda strategy: distribute_dataset(strategy, SOURCES["files"]()), None])
def test_data_of_each_replica_go_on_with_as_many_replicas_or_at_an_epoch(make):
    distribute = make or (lambda strategy: distribute_from_function(strategy, lambda context: SOURCES["list"]()))
    whole, _ = taken(distribute, 2)
    head, position = taken(distribute, 2, num_batches=1)
    assert at(position) == (0, 1)
    assert head + taken(distribute, 2, position)[0] == whole
    for dataset in (lambda: taken(distribute, 1, position), lambda: SOURCES["files"]().load_state_dict(position)):
        with pytest.raises(InvalidArgumentError, match=r"batch 1 of an epoch cannot be found again: .* 2 ranks .* now"):
            dataset()
    assert taken(distribute, 1, {**position, "batch": 0})[0] == taken(distribute, 1)[0]


def changed(rows=240, batch_size=20, kind=mpistrat.ArrayDataset, shard=(1, 0), **options):
    values = np.arange(rows) if kind is mpistrat.ArrayDataset else range(rows)
    return kind(values, batch_size, **{"shuffle": True, **options}).shard(*shard)


SIZES = [(40, 3, 20, 6), (20, 6, 40, 3), (30, 4, 40, 3)]  # before, how many batches, after, how many are left
AT_THE_END = [(20, 12, 50, 0), (50, 5, 20, 0)]  # which only a number of rows tells


@pytest.mark.parametrize("kind_and_sizes", [*product(["arrays"], SIZES + AT_THE_END), *product(["files"], SIZES)], ids=str)
def test_batches_of_another_size_go_on_at_the_same_row(kind_and_sizes):
    kind, (before, num_batches, after, left) = kind_and_sizes

    def of(size):
        read = lambda name: np.arange(240)[int(name) :: 2]  # noqa: E731
        files = lambda: mpistrat.FileDataset(["0", "1"], read, size, shuffle=True)  # noqa: E731
        return sharing(files if kind == "files" else lambda: changed(batch_size=size))

    head, position = taken(of(before), 2, num_batches=num_batches)
    tail, end = taken(of(after), 1, position)
    assert [*chain(*head, *tail)] == [*chain(*taken(of(20), 1)[0])]
    assert (len(tail), at(end)) == (left, (1, 0))


OTHERS = [{"seed": 1}, {"shuffle": False}, {"rows": 200}, {"shard": (2, 0)}, {"kind": mpistrat.MapDataset}, {"batch_size": 50}]


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_a_position_in_an_epoch_of_other_rows_is_refused(other):
    position, start = (taken(sharing(changed), 2, num_batches=count)[1] for count in (3, 99))
    dataset = changed(**other)
    with pytest.raises(InvalidArgumentError, match=r"batch 3 .* one of 240 rows .* seed 0, batches of 20, and now .* rows of"):
        dataset.load_state_dict(position)
    dataset.load_state_dict(start)
    assert at(dataset.state_dict()) == (1, 0)


def test_without_a_strategy_a_dataset_has_its_own_position():
    dataset, other = SOURCES["arrays"](), SOURCES["arrays"]()
    first, second = rows(dataset), rows(dataset)
    iterator = iter(other)
    assert rows([next(iterator)]) == first[:1]
    assert at(other.state_dict()) == (0, 1)
    dataset.load_state_dict(other.state_dict())
    assert dataset.state_dict() == other.state_dict()
    assert (rows(dataset), rows(dataset)) == (first[1:], second)
    iter(other)  # a newer iteration: the older one tells nothing any more
    next(iterator)
    assert at(other.state_dict()) == (1, 0)


NO_POSITIONS = [{}, {"epoch": 1}, {"epoch": 1.5, "batch": 0}, {"epoch": 0, "batch": -1}, {"epoch": 0, "batch": 1}, None]


@pytest.mark.parametrize("state", NO_POSITIONS)
def test_what_is_no_position_is_refused(state):
    dataset = SOURCES["arrays"]()
    with pytest.raises(InvalidArgumentError):
        dataset.load_state_dict(state)
    assert at(dataset.state_dict()) == (0, 0)


@pytest.mark.parametrize("source", SOURCES)
def test_the_element_spec_of_an_iterator_that_goes_on_takes_no_element(source):
    of = sharing(SOURCES[source])

    def resumed(strategy):
        dataset = of(strategy)
        dataset.load_state_dict(position)
        iterator = iter(dataset)
        return iterator.element_spec, dataset.state_dict(), [np.asarray(select_replica(batch)).tolist() for batch in iterator]

    whole, _ = taken(of, 1)
    _, position = taken(of, 1, num_batches=2)
    [(spec, at_once, left)] = on_replicas(1, resumed)
    assert (spec.dtype, len(spec.shape)) == (ROWS.dtype, 1)
    assert (at_once, left) == (position, whole[2:])


def of_ranks(kind, batch_size, **options):
    """Return what gives each replica its shard of the rows, in batches of its own."""

    def make(context):
        dataset = changed(batch_size=batch_size, kind=kind, **{"shuffle": False, **options})
        return dataset.shard(context.num_input_pipelines, context.input_pipeline_id)

    return lambda strategy: distribute_from_function(strategy, make)


@pytest.mark.parametrize("kind", [mpistrat.ArrayDataset, mpistrat.MapDataset])
@pytest.mark.parametrize(("before", "after", "left"), [((2, 15), (3, 10), 5), ((3, 10), (1, 30), 5), ((1, 30), (2, 45), 2)])
def test_shards_in_order_go_on_on_any_number_of_replicas_at_the_same_row(kind, before, after, left):
    head, position = taken(of_ranks(kind, before[1]), before[0], num_batches=3)
    tail, end = taken(of_ranks(kind, after[1]), after[0], position)
    assert [sorted(batch) for batch in head] == [[*range(first, first + 30)] for first in range(0, 90, 30)]
    assert sorted(chain(*head, *tail)) == [*range(240)]
    assert (len(tail), at(end)) == (left, (1, 0))


OTHERS_OF_RANKS = [
    lambda context: changed(batch_size=10),
    lambda context: changed(seed=1),
    lambda context: changed(seed=context.input_pipeline_id),
    lambda context: changed(rows=240 - context.input_pipeline_id),
    lambda context: changed(batch_size=20 - 10 * context.input_pipeline_id),
    lambda context: [np.arange(20)] * 12,
]


@pytest.mark.parametrize("make", OTHERS_OF_RANKS)
def test_a_position_in_data_of_each_replica_is_none_in_other_data_of_one(make):
    def of(make):
        return lambda strategy: distribute_from_function(strategy, make)

    _, position = taken(of(lambda context: changed()), 2, num_batches=3)
    with pytest.raises(InvalidArgumentError, match=r"batch 3 .* it was one of .* 2 ranks .* and now"):
        taken(of(make), 2, position)
    taken(of(make), 2, {**position, "batch": 0})
