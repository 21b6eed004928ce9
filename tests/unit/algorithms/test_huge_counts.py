"""More elements than a 32-bit number counts: plans and layouts of them, without the memory."""

from __future__ import annotations

import pytest

from mpistrat.algorithms.choose import PLANNERS
from mpistrat.packing.layout import Layout, pack_by_bytes, split_evenly
from mpistrat.topology.world import World

HUGE = 3 * 2**31 + 5


@pytest.mark.parametrize("shape", ["1x4", "4x1", "2x2", "3+1", "4+2+1+1"])
@pytest.mark.parametrize("algorithm", PLANNERS)
def test_chunks_of_a_huge_buffer_tile_it(shape: str, algorithm: str) -> None:
    plan = PLANNERS[algorithm](World.from_shape(shape), HUGE, 8, 2**28)
    position = 0
    for start, count in plan.chunks():
        assert start == position
        assert 0 < plan.padded(count) * 8 < 2**31, "scratch memory stays bounded"
        position += count
    assert position == HUGE
    assert plan.num_bytes == 8 * HUGE


def test_a_layout_of_huge_arrays_finds_every_element() -> None:
    layout = Layout([HUGE, 7, HUGE])
    assert layout.count == 2 * HUGE + 7
    segments = list(layout.segments(HUGE - 2, HUGE + 9, 2**20))
    assert [(segment.array, segment.start, segment.stop) for segment in segments] == [(0, HUGE - 2, HUGE), (1, 0, 7), (2, 0, 2)]
    assert [segment.offset for segment in segments] == [0, 2, 9]


def test_huge_arrays_are_packed_and_split() -> None:
    assert sum(len(pack) for pack in pack_by_bytes([8 * HUGE, 1, 8 * HUGE], 2**30)) == 3
    assert sum(split_evenly(HUGE, 7)) == HUGE
