"""Many arrays in a bucket: their segments and packs; what goes in comes out again, cast, folded and divided on the way."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat import packing
from mpistrat.device.cuda import address
from mpistrat.device.kernels import SegmentTable
from mpistrat.packing import CopyIn, CopyOut, DeviceCopyIn, DeviceCopyOut, Layout, pack_by_bytes, split_evenly
from mpistrat.reduction import ReduceOp
from tests.gpu.stand_in import StandInDevice

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


def test_a_range_of_a_layout_is_cut_at_its_ends_and_copies_are_steps_of_bounded_size():
    whole, part = Layout([4, 3, 5]), Layout([4, 3, 5], first=2, count=7)
    assert part.count == 7
    assert [each.is_one_array for each in (part, Layout([4]), Layout([4], first=0, count=3), Layout([4, 0]))] == [0, 1, 0, 0]
    found = [(s.array, s.start, s.stop, s.offset) for s in part.segments(0, 7, 100)]
    assert found == [(0, 2, 4, 0), (1, 0, 3, 2), (2, 0, 2, 5)]
    shifted = [(p.array, p.start, p.stop) for p in whole.segments(2, 9, 100)]
    assert [(p.array, p.start, p.stop) for p in part.segments(0, 7, 100)] == shifted
    layout, buffer = Layout([100, 3]), np.empty(103, np.float32)
    arrays = [np.ones(100, np.float32), np.ones(3, np.float32)]
    assert finish(CopyIn(layout, buffer).run(arrays)) == 7, "6 pieces of 16 elements, and 4 with the other array"
    assert finish(CopyOut(layout, [(0, 103, (buffer,))], SUM, 1).run(arrays)) == 7


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


SUM, MEAN = ReduceOp.SUM, ReduceOp.MEAN


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch):
    monkeypatch.setattr(packing, "SEGMENT_BYTES", 64)
    monkeypatch.setattr(packing, "GROUP_BYTES", 48)


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


F32 = np.dtype(np.float32)
HIGH = 2**64 - 4096


class Advertised:
    """An array of another library: nothing is known of it but what it advertises."""

    def __init__(self, start, count=8, strides=(4,), is_read_only=False):
        self.start, self.size, self.strides, self.is_read_only = start, count, strides, is_read_only
        self.dtype, self.itemsize, self.shape, self.ndim = F32, 4, (count,), 1
        self.flags = SimpleNamespace(c_contiguous=strides == (4,))

    @property
    def __cuda_array_interface__(self):
        return {"shape": self.shape, "typestr": "<f4", "data": (self.start, self.is_read_only), "version": 3}


class Recorded(StandInDevice):
    """Keeps what it would launch, with the table of addresses as it was then."""

    def __init__(self):
        super().__init__()
        self.launched = []
        self.kernels = self

    def launch(self, kernel, num_blocks, arguments):
        table, _, count, _ = map(int, arguments)
        held = (ctypes.c_uint64 * (3 * count)).from_address(table)
        self.launched.append(np.array(held).reshape(-1, 3).tolist())

    def finish(self):
        while not self.current_stream().record().done():
            pass


@pytest.fixture
def recorded():
    device = Recorded()
    yield device
    device.close()


@pytest.mark.parametrize("start", [0, 256, 2**47 - 256, 2**57 - 256, 2**63, HIGH])
def test_an_address_is_taken_as_it_is_advertised(start):
    assert address(Advertised(start)) == start
    assert address(Advertised(np.uint64(start))) == start
    assert type(address(Advertised(np.uint64(start)))) is int
    assert address(Advertised(start, is_read_only=True)) == start


def test_a_table_holds_every_address_of_arrays_that_are_not_empty():
    table = SegmentTable([2, 3], F32, F32)
    table.point([HIGH, 2**63], [2**57, 8])
    assert table.rows.tolist() == [[HIGH, 2**57, 2], [2**63, 8, 3]]
    with pytest.raises(OverflowError):
        table.point([-8, 0], [16, 32])
    table = SegmentTable([4, 0, 2], F32, F32)
    table.point([16, 99, 32], [48, 99, 64])
    assert table.rows.tolist() == [[16, 48, 4], [32, 64, 2]]
    nothing = SegmentTable([0, 0], F32, F32)
    nothing.point([1, 2], [3, 4])
    assert nothing.num_tiles == len(nothing.rows) == 0


def test_a_high_array_is_read_at_its_segments_and_what_follows_them_is_cleared(recorded):
    layout = Layout([8, 8])
    buffer = recorded.allocate(4 * 16).view(F32)
    recorded.put(buffer, np.full(16, 7, F32))
    start = buffer.ctypes.data
    list(DeviceCopyIn(recorded, layout.part(6, 12), buffer[:8], [F32] * 2).run([Advertised(HIGH), Advertised(2**63)]))
    recorded.finish()
    assert recorded.launched == [[[HIGH + 24, start, 2], [2**63, start + 8, 4]]]
    assert recorded.get(buffer).tolist() == [7] * 6 + [0] * 2 + [7] * 8


def test_empty_arrays_are_nowhere_and_move_nothing(recorded):
    layout = Layout([0, 8, 0])
    buffer = recorded.allocate(4 * 8).view(F32)
    arrays = [Advertised(0, 0), Advertised(2**40), Advertised(0, 0)]
    list(DeviceCopyIn(recorded, layout, buffer, [F32] * 3).run(arrays))
    list(DeviceCopyOut(recorded, layout, [(0, 8, buffer)], 1, [F32] * 3).run(arrays))
    none = Layout([0, 0])
    for _ in range(2):  # a bucket of empty arrays launches nothing
        list(DeviceCopyIn(recorded, none, buffer[:0], [F32] * 2).run(arrays[::2]))
        list(DeviceCopyOut(recorded, none, [(0, 0, buffer[:0])], 1, [F32] * 2).run(arrays[::2]))
        list(DeviceCopyOut(recorded, none, [], 1, [F32] * 2).run(arrays[::2]))
    recorded.finish()
    start = buffer.ctypes.data
    assert recorded.launched == [[[2**40, start, 8]], [[start, 2**40, 8]]]


def test_a_table_is_sent_only_where_addresses_have_changed(recorded):
    layout = Layout([8, 8])
    buffer = recorded.allocate(4 * 16).view(F32)
    sent = []
    stream = recorded.current_stream()
    copy, stream.copy = stream.copy, lambda *arguments: (sent.append(arguments), copy(*arguments))
    pack = DeviceCopyIn(recorded, layout, buffer, [F32] * 2)
    for first, second in ((256, 512), (256, 512), (256, 1024), (256, 1024), (256, 512)):
        list(pack.run([Advertised(first), Advertised(second)]))
    recorded.finish()
    assert len(sent) == 3
    assert [rows[1][0] for rows in recorded.launched] == [512, 512, 1024, 1024, 512]


@pytest.mark.parametrize("strides", [(8,), (-4,), (0,)])
def test_what_is_not_contiguous_is_refused(recorded, strides):
    buffer = recorded.allocate(4 * 8).view(F32)
    with pytest.raises(AssertionError, match="not contiguous"):
        list(DeviceCopyIn(recorded, Layout([8]), buffer, [F32]).run([Advertised(4096, strides=strides)]))
