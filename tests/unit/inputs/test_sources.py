"""What a dataset can be made of: arrays, samples, files, iterables; and what it cannot."""

from functools import partial
from typing import NamedTuple

import numpy as np
import pytest

import mpistrat
from mpistrat.errors import InvalidArgumentError, UnsupportedDtypeError
from mpistrat.inputs.rebatch import ArraySpec, share
from mpistrat.inputs.sources import ArrayDataset, FileDataset, IterableDataset, MapDataset, as_dataset

INT64 = np.dtype(np.int64)


class Sample(NamedTuple):
    x: np.ndarray
    y: int


class Squares:
    """Samples, as PyTorch's map-style datasets give them."""

    def __init__(self, length):
        self.length, self.asked = length, []

    def __getitem__(self, index):
        self.asked.append(index)
        return Sample(np.full((2, 3), index, np.float32), index * index)

    def __len__(self):
        return self.length


def rows_of(batches):
    return [batch.tolist() for batch in batches]


def files_of(*sizes):
    """Return names of files, and a function that reads them: the rows of file i are numbered from 100 i on."""
    contents = {f"part-{index}": np.arange(100 * index, 100 * index + size) for index, size in enumerate(sizes)}
    return list(contents), contents.__getitem__


@pytest.mark.parametrize("kind", [ArrayDataset, MapDataset])
def test_every_epoch_has_its_own_order(kind):
    dataset, other_seed = (kind(np.arange(50), batch_size=50, shuffle=True, seed=seed) for seed in (3, 4))
    first, second = (batch.tolist() for _ in range(2) for batch in dataset)
    assert first != second
    assert sorted(first) == sorted(second) == list(range(50))
    assert next(iter(other_seed)).tolist() != first


def test_the_distributed_dataset_counts_its_own_epochs():
    dataset = ArrayDataset(np.arange(50), batch_size=50, shuffle=True)
    distributed = mpistrat.OneDeviceStrategy().experimental_distribute_dataset(dataset)
    next(iter(dataset))  # as one rank alone may do
    [first] = distributed
    [second] = distributed
    assert first.tolist() == next(dataset.batches(0)).tolist()
    assert second.tolist() == next(dataset.batches(1)).tolist()


@pytest.mark.parametrize("shuffle", [False, True])
def test_only_the_rows_of_this_replica_are_taken_from_a_memory_map_or_other_array(tmp_path, monkeypatch, shuffle):
    np.arange(64).tofile(tmp_path / "data.bin")
    mapped = np.memmap(tmp_path / "data.bin", np.int64, "r")
    taken = []

    def spy(dataset, rows, read=ArrayDataset._read):
        taken.extend(rows.tolist())
        return read(dataset, rows)

    monkeypatch.setattr(ArrayDataset, "_read", spy)
    shares = list(ArrayDataset(mapped, 16, shuffle).batches(0, replica=1, num_replicas=4))
    assert [type(share) for share in shares] == [np.ndarray] * 4
    assert np.concatenate(shares).tolist() == taken
    assert len(taken) == 16
    if not shuffle:
        assert taken == [row for first in (4, 20, 36, 52) for row in range(first, first + 4)]
    # not contiguous
    rows = np.broadcast_to(np.arange(3.0), (10**12, 3))  # more than any memory holds
    share = next(ArrayDataset(rows, 8).batches(0, replica=1, num_replicas=4))
    assert (share.tolist(), share.flags.c_contiguous) == ([[0, 1, 2]] * 2, True)


def test_text_can_be_fed():
    assert [batch.tolist() for batch in ArrayDataset(np.array(["a", "b", "c"]), 2)] == [["a", "b"], ["c"]]
    # stacked texts lose zero bytes at their ends, and are as long as the longest one of their batch
    with pytest.raises(UnsupportedDtypeError):
        list(MapDataset([b"ab\0", b"abcd"], 2))


def test_samples_are_collated_into_global_batches_of_which_a_replica_asks_for_its_own():
    batches = list(MapDataset(Squares(5), 2))
    assert [batch.y.tolist() for batch in batches] == [[0, 1], [4, 9], [16]]
    assert [batch.x.shape for batch in batches] == [(2, 2, 3), (2, 2, 3), (1, 2, 3)]
    assert isinstance(batches[0], Sample)
    assert batches[0].x.dtype == np.float32
    assert rows_of(MapDataset(["a", "bbb"], 2, collate_fn=lambda texts: np.array([*map(len, texts)]))) == [[1, 3]]
    samples = Squares(8)
    shares = list(MapDataset(samples, 4).batches(0, replica=1, num_replicas=2))
    assert [share.y.tolist() for share in shares] == [[4, 9], [36, 49]]
    assert samples.asked == [2, 3, 6, 7]
    [empty] = MapDataset(Squares(4), 4).batches(0, replica=4, num_replicas=5)
    assert (empty.x.shape, empty.x.dtype) == ((0, 2, 3), np.float32)
    assert (empty.y.shape, empty.y.dtype) == ((0,), INT64)


def test_tensors_stay_tensors():
    torch = pytest.importorskip("torch")
    [batch] = MapDataset(torch.utils.data.TensorDataset(torch.arange(3.0), torch.arange(3)), 3)
    assert isinstance(batch[0], torch.Tensor)
    assert batch[0].tolist() == batch[1].tolist() == [0, 1, 2]
    [empty] = MapDataset(torch.utils.data.TensorDataset(torch.ones(1, 2)), 1).batches(0, 1, 2)
    assert (type(empty[0]), tuple(empty[0].shape)) == (torch.Tensor, (0, 2))
    [first, _] = ArrayDataset({"x": torch.arange(4.0), "y": np.arange(4)}, 2)
    assert (type(first["x"]), type(first["y"])) == (torch.Tensor, np.ndarray)
    half = share(torch.arange(4), 1, 2)
    assert (type(half), half.tolist()) == (torch.Tensor, [2, 3])


def test_rows_of_files_become_global_batches_and_each_shard_reads_its_own_files():
    assert rows_of(FileDataset(*files_of(3, 0, 4), 2)) == [[0, 1], [2, 200], [201, 202], [203]]
    assert rows_of(FileDataset(*files_of(3, 4), 2, drop_remainder=True)) == [[0, 1], [2, 100], [101, 102]]
    parts = lambda name: ({"x": np.arange(first, first + 5)} for first in (0, 5))  # noqa: E731
    assert [batch["x"].tolist() for batch in FileDataset(["only"], parts, 4)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    names, read = files_of(2, 2, 2, 2, 2)
    opened = []
    dataset = FileDataset(names, lambda name: (opened.append(name), read(name))[1], 4)
    found = [rows_of(dataset.shard(2, index).batches(0)) for index in range(2)]
    assert found == [[[0, 1, 200, 201], [400, 401]], [[100, 101, 300, 301]]]
    assert opened == ["part-0", "part-2", "part-4", "part-1", "part-3"]
    assert rows_of(dataset.shard(2, 0).shard(2, 1).batches(0)) == [[200, 201]]


def test_shuffled_files_are_all_read_once_in_another_order_each_epoch():
    dataset = FileDataset(*files_of(5, 5, 5, 5), 20, shuffle=True, seed=2)
    first, second = rows_of(dataset)[0], rows_of(dataset)[0]
    assert first != second
    assert sorted(first) == sorted(second) == [100 * file + row for file in range(4) for row in range(5)]
    assert first[:5] != sorted(first[:5])
    sharded = [row for index in range(3) for batch in dataset.shard(3, index).batches(0) for row in batch.tolist()]
    assert sorted(sharded) == sorted(first)


def test_lists_and_iterables_can_be_iterated_again_and_a_generator_cannot():
    dataset = as_dataset([np.arange(4), np.arange(4, 6)])
    assert as_dataset(dataset) is dataset
    assert dataset.num_batches == 2
    assert rows_of(dataset) == rows_of(dataset) == [[0, 1, 2, 3], [4, 5]]
    assert rows_of(dataset.batches(0, 1, 2)) == [[2, 3], [5]]

    class Stream:
        def __iter__(self):
            return iter([np.arange(3), np.arange(2)])

    class SometimesSized(Stream):  # as PyTorch's DataLoader
        def __len__(self):
            raise TypeError("object of type 'Stream' has no len()")

    for stream in (Stream(), SometimesSized()):
        dataset = as_dataset(stream)
        assert (dataset.num_batches, dataset.describe()) == (None, type(stream).__name__)
        assert rows_of(dataset) == rows_of(dataset) == [[0, 1, 2], [0, 1]]
    dataset = as_dataset(np.arange(2) for _ in range(3))
    assert dataset.num_batches is None
    assert rows_of(dataset) == [[0, 1]] * 3
    with pytest.raises(RuntimeError, match="the generator can be iterated only once, so there is no second epoch"):
        iter(dataset)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ArrayDataset((np.zeros((5, 2, 3), np.float32), np.arange(5)), 2),
        lambda: MapDataset([(np.zeros((2, 3), np.float32), 1)] * 5, 2),
        lambda: FileDataset(["a"], lambda name: (np.zeros((5, 2, 3), np.float32), np.arange(5)), 2),
        lambda: as_dataset([(np.zeros((5, 2, 3), np.float32), np.arange(5))]),
        lambda: as_dataset((np.zeros((5, 2, 3), np.float32), np.arange(5)) for _ in range(2)),
    ],
)
def test_the_element_spec_is_known_without_losing_a_batch(make):
    dataset = make()
    assert dataset.element_spec == (ArraySpec((None, 2, 3), np.dtype(np.float32)), ArraySpec((None,), INT64))
    assert len(list(dataset)) == len(list(make()))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MapDataset([], 2), "a dataset without samples has no element_spec"),
        (lambda: FileDataset(["a"], lambda name: iter(()), 2), r"FileDataset\(1 files, batches of 2\) has no rows"),
        (lambda: as_dataset([]), "the list of 0 batches yields no batches"),
        (lambda: as_dataset(iter(())), "the tuple_iterator yields no batches"),
    ],
)
def test_without_elements_there_is_no_spec(make, message):
    dataset = make()
    with pytest.raises(InvalidArgumentError, match=message):
        _ = dataset.element_spec
    assert list(dataset) == []


@pytest.mark.parametrize("make", [partial(ArrayDataset, np.arange(10), 3), partial(MapDataset, range(10), 3)])
def test_rows_and_samples_are_sharded_one_by_one(make):
    assert [rows_of(make().shard(3, index)) for index in range(3)] == [[[0, 3, 6], [9]], [[1, 4, 7]], [[2, 5, 8]]]
    assert rows_of(make().shard(2, 1).shard(2, 0)) == [[1, 5, 9]]
    assert len(make().shard(3, 0)) == 2
    assert rows_of(make().shard(20, 15)) == []
    shuffled = make(shuffle=True).shard(2, 1)
    assert sorted(row for batch in shuffled for row in batch) == [1, 3, 5, 7, 9]


def test_a_marked_dataset_waits_for_its_numbers():
    dataset = ArrayDataset(np.arange(4), 2)
    marked = dataset.shard(mpistrat.SHARD_HINT, mpistrat.SHARD_HINT)
    assert (marked.is_hinted, dataset.is_hinted) == (True, False)
    with pytest.raises(InvalidArgumentError, match=r"was sharded by SHARD_HINT.*auto_shard_policy=AutoShardPolicy.HINT"):
        iter(marked)
    assert rows_of(marked.shard(2, 1)) == [[1, 3]]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (MapDataset([1] * 4, 2), MapDataset([1] * 5, 2)),
        (FileDataset(["a", "b"], np.load, 2), FileDataset(["b", "a"], np.load, 2)),
        (FileDataset(["a"], np.load, 2), FileDataset(["a"], np.load, 3)),
        (FileDataset(["a"], np.load, 2, True, 1), FileDataset(["a"], np.load, 2, True, 2)),
        (as_dataset([1]), as_dataset([1, 2])),
        (as_dataset([1]), as_dataset(iter([1]))),
    ],
)
def test_datasets_that_differ_are_described_differently(one, other):
    assert one.describe() != other.describe()
    # files in folders of their own are the same
    assert FileDataset(["/a/x"], np.load, 2).describe() == FileDataset(["/b/x"], np.load, 2).describe()


@pytest.mark.parametrize(("num_rows", "batch_size"), [(7, 1), (8, 1), (12, 3), (14, 3)])
def test_the_batches_of_shards_that_drop_rows_are_those_of_all_only_where_none_is_dropped(num_rows, batch_size):
    shards = [ArrayDataset(np.arange(num_rows), batch_size, drop_remainder=True).shard(2, index) for index in range(2)]
    joint = [np.sort(np.concatenate(each)) for each in zip(*(shard.batches(0) for shard in shards), strict=False)]
    whole = [shard.whole(2, index) for index, shard in enumerate(shards)]
    if num_rows % (2 * batch_size):
        assert whole == [None, None]
    else:
        assert [batch.tolist() for batch in whole[0].batches(0)] == [batch.tolist() for batch in joint]


THREE, UNLIKE_FILES = np.zeros(3), {"a": np.zeros((2, 3)), "b": np.zeros((2, 4))}
ALIKE = r"must be alike; b has .*\(None, 4\).*\(None, 3\)"
UNLIKE = "different shapes or structures cannot be stacked.*collate_fn"


class Wrong:
    """Has another length than it yields batches."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter([np.arange(3)] * 2)

    def __len__(self):
        return self.length


NO_BATCHES = {
    r"got ndarray. Arrays are cut into batches by mpistrat.ArrayDataset\(arrays, batch_size\)": np.zeros((4, 2)),
    "got dict. Arrays are cut into batches": {"x": np.zeros(4)},
    r"got Squares. Samples are collated into batches by mpistrat.MapDataset\(samples, batch_size\)": Squares(3),
    "got str": "data.npy",
    "got bytes": b"data.npy",
    "got NoneType$": None,
    "got int$": 3,
}


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ArrayDataset(THREE, 0), InvalidArgumentError, "batch_size must be at least 1; got 0"),
        (lambda: ArrayDataset(THREE, 2.0), TypeError, "batch_size must be an int; got 2.0"),
        (lambda: ArrayDataset(THREE, 2, True, -1), InvalidArgumentError, "seed must be at least 0; got -1"),
        (lambda: ArrayDataset({"x": THREE, "y": THREE[1:]}, 2), InvalidArgumentError, r"\['x'\] has 3, arrays\['y'\] has 2"),
        (lambda: ArrayDataset((), 2), InvalidArgumentError, "at least one array"),
        (lambda: ArrayDataset([1, 2], 2), InvalidArgumentError, r"arrays\[0\] is a scalar; .*np.array\(list\)"),
        (lambda: ArrayDataset(np.ma.array([1.0], mask=[True]), 2), UnsupportedDtypeError, "it has a mask, which would be lost"),
        (lambda: MapDataset(iter([1]), 2), TypeError, r"samples must have __getitem__\(number\).*; got list_iterator"),
        (lambda: MapDataset({0: 1}, 2), TypeError, "; got dict"),
        (lambda: MapDataset(3, 2), TypeError, "; got int"),
        (lambda: MapDataset({1, 2}, 2), TypeError, "; got set"),
        (lambda: FileDataset("data/*.npy", np.load, 2), TypeError, "files must be a sequence of paths.*; got 'data/"),
        (lambda: FileDataset(["a"], "load", 2), TypeError, "read_fn must be a function of a path, .* example; got 'load'"),
        (lambda: FileDataset([], np.load, 2), InvalidArgumentError, "at least one file; got none"),
        (lambda: ArrayDataset(THREE, 2).shard(2, 2), InvalidArgumentError, "index must be one of 0 to 1; got 2"),
        (lambda: ArrayDataset(THREE, 2).shard(0, 0), InvalidArgumentError, "num_shards must be at least 1; got 0"),
        (lambda: ArrayDataset(THREE, 2).shard(2, -1), InvalidArgumentError, "index must be one of 0 to 1; got -1"),
        (lambda: ArrayDataset(THREE, 2).shard(2.0, 1), TypeError, "num_shards must be an int; got 2.0"),
        (lambda: IterableDataset([THREE]).shard(2, 0), InvalidArgumentError, "a list of batches cannot be sharded"),
        *(
            (lambda source=source: as_dataset(source), TypeError, f"a dataset is a mpistrat.ArrayDataset, .*; {message}")
            for message, source in NO_BATCHES.items()
        ),
        # what only iterating tells
        (lambda: list(MapDataset([np.zeros(2), THREE], 2)), InvalidArgumentError, UNLIKE),
        (lambda: list(MapDataset([(1, 2), (1,)], 2)), InvalidArgumentError, UNLIKE),
        (lambda: list(FileDataset(["a", "b"], UNLIKE_FILES.get, 2)), InvalidArgumentError, ALIKE),
        (lambda: list(as_dataset([1, 2])), InvalidArgumentError, r"every element .* a batch.*element is 1\. Batch the dataset"),
        *(
            (
                lambda length=length: list(as_dataset(Wrong(length))),
                InvalidArgumentError,
                rf"the Wrong has a len\(\) of {length} batches, but {found}",
            )
            for length, found in ((3, "yields 2"), (1, "yields more"))
        ),
    ],
)
def test_what_makes_no_dataset_or_no_batches_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()
