"""The order of a ring: neighbours agree on it, each contribution is counted once, and what must have left before is known."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

from mpistrat.transports.cuda_aware import SEGMENT_BYTES, CudaAwareTransport
from mpistrat.transports.ring import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Ring

MIB = 1 << 20
BOUNDS = [[0, 4, 8, 12], [0, 0, 11, 12], [0, 5, 5, 5]]


def rings(halves, size, bounds, limit):
    return [Ring(rank, size, bounds, limit, halves) for rank in range(size)]


@pytest.mark.parametrize("limit", [1, 3, 100])
@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("halves", [ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER])
def test_every_contribution_arrives_once(halves, bounds, limit):
    size, count = 3, bounds[-1]
    every = rings(halves, size, bounds, limit)
    held = [[Counter({rank: 1}) for _ in range(count)] for rank in range(size)]
    for index in range(len(every[0].sends)):
        arriving = [list(held[rank][every[rank].sends[index]]) for rank in range(size)]
        for rank, ring in enumerate(every):
            target = ring.targets[index]
            assert every[rank - 1].sends[index] == target, "neighbours disagree"
            for place, values in zip(range(target.start, target.stop), arriving[rank - 1], strict=True):
                held[rank][place] = held[rank][place] + values if ring.reduces[index] else Counter(values)
    for rank in range(size):
        for place in range(count):
            [owner] = [part for part in range(size) if bounds[part] <= place < bounds[part + 1]]
            if halves == ALL_GATHER:
                assert held[rank][place] == Counter({owner: 1})
            elif halves == ALL_REDUCE or owner == rank:
                assert held[rank][place] == Counter(range(size))


@pytest.mark.parametrize("bounds", BOUNDS)
def test_what_is_overwritten_must_have_left(bounds):
    for ring in rings(ALL_REDUCE, 3, bounds, 2):
        for index, (target, reduces) in enumerate(zip(ring.targets, ring.reduces, strict=True)):
            places = set(range(target.start, target.stop))
            leaving = [i for i in range(index) if places & set(range(ring.sends[i].start, ring.sends[i].stop))]
            assert ring.sent_before()[index] == (None if reduces or not leaving else leaving[-1])


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
