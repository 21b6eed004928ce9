"""The slots of the control window."""

from mpistrat.transports.window import LEAST_SMALL_BYTES, MOST_READ_BYTES, MOST_SMALL_BYTES, _are_of_one_call, small_slot_bytes


def test_slots_are_whole_cache_lines_that_share_the_room_down_to_a_least():
    assert [ranks for ranks in range(1, 100) if small_slot_bytes(ranks) % 64] == []
    assert (small_slot_bytes(2), small_slot_bytes(3)) == (1 << 20, MOST_SMALL_BYTES)
    assert small_slot_bytes(8) == MOST_READ_BYTES // 64
    assert small_slot_bytes(1000) == LEAST_SMALL_BYTES


def test_marks_of_one_call_are_known_by_any_barrier():
    digest = 0x1234567890ABCDE0
    assert _are_of_one_call(digest + 7, digest + 9)
    assert _are_of_one_call(digest + 9, digest + 7)
    assert not _are_of_one_call(digest + 7, (digest | 1) + 7), "one compares first"
    assert not _are_of_one_call(digest + 7, digest + (1 << 20) + 7)
