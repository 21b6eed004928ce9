"""Copy in and copy out: what goes into a bucket comes out again, cast, folded and divided on the way."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.packing import fuse
from mpistrat.packing.fuse import CopyIn, CopyOut
from mpistrat.packing.layout import Layout
from mpistrat.reduction import ReduceOp

SUM, MEAN = ReduceOp.SUM, ReduceOp.MEAN


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch):
    monkeypatch.setattr(fuse, "SEGMENT_BYTES", 64)
    monkeypatch.setattr(fuse, "GROUP_BYTES", 48)


def finish(steps):
    return sum(1 for _ in steps)


@given(st.lists(st.integers(0, 60), max_size=6), st.data())
def test_what_goes_in_comes_out(counts, data):
    layout = Layout(counts)
    arrays = [np.arange(count, dtype=np.float32) + 1000 * index for index, count in enumerate(counts)]
    results = [np.full_like(array, np.nan) for array in arrays]
    cuts = sorted(data.draw(st.lists(st.integers(0, layout.count), max_size=3)))
    for start, stop in zip([0, *cuts], [*cuts, layout.count], strict=True):
        padding = data.draw(st.integers(0, 5))
        buffer = np.full(stop - start + padding, np.nan, np.float32)
        finish(CopyIn(layout.part(start, stop), buffer).run(arrays))
        assert (buffer == np.concatenate([*arrays, np.empty(0, np.float32)])[start:stop].tolist() + [0] * padding).all()
        middle = data.draw(st.integers(0, buffer.size))
        parts = [(0, middle, (buffer[:middle],)), (middle, buffer.size, (buffer[middle:],))]
        finish(CopyOut(layout.part(start, stop), parts, SUM, 1).run(results))
    assert all((result == array).all() for result, array in zip(results, arrays, strict=True))


def test_copies_are_steps_of_bounded_size():
    layout, buffer = Layout([100, 3]), np.empty(103, np.float32)
    arrays = [np.ones(100, np.float32), np.ones(3, np.float32)]
    assert finish(CopyIn(layout, buffer).run(arrays)) == 7, "6 pieces of 16 elements, and 4 with the other array"
    assert finish(CopyOut(layout, [(0, 103, (buffer,))], SUM, 1).run(arrays)) == 7


@pytest.mark.parametrize(
    ("op", "divisor", "expected"), [(SUM, 1, 111), (MEAN, 2, 55.5), (ReduceOp.MAX, 1, 100), (ReduceOp.PROD, 1, 1000)]
)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("counts", [[40], [2, 1, 0, 3, 1, 33]], ids=["one array", "small ones"])
def test_addends_are_folded(op, divisor, expected, dtype, counts):
    addends = tuple(np.full(40, value, np.float64) for value in (1, 10, 100))
    targets = [np.empty(count, dtype) for count in counts]
    finish(CopyOut(Layout(counts), [(0, 40, addends)], op, divisor).run(targets))
    assert np.concatenate(targets).tolist() == [expected] * 40
    assert [set(addend) for addend in addends] == [{1}, {10}, {100}], "peers' memory is only read"
