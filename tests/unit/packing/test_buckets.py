"""Buckets: TensorFlow's rule for packs, and its worked examples."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.errors import InvalidArgumentError
from mpistrat.packing.buckets import pack_by_bytes, split_evenly


@pytest.mark.parametrize(
    ("sizes", "limit", "packs"),
    [
        ([10, 20, 30, 40], 25, [[0, 1], [2], [3]]),
        ([40, 30, 20, 10], 25, [[0], [1], [2, 3]]),
        ([25, 25], 25, [[0, 1]]),
        ([25, 1, 25], 25, [[0, 1], [2]]),
        ([10, 20, 30, 40], 0, [[0, 1, 2, 3]]),
        ([10, 20, 30, 40], 100, [[0, 1, 2, 3]]),
        ([10, 20, 30, 40], 1, [[0], [1], [2], [3]]),
        ([0, 0, 0], 1, [[0, 1, 2]]),
        ([], 25, []),
        ([], 0, []),
    ],
)
def test_examples(sizes: list[int], limit: int, packs: list[list[int]]) -> None:
    assert pack_by_bytes(sizes, limit) == packs


@given(st.lists(st.integers(0, 100)), st.integers(1, 150))
def test_a_pack_is_closed_as_soon_as_it_exceeds_the_limit(sizes: list[int], limit: int) -> None:
    packs = pack_by_bytes(sizes, limit)
    assert [index for pack in packs for index in pack] == list(range(len(sizes)))
    for pack in packs:
        assert pack
        assert sum(sizes[index] for index in pack[:-1]) <= limit
    for pack in packs[:-1]:
        assert sum(sizes[index] for index in pack) > limit


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"bytes_per_pack must be 0 \(one pack\) or a positive number of bytes; got -1"
    ):
        pack_by_bytes([1], -1)


@pytest.mark.parametrize(
    ("count", "num_packs", "parts"),
    [(10, 3, [3, 3, 4]), (9, 3, [3, 3, 3]), (2, 3, [0, 0, 2]), (0, 2, [0, 0]), (7, 1, [7])],
)
def test_the_last_part_takes_the_remainder(count: int, num_packs: int, parts: list[int]) -> None:
    assert split_evenly(count, num_packs) == parts


@pytest.mark.parametrize("num_packs", [0, -1])
def test_there_is_no_cut_into_no_parts(num_packs: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"num_packs must be at least 1 to cut a buffer; got {num_packs}"):
        split_evenly(10, num_packs)
