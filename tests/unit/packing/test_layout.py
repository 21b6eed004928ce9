"""Layout: the segments of a range tile it, each inside one array; packs follow the rule of TensorFlow."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.packing.layout import Layout, pack_by_bytes, split_evenly

counts = st.lists(st.integers(0, 40), max_size=10)


@given(counts, st.data())
def test_segments_tile_the_range(counts, data):
    layout = Layout(counts)
    assert layout.count == sum(counts)
    start = data.draw(st.integers(0, layout.count))
    stop = data.draw(st.integers(start, layout.count))
    longest = data.draw(st.integers(1, 50))
    reached = start
    for segment in layout.segments(start, stop, longest):
        assert 0 <= segment.start < segment.stop <= counts[segment.array]
        assert segment.stop - segment.start <= longest
        assert segment.offset == reached - start
        assert sum(counts[: segment.array]) + segment.start == reached, "in order, and nothing left out"
        reached += segment.stop - segment.start
    assert reached == stop


def test_a_range_of_a_layout_is_cut_at_its_ends():
    whole, part = Layout([4, 3, 5]), Layout([4, 3, 5], first=2, count=7)
    assert part.count == 7
    assert [each.is_one_array for each in (part, Layout([4]), Layout([4], first=0, count=3), Layout([4, 0]))] == [0, 1, 0, 0]
    found = [(s.array, s.start, s.stop, s.offset) for s in part.segments(0, 7, 100)]
    assert found == [(0, 2, 4, 0), (1, 0, 3, 2), (2, 0, 2, 5)]
    shifted = [(p.array, p.start, p.stop) for p in whole.segments(2, 9, 100)]
    assert [(p.array, p.start, p.stop) for p in part.segments(0, 7, 100)] == shifted


def test_without_a_limit_there_is_one_pack_of_all_or_none_of_nothing():
    assert pack_by_bytes([10, 20, 30, 40], 0) == [[0, 1, 2, 3]]
    assert pack_by_bytes([], 0) == []


@given(st.lists(st.integers(0, 100)), st.integers(1, 150))
def test_a_pack_is_closed_as_soon_as_it_exceeds_the_limit(sizes, limit):
    packs = pack_by_bytes(sizes, limit)
    assert [index for pack in packs for index in pack] == list(range(len(sizes)))
    for pack in packs:
        assert pack
        assert sum(sizes[index] for index in pack[:-1]) <= limit
    for pack in packs[:-1]:
        assert sum(sizes[index] for index in pack) > limit


@pytest.mark.parametrize(
    ("count", "num_packs", "parts"),
    [(10, 3, [3, 3, 4]), (9, 3, [3, 3, 3]), (3, 3, [1, 1, 1]), (7, 10**12, [7]), (0, 2, [0]), (7, 1, [7])],
)
def test_the_last_part_takes_the_remainder(count, num_packs, parts):
    assert split_evenly(count, num_packs) == parts
