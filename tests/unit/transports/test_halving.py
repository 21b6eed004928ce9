"""Recursive halving and doubling: ranks agree, each contribution is counted once, and rounds and bytes are the fewest."""

from __future__ import annotations

from collections import Counter

import pytest

from mpistrat.device.kernels import PACKET_BYTES
from mpistrat.transports.halving import Halving

SIZES = range(1, 18)


def divisions(size):
    """Return bounds of parts: equal, uneven, all in one, none."""
    yield [2 * rank for rank in range(size + 1)]
    yield [rank * (rank + 1) // 2 for rank in range(size + 1)]
    yield [0] * size + [7]
    yield [0] + [3] * size
    yield [rank * 5 // size for rank in range(size + 1)]
    yield [0] * (size + 1)


def run(every, held):
    """Carry out the rounds of all ranks; return what each rank holds of each element: whose contributions, how often."""
    for rounds in zip(*(halving.rounds for halving in every), strict=True):
        sent = [
            [[held[rank][place] for place in range(part.start, part.stop)] for part in each.sends]
            for rank, each in enumerate(rounds)
        ]
        for rank, each in enumerate(rounds):
            assert rounds[each.source].to == rank
            assert rounds[each.source].sends == each.targets, "sender and receiver disagree"
            for target, values in zip(each.targets, sent[each.source], strict=True):
                for place, value in zip(range(target.start, target.stop), values, strict=True):
                    held[rank][place] = held[rank][place] + value if each.reduces else value
    return held


@pytest.mark.parametrize("limit", [1, 3, 100])
@pytest.mark.parametrize("size", SIZES)
def test_every_contribution_arrives_once(size, limit):
    for count in (0, 1, size - 1, 2 * size, 5 * size + 3):
        every = [Halving.all_reduce(rank, size, count, limit) for rank in range(size)]
        held = run(every, [[Counter({rank: 1}) for _ in range(count)] for rank in range(size)])
        assert all(found == Counter(range(size)) for row in held for found in row)


@pytest.mark.parametrize("size", SIZES)
def test_every_part_is_gathered_whatever_their_bounds(size):
    for bounds in divisions(size):
        every = [Halving.all_gather(rank, size, bounds, 2) for rank in range(size)]
        held = run(every, [[Counter({rank: 1}) for _ in range(bounds[-1])] for rank in range(size)])
        for row in held:
            for rank in range(size):
                assert row[bounds[rank] : bounds[rank + 1]] == [Counter({rank: 1})] * (bounds[rank + 1] - bounds[rank])


@pytest.mark.parametrize("size", SIZES)
def test_rounds_and_bytes_are_the_fewest(size):
    for rank in range(size):
        rounds = Halving.all_reduce(rank, size, 10 * size, 10**9).rounds
        assert len(rounds) == 2 * (size - 1).bit_length()
        for reduces in (True, False):
            sent = [part.stop - part.start for each in rounds if each.reduces is reduces for part in each.sends]
            assert sum(sent) == 10 * (size - 1)


@pytest.mark.parametrize("size", SIZES)
def test_what_is_gathered_was_sent_before_and_is_summed_no_more(size):
    """So the receives of all gathering rounds may be posted when the last summing round has ended."""
    for rank in range(size):
        rounds = Halving.all_reduce(rank, size, 4 * size, 3).rounds
        sent, gathered = Counter(), Counter()
        for each in rounds:
            if each.reduces:
                assert not sent.keys() & {place for part in each.targets for place in range(part.start, part.stop)}
                sent.update(place for part in each.sends for place in range(part.start, part.stop))
            else:
                gathered.update(place for part in each.targets for place in range(part.start, part.stop))
        assert sent == gathered
        assert set(sent.values()) <= {1}


@pytest.mark.parametrize("size", SIZES)
def test_what_is_summed_fits_in_the_length_of_the_buffer_and_a_packet_for_each_round(size):
    for rank in range(size):
        for count in (1, 17 * size, 1000):
            rounds = Halving.all_reduce(rank, size, count, 5).rounds
            landed = [sum(part.stop - part.start for part in each.targets) for each in rounds if each.reduces]
            aligned = sum(-(-num_bytes // PACKET_BYTES) * PACKET_BYTES for num_bytes in landed)
            assert aligned <= count + size.bit_length() * PACKET_BYTES


def test_two_ranks_exchange_halves():
    scatter, gather = Halving.all_reduce(1, 2, 8, 100).rounds
    assert (scatter.to, scatter.source, scatter.sends, scatter.targets) == (0, 0, (slice(0, 4),), (slice(4, 8),))
    assert (gather.sends, gather.targets) == ((slice(4, 8),), (slice(0, 4),))
