"""The ceiling split of a global batch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.inputs.shard import shard_bounds


def shares(num_rows, num_replicas):
    return [list(range(*shard_bounds(num_rows, replica, num_replicas))) for replica in range(num_replicas)]


@pytest.mark.parametrize(
    ("num_rows", "num_replicas", "expected"),
    [
        (4, 2, [[0, 1], [2, 3]]),
        (2, 2, [[0], [1]]),
        (4, 5, [[0], [1], [2], [3], []]),
        (4, 3, [[0, 1], [2, 3], []]),
        (0, 3, [[], [], []]),
        (7, 1, [[0, 1, 2, 3, 4, 5, 6]]),
    ],
)
def test_known_splits(num_rows, num_replicas, expected):
    assert shares(num_rows, num_replicas) == expected


@given(st.integers(0, 200), st.integers(1, 20))
def test_every_row_goes_to_one_replica_in_order(num_rows, num_replicas):
    split = shares(num_rows, num_replicas)
    assert [row for share in split for row in share] == list(range(num_rows))
    assert max(map(len, split)) == -(-num_rows // num_replicas)
