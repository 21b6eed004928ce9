"""Many arrays into a bucket and out of it in one launch: where they lie, and what is sent of that."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from mpistrat.device.abstract import address
from mpistrat.device.kernels import SegmentTable
from mpistrat.packing.fuse import DeviceCopyIn, DeviceCopyOut
from mpistrat.packing.layout import Layout
from tests.gpu.stand_in import StandInDevice

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
