"""The order of a ring: what must have left before is known, and how parts are cut."""

from types import SimpleNamespace

import pytest

from mpistrat.transports.cuda_aware import SEGMENT_BYTES, CudaAwareTransport
from mpistrat.transports.ring import ALL_REDUCE, Ring

MIB = 1 << 20
BOUNDS = [[0, 4, 8, 12], [0, 0, 11, 12], [0, 5, 5, 5]]


def rings(halves, size, bounds, limit):
    return [Ring(rank, size, bounds, limit, halves) for rank in range(size)]


@pytest.mark.parametrize("bounds", BOUNDS)
def test_what_is_overwritten_must_have_left(bounds):
    for ring in rings(ALL_REDUCE, 3, bounds, 2):
        for index, (target, reduces) in enumerate(zip(ring.targets, ring.reduces, strict=True)):
            places = set(range(target.start, target.stop))
            leaving = [i for i in range(index) if places & set(range(ring.sends[i].start, ring.sends[i].stop))]
            assert ring.sent_before[index] == (None if reduces or not leaving else leaving[-1])


@pytest.mark.parametrize(
    ("part_bytes", "segments"),
    [(0, 1), (1, 1), (MIB, 1), (MIB + 1, 2), (2 * MIB, 2), (4 * MIB, 4), (7 * MIB, 4), (16 * MIB, 4), (64 * MIB, 16)],
)
def test_parts_of_middle_size_are_cut_into_a_few_segments_and_large_ones_into_large_ones(part_bytes, segments):
    longest = CudaAwareTransport._segment_bytes(SimpleNamespace(segment_bytes=SEGMENT_BYTES), part_bytes)
    assert Ring(0, 3, [0, part_bytes, 2 * part_bytes, 3 * part_bytes], longest, ALL_REDUCE).segments == segments
    assert longest <= SEGMENT_BYTES
    shorter = SimpleNamespace(segment_bytes=1 << 14)
    assert CudaAwareTransport._segment_bytes(shorter, 100 * MIB) == 1 << 14, "no longer than where it lands"
