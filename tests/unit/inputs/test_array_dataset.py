"""ArrayDataset: global batches, their order, and what each replica gets of them."""

import numpy as np
import pytest

import mpistrat
from mpistrat.context.values import PerReplica, select_replica
from mpistrat.errors import InvalidArgumentError, UnsupportedDtypeError
from mpistrat.inputs.sources import ArrayDataset
from tests.unit.replicas import on_replicas


def handed_out(dataset, num_replicas):
    """Return, for each step, what each replica got."""

    def program(strategy):
        return [select_replica(element) for element in strategy.experimental_distribute_dataset(dataset)]

    return list(zip(*on_replicas(num_replicas, program), strict=True))


def test_elements_are_per_replica_values_in_the_structure_of_the_data():
    def program(strategy):
        [(x, y)] = strategy.experimental_distribute_dataset(mpistrat.ArrayDataset((np.arange(4), np.ones(4)), batch_size=4))
        assert isinstance(x, PerReplica)
        step = strategy.run(lambda batch: [type(array) for array in batch], args=((x, y),))
        return select_replica(step)

    assert on_replicas(2, program) == [[np.ndarray, np.ndarray]] * 2


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4])
def test_shuffled_global_batches_do_not_depend_on_the_number_of_replicas(num_replicas):
    def data():
        return mpistrat.ArrayDataset(np.arange(23), batch_size=5, shuffle=True, seed=7)

    steps = handed_out(data(), num_replicas)
    joined = [np.concatenate(step).tolist() for step in steps]
    assert joined == [batch.tolist() for batch in data()]
    assert sorted(row for batch in joined for row in batch) == list(range(23))
    assert joined[0] != [0, 1, 2, 3, 4]


def test_every_epoch_has_its_own_order():
    dataset = mpistrat.ArrayDataset(np.arange(50), batch_size=50, shuffle=True, seed=3)
    first, second = (batch.tolist() for _ in range(2) for batch in dataset)
    assert first != second
    assert sorted(first) == sorted(second) == list(range(50))
    other_seed = mpistrat.ArrayDataset(np.arange(50), batch_size=50, shuffle=True, seed=4)
    assert next(iter(other_seed)).tolist() != first


def test_the_distributed_dataset_counts_its_own_epochs():
    dataset = mpistrat.ArrayDataset(np.arange(50), batch_size=50, shuffle=True)
    distributed = mpistrat.OneDeviceStrategy().experimental_distribute_dataset(dataset)
    next(iter(dataset))  # as one rank alone may do
    [first] = distributed
    [second] = distributed
    assert first.tolist() == next(dataset.batches(0)).tolist()
    assert second.tolist() == next(dataset.batches(1)).tolist()


@pytest.mark.parametrize(
    ("rows", "drop", "length"), [(10, False, 3), (10, True, 2), (8, False, 2), (8, True, 2), (3, True, 0), (0, False, 0)]
)
def test_length_is_the_number_of_global_batches(rows, drop, length):
    dataset = mpistrat.ArrayDataset(np.zeros(rows), batch_size=4, drop_remainder=drop)
    assert len(dataset) == length == len(list(dataset))
    distributed = mpistrat.OneDeviceStrategy().experimental_distribute_dataset(dataset)
    assert len(distributed) == length == len(list(distributed))


@pytest.mark.parametrize("shuffle", [False, True])
def test_only_the_rows_of_this_replica_are_taken_from_a_memory_map(tmp_path, monkeypatch, shuffle):
    np.arange(64).tofile(tmp_path / "data.bin")
    mapped = np.memmap(tmp_path / "data.bin", np.int64, "r")
    taken = []

    def spy(dataset, rows, read=ArrayDataset._read):
        taken.extend(rows.tolist())
        return read(dataset, rows)

    monkeypatch.setattr(ArrayDataset, "_read", spy)
    shares = list(mpistrat.ArrayDataset(mapped, 16, shuffle).batches(0, replica=1, num_replicas=4))
    assert [type(share) for share in shares] == [np.ndarray] * 4
    assert np.concatenate(shares).tolist() == taken
    assert len(taken) == 16
    if not shuffle:
        assert taken == [row for first in (4, 20, 36, 52) for row in range(first, first + 4)]


def test_of_an_array_that_is_not_contiguous_nothing_else_is_read():
    rows = np.broadcast_to(np.arange(3.0), (10**12, 3))  # more than any memory holds
    share = next(mpistrat.ArrayDataset(rows, 8).batches(0, replica=1, num_replicas=4))
    assert (share.tolist(), share.flags.c_contiguous) == ([[0, 1, 2]] * 2, True)


def test_text_can_be_fed_and_what_has_a_mask_cannot():
    assert [batch.tolist() for batch in mpistrat.ArrayDataset(np.array(["a", "b", "c"]), 2)] == [["a", "b"], ["c"]]
    with pytest.raises(UnsupportedDtypeError, match="it has a mask, which would be lost"):
        mpistrat.ArrayDataset(np.ma.array([1.0, 2.0], mask=[False, True]), 2)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((np.zeros(3), 0), InvalidArgumentError, "batch_size must be at least 1; got 0"),
        ((np.zeros(3), 2.0), TypeError, "batch_size must be an int; got 2.0"),
        ((np.zeros(3), 2, True, -1), InvalidArgumentError, "seed must be at least 0; got -1"),
        (({"x": np.zeros(3), "y": np.zeros(2)}, 2), InvalidArgumentError, r"arrays\['x'\] has 3, arrays\['y'\] has 2"),
        (((), 2), InvalidArgumentError, "at least one array"),
        (([1, 2], 2), InvalidArgumentError, r"arrays\[0\] is a scalar; .*np.array\(list\)"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        mpistrat.ArrayDataset(*arguments)
