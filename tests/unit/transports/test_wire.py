"""What travels between nodes: casts against those of NumPy and ml_dtypes, bit by bit, and what error feedback keeps."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.transports.wire import Cast, Wire

DTYPES = [np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)]
MANY = 40_000  # several pieces, all of them long enough for the integer arithmetic


def cast_by_numpy(values, dtype):
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(dtype)


def cast(values, dtype):
    sent = np.empty(values.size, dtype)
    Cast(Wire(dtype), values.size).compress(values, sent, 0)
    return sent


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number_comes_back_as_it_was(dtype):
    sent = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    wanted = sent.astype(np.float32)
    for order in (np.arange(1 << 16), np.argsort(~np.isfinite(wanted), kind="stable")):  # all mixed; all numbers first
        wide = np.full(1 << 16, 7, np.float32)
        Cast(Wire(dtype), 1 << 16).decompress(sent[order], wide)
        assert np.array_equal(wide, wanted[order], equal_nan=True)
        assert (np.signbit(wide) == np.signbit(wanted[order])).all()
        numbers = np.isfinite(wide)
        assert (cast(wide, dtype)[numbers] == sent[order][numbers]).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_lies_between_two_numbers_is_rounded_as_numpy_does(dtype):
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(values=st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=20), calls=st.integers(1, 30))
def test_with_error_feedback_the_sum_of_all_calls_is_off_by_one_rounding(dtype, values, calls):
    array, u = np.array(values, np.float32), 2.0**-11 if dtype == np.float16 else 2.0**-8
    caster, sent = Cast(Wire(dtype, error_feedback=True), array.size), np.empty(array.size, dtype)
    total = np.zeros(array.size)
    for _ in range(calls):
        caster.compress(array, sent, 0)
        total += sent.astype(np.float64)
    # what the last cast lost, of values a little larger; float32 and the subnormal numbers of float16 beside it
    bound = 1.01 * u * np.abs(array) * (1 + u) + calls * 2.0**-23 * np.abs(array) + 2.0**-25
    assert (np.abs(total - calls * array.astype(np.float64)) <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_a_result_loses_is_made_up_for_by_its_owner(dtype):
    caster, sent = Cast(Wire(dtype, error_feedback=True), 8), np.empty(3, dtype)
    caster.compress_total(np.array([1 + 2.0**-13] * 3, np.float32), sent, 2)
    assert (sent == 1).all()
    caster.compress(np.zeros(3, np.float32), sent, 2)
    assert (sent.astype(np.float32) == 2.0**-13).all()
    caster.compress(np.zeros(3, np.float32), sent, 2)
    assert (sent == 0).all()


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, 1e38])
def test_what_is_not_a_number_is_sent_once(bad):
    caster, sent = Cast(Wire(np.dtype(np.float16), error_feedback=True), 2), np.empty(2, np.float16)
    caster.compress(np.array([bad, 1 + 1.5 * 2.0**-12], np.float32), sent, 0)
    assert not np.isfinite(sent[0])
    caster.compress(np.array([1, 1 + 1.5 * 2.0**-12], np.float32), sent, 0)
    assert sent.tolist() == [1, 1 + 2.0**-10]


def test_casts_raise_no_warning_and_heed_no_error_state():
    with np.errstate(all="raise"):
        for wire in (Wire(np.dtype(np.float16)), Wire(np.dtype(np.float16), error_feedback=True)):
            Cast(wire, 3).compress(np.array([1e30, -1e30, np.nan], np.float32), np.empty(3, np.float16), 0)
