"""ArrayDataset: global batches, their order, and what each replica gets of them."""

import numpy as np
import pytest

import mpistrat
from mpistrat.errors import InvalidArgumentError, UnsupportedDtypeError
from mpistrat.inputs.sources import ArrayDataset


@pytest.mark.parametrize("kind", [mpistrat.ArrayDataset, mpistrat.MapDataset])
def test_every_epoch_has_its_own_order(kind):
    dataset, other_seed = (kind(np.arange(50), batch_size=50, shuffle=True, seed=seed) for seed in (3, 4))
    first, second = (batch.tolist() for _ in range(2) for batch in dataset)
    assert first != second
    assert sorted(first) == sorted(second) == list(range(50))
    assert next(iter(other_seed)).tolist() != first


def test_the_distributed_dataset_counts_its_own_epochs():
    dataset = mpistrat.ArrayDataset(np.arange(50), batch_size=50, shuffle=True)
    distributed = mpistrat.OneDeviceStrategy().experimental_distribute_dataset(dataset)
    next(iter(dataset))  # as one rank alone may do
    [first] = distributed
    [second] = distributed
    assert first.tolist() == next(dataset.batches(0)).tolist()
    assert second.tolist() == next(dataset.batches(1)).tolist()


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
