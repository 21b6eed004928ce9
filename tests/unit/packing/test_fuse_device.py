"""Many arrays into a bucket and out of it in one launch, on the stand-in device."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from mpistrat.device.kernels import move_kernel
from mpistrat.packing.fuse_device import DeviceCopyIn, DeviceCopyOut
from mpistrat.packing.layout import Layout
from tests.gpu.on_host import HostKernels
from tests.gpu.stand_in import StandInDevice

F32, F64, BF16, C64, I32, I64 = map(np.dtype, (np.float32, np.float64, ml_dtypes.bfloat16, np.complex64, np.int32, np.int64))
PAIRS = [(F32, F32), (BF16, F32), (F32, BF16), (I32, I64), (I64, I32)]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return HostKernels.build(tmp_path_factory.mktemp("kernels"), [move_kernel(*pair) for pair in PAIRS], [])


@pytest.fixture
def device(kernels):
    device = StandInDevice(3)
    device.kernels = kernels
    yield device
    device.close()


def _on(device, values):
    memory = device.allocate(values.nbytes).view(values.dtype)
    device.put(memory, values)
    return memory


def _dtypes(arrays):
    return [array.dtype for array in arrays]


def _values(count, dtype, seed=0):
    return np.random.default_rng(seed).integers(-90, 90, count).astype(dtype)


@pytest.mark.parametrize("divisor", [1, 3])
def test_arrays_of_two_dtypes_go_in_and_come_out_as_a_mean(device, divisor):
    host = [_values(count, dtype, count) for count, dtype in ((5, F32), (0, F32), (3000, BF16), (1, BF16), (8200, F32))]
    layout = Layout([array.size for array in host])
    buffer = device.allocate(4 * (layout.count + 3)).view(F32)
    for _ in range(2):  # the second call finds its table on the device
        arrays = [_on(device, array) for array in host]
        list(DeviceCopyIn(device, layout, 0, layout.count, buffer, _dtypes(host)).run(arrays))
    found = device.get(buffer)
    np.testing.assert_array_equal(found[:-3], np.concatenate([array.astype(F32) for array in host]))
    np.testing.assert_array_equal(found[-3:], 0)
    results = [_on(device, np.full_like(array, 55)) for array in host]
    list(DeviceCopyOut(device, layout, 0, layout.count, [(0, layout.count, buffer)], divisor, _dtypes(host)).run(results))
    for array, result in zip(host, results, strict=True):
        np.testing.assert_array_equal(device.get(result), (array.astype(F32) / np.float32(divisor)).astype(array.dtype))


def test_a_bound_copy_follows_arrays_that_move(device):
    layout = Layout([700, 9])
    buffer = device.allocate(4 * layout.count).view(F32)
    copy = DeviceCopyIn(device, layout, 0, layout.count, buffer, [F32, F32])
    for seed in range(4):
        host = [_values(700, F32, seed), _values(9, F32, 50 + seed)]
        list(copy.run([_on(device, array) for array in host]))
        np.testing.assert_array_equal(device.get(buffer), np.concatenate(host))


def test_a_chunk_takes_its_range_and_parts_may_lie_elsewhere(device):
    host = [_values(count, F32, count) for count in (100, 50, 300)]
    layout = Layout([100, 50, 300])
    whole = np.concatenate(host)
    buffer = device.allocate(4 * 200).view(F32)
    list(DeviceCopyIn(device, layout, 60, 260, buffer, _dtypes(host)).run([_on(device, array) for array in host]))
    np.testing.assert_array_equal(device.get(buffer), whole[60:260])
    other = _on(device, whole[60:260] * 2)
    results = [_on(device, np.zeros_like(array)) for array in host]
    list(DeviceCopyOut(device, layout, 60, 260, [(0, 90, buffer[:90]), (90, 200, other[90:])], 1, _dtypes(host)).run(results))
    expected = np.zeros_like(whole)
    expected[60:150], expected[150:260] = whole[60:150], whole[150:260] * 2
    np.testing.assert_array_equal(np.concatenate([device.get(result) for result in results]), expected)


def test_the_mean_of_integers_and_of_complex_numbers(device):
    total = _on(device, np.array([-7, 7, 10], I64))
    result = _on(device, np.zeros(3, I32))
    list(DeviceCopyOut(device, Layout([3]), 0, 3, [(0, 3, total)], 4, [I32]).run([result]))
    assert device.get(result).tolist() == [-1, 1, 2]
    total, result = _on(device, np.array([3 + 6j, -9j], C64)), _on(device, np.zeros(2, C64))
    list(DeviceCopyOut(device, Layout([2]), 0, 2, [(0, 2, total)], 3, [C64]).run([result]))
    assert device.get(result).tolist() == [1 + 2j, -3j]
