"""Transports of host memory: rings, slots, rounds of leaders, casts between nodes, and memory that MPI still works on."""

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.groups import group
from mpistrat.reduction import ReduceOp
from mpistrat.settings import MAX_MESSAGE_BYTES
from mpistrat.transports import small
from mpistrat.transports.cuda_aware import SEGMENT_BYTES, CudaAwareTransport
from mpistrat.transports.mpi import MpiTransport, until_complete
from mpistrat.transports.ring import ALL_REDUCE, Ring
from mpistrat.transports.window import LEAST_SMALL_BYTES, MOST_READ_BYTES, MOST_SMALL_BYTES, _are_of_one_call, small_slot_bytes
from mpistrat.transports.wire import Cast


def test_memory_is_kept_where_a_request_or_a_message_to_a_peer_cannot_be_started(monkeypatch):
    kept: list[object] = []
    monkeypatch.setattr(group, "_kept", kept)
    request, memory = object(), object()

    def requests():
        yield request
        raise OSError("no second one")

    with pytest.raises(OSError, match="no second one"):
        list(until_complete(requests(), memory))
    assert kept == [([request], memory)]
    kept: list[Any] = []
    monkeypatch.setattr(group, "_kept", kept)

    def refuse(*arguments):
        raise OSError("no more messages")

    comm = SimpleNamespace(Irecv=lambda message, *_: message[0], Isend=refuse)
    call = SimpleNamespace(tag=lambda channel: 1)
    ranks: Any = SimpleNamespace(comm=comm, call=call, rank=0, size=2, settings={MAX_MESSAGE_BYTES: 1 << 20})
    received = np.zeros(3)
    with pytest.raises(OSError, match="no more messages"):
        list(MpiTransport(ranks).exchange([received, received], [received, received]))
    [(requests, _)] = kept
    assert [np.shares_memory(request, received) for request in requests] == [True]


def test_messages_of_two_ranks_have_another_tag_in_each_round(monkeypatch):
    received, request = [], SimpleNamespace(Test=None)
    monkeypatch.setattr(small, "byte_message", lambda array: array)
    call = SimpleNamespace(digest=5, tag=lambda channel: 100 + channel)
    comm = SimpleNamespace(Recv_init=lambda _, peer, tag: received.append((peer, tag)) or request, Send_init=lambda *_: request)
    bound: Any = small.LeaderSum.__new__(small.LeaderSum)
    bound._group, bound._digest, bound._requests = SimpleNamespace(call=call, comm=comm, rank=0, size=4), -1, []
    bound._op, bound._is_finalized = ReduceOp.SUM, lambda: True
    own, result = np.ones(8), np.empty(8)
    bound._plan = list(small._rounds(bound._group, own, result))
    bound._bound()
    assert len(set(received)) == len(received) == 2  # MPI may start them in any order


@pytest.mark.parametrize("call", ["run", "steps"])
def test_memory_of_a_sum_that_is_given_up_is_kept(monkeypatch, call):
    kept: list[object] = []
    monkeypatch.setattr(small, "keep_alive_for_peers", kept.append)
    given_up: Any = small.LeaderSum.__new__(small.LeaderSum)
    given_up._start_all, given_up._is_finalized = lambda _: None, lambda: True
    given_up._bound = lambda: ([], [([lambda: False], lambda: None, [])], [])

    def wait(_):
        raise KeyboardInterrupt

    if call == "run":
        with pytest.raises(KeyboardInterrupt):
            given_up.run(wait)
    else:
        steps = given_up.steps()
        assert next(steps) is False
        steps.close()
    assert kept == [given_up]


MIB = 1 << 20


def rings(halves, size, bounds, limit):
    return [Ring(rank, size, bounds, limit, halves) for rank in range(size)]


@pytest.mark.parametrize("bounds", [[0, 4, 8, 12], [0, 0, 11, 12], [0, 5, 5, 5]])
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


def test_slots_are_whole_cache_lines_and_marks_of_one_call_are_known_by_any_barrier():
    assert [ranks for ranks in range(1, 100) if small_slot_bytes(ranks) % 64] == []
    assert (small_slot_bytes(2), small_slot_bytes(3)) == (1 << 20, MOST_SMALL_BYTES)
    assert small_slot_bytes(8) == MOST_READ_BYTES // 64
    assert small_slot_bytes(1000) == LEAST_SMALL_BYTES
    digest = 0x1234567890ABCDE0
    assert _are_of_one_call(digest + 7, digest + 9)
    assert _are_of_one_call(digest + 9, digest + 7)
    assert not _are_of_one_call(digest + 7, (digest | 1) + 7), "one compares first"
    assert not _are_of_one_call(digest + 7, digest + (1 << 20) + 7)


DTYPES = [np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)]
MANY = 40_000  # several pieces, all of them long enough for the integer arithmetic


def cast_by_numpy(values, dtype):
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(dtype)


def cast(values, dtype):
    sent = np.empty(values.size, dtype)
    Cast(dtype, values.size).compress(values, sent)
    return sent


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number_comes_back_as_it_was_and_what_lies_between_two_is_rounded_as_numpy_does(dtype):
    sent = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    wanted = sent.astype(np.float32)
    for order in (np.arange(1 << 16), np.argsort(~np.isfinite(wanted), kind="stable")):  # all mixed; all numbers first
        wide = np.full(1 << 16, 7, np.float32)
        Cast(dtype, 1 << 16).decompress(sent[order], wide)
        assert np.array_equal(wide, wanted[order], equal_nan=True)
        assert (np.signbit(wide) == np.signbit(wanted[order])).all()
        numbers = np.isfinite(wide)
        assert (cast(wide, dtype)[numbers] == sent[order][numbers]).all()
    numbers = np.arange(1 << 16, dtype=np.uint16).view(dtype).astype(np.float32)
    numbers = np.sort(numbers[np.isfinite(numbers)])
    middle = (numbers[:-1].astype(np.float64) + numbers[1:]) / 2
    middle = middle.astype(np.float32)  # exact: a tie has one digit more
    for values in (middle, np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(-np.inf))):
        assert cast(values, dtype).tobytes() == cast_by_numpy(values, dtype).tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(seed=st.integers(0, 2**32 - 1), shift=st.integers(0, 31), extra=st.lists(st.floats(width=32), max_size=3))
def test_any_bits_are_cast_as_numpy_does(dtype, seed, shift, extra):
    rng = np.random.default_rng(seed)
    # exponents near each other, so that many values are within the range of float16, and now and then none of the others
    bits = (rng.integers(0, 1 << 32, MANY, np.uint32) & np.uint32(0x83FFFFFF)) + np.uint32((shift + 100) << 23)
    values = bits.view(np.float32).copy()
    values[: len(extra)] = extra
    sent, wanted = cast(values, dtype), cast_by_numpy(values, dtype)
    numbers = ~np.isnan(values)
    assert (sent.view(np.uint16) == wanted.view(np.uint16))[numbers].all()
    assert np.isnan(sent[~numbers].astype(np.float32)).all()


@pytest.mark.parametrize("count", [5, MANY])
def test_what_float16_cannot_hold_becomes_infinite(count):
    values = np.full(count, 1.0, np.float32)
    values[:4] = 65519, 65520, -1e30, np.nan
    sent = cast(values, np.dtype(np.float16))
    assert sent[:3].tolist() == [65504, np.inf, -np.inf]
    assert np.isnan(sent[3])
    assert (sent[4:] == 1).all()


def test_casts_raise_no_warning_and_heed_no_error_state():
    with np.errstate(all="raise"):
        Cast(np.dtype(np.float16), 3).compress(np.array([1e30, -1e30, np.nan], np.float32), np.empty(3, np.float16))
