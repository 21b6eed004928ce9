"""Partitioners: how many shards, and which rows each has."""

import numpy as np
import pytest

from mpistrat.errors import InvalidArgumentError
from mpistrat.experimental.partitioners import FixedShardsPartitioner, MaxSizePartitioner, MinSizePartitioner
from mpistrat.parameter_server.strategy import check_partition


@pytest.mark.parametrize(
    ("partitioner", "shape", "shards"),
    [
        (FixedShardsPartitioner(2), (10, 3), [2, 1]),
        (FixedShardsPartitioner(4), (2, 3), [2, 1]),
        (FixedShardsPartitioner(4), (0,), [1]),
        (MinSizePartitioner(4), (6, 1), [1, 1]),
        (MinSizePartitioner(4, max_shards=2), (6, 1), [2, 1]),
        (MinSizePartitioner(4, max_shards=100), (6, 1), [6, 1]),
        (MinSizePartitioner(10, max_shards=100), (6, 1), [2, 1]),
        (MinSizePartitioner(25, max_shards=100), (6, 1), [1, 1]),
        (MinSizePartitioner(max_shards=3), (100, 100), [1, 1]),
        (MinSizePartitioner(max_shards=3), (1 << 20,), [3]),
        (MaxSizePartitioner(24), (6, 1), [1, 1]),
        (MaxSizePartitioner(23), (6, 1), [2, 1]),
        (MaxSizePartitioner(8), (6, 1), [3, 1]),
        (MaxSizePartitioner(4), (6, 1), [6, 1]),
        (MaxSizePartitioner(1), (6, 1), [6, 1]),
        (MaxSizePartitioner(4, max_shards=3), (6, 1), [3, 1]),
        (MaxSizePartitioner(1024), (0, 4), [1, 1]),
    ],
)
def test_the_number_of_shards(partitioner, shape, shards):
    assert partitioner(shape, np.float32) == shards


def test_another_axis_may_be_split_and_a_string_has_the_bytes_that_are_said():
    assert FixedShardsPartitioner(3)((10, 6), np.float32, axis=1) == [1, 3]
    assert MaxSizePartitioner(8, bytes_per_string=8)((6, 1), object) == [6, 1]
    assert MinSizePartitioner(8, max_shards=9, bytes_per_string=4)((6, 1), object) == [3, 1]


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (FixedShardsPartitioner, [0]),
        *((kind, arguments) for kind in (MinSizePartitioner, MaxSizePartitioner) for arguments in ([0], [1, 0], [1, 1, 0])),
    ],
)
def test_an_argument_below_1_is_refused(kind, arguments):
    with pytest.raises(InvalidArgumentError, match="must be at least 1; got 0"):
        kind(*arguments)


@pytest.mark.parametrize("wrong", [[], [0, 1], [2], [2, 2], [2, 1, 1], "2", 2, None])
def test_what_is_no_partition_is_refused(wrong):
    with pytest.raises(InvalidArgumentError, match=r"accepted is a list .* for example \[2, 1\]"):
        check_partition(wrong, (10, 3))
    assert check_partition([5, 1], (3, 2)) == 3  # no more shards than rows
    assert check_partition([2], (10,)) == 2
