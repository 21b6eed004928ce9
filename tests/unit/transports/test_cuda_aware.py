"""How the parts of a ring are cut: into large messages, and into several where there is something to overlap."""

from __future__ import annotations

import pytest

from mpistrat.transports.cuda_aware import SEGMENT_BYTES, segment_bytes
from mpistrat.transports.ring import Ring

MIB = 1 << 20


@pytest.mark.parametrize(
    ("part_bytes", "segments"),
    [(0, 1), (1, 1), (MIB, 1), (MIB + 1, 2), (2 * MIB, 2), (4 * MIB, 4), (7 * MIB, 4), (16 * MIB, 4), (64 * MIB, 16)],
)
def test_parts_of_middle_size_are_cut_into_a_few_segments_and_large_ones_into_large_ones(part_bytes, segments):
    longest = segment_bytes(part_bytes)
    assert Ring.all_reduce(0, 3, 3 * part_bytes, longest).segments == segments
    assert longest <= SEGMENT_BYTES
    assert segment_bytes(100 * MIB, 1 << 14) == 1 << 14, "no longer than where it lands"
