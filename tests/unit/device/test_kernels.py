"""The kernels of the device: what they compute, on the host, for every alignment, length and dtype; and that they compile."""

import re
from contextlib import contextmanager
from functools import reduce
from importlib.resources import files

import ml_dtypes
import numpy as np
import pytest

from mpistrat.device.kernels import (
    BYTES_UNDER_WAY,
    THREADS,
    SegmentTable,
    divide_kernel,
    fold_into_kernel,
    fold_kernel,
    move_kernel,
)
from mpistrat.reduction import ReduceOp, accumulation_dtype, combine
from tests.gpu.on_host import HostKernels

BF16, F16, F32, F64 = (np.dtype(kind) for kind in (ml_dtypes.bfloat16, np.float16, np.float32, np.float64))
I32, I64, C64 = np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.complex64)
MOVES = [(F32, F32), (F32, BF16), (BF16, F32), (F32, F16), (F16, F32), (F64, F64), (I32, I64), (I64, I32)]
SUM, MIN, MAX, PROD = ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PROD
FOLDS = [(F32, SUM), (F64, SUM), (BF16, SUM), (F16, SUM), (I64, SUM), (C64, PROD)]
FOLDS += [(F32, MIN), (F32, MAX), (F32, PROD), (I32, MAX)]
DIVIDED = [BF16, F16, F32, I64]
TILE = {dtypes: THREADS * BYTES_UNDER_WAY // dtypes[0].itemsize for dtypes in MOVES}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    folds = [make(dtype, op) for dtype, op in FOLDS for make in (fold_kernel, fold_into_kernel)]
    folds += [divide_kernel(dtype) for dtype in DIVIDED]
    moves = [move_kernel(*dtypes) for dtypes in MOVES]
    return HostKernels.build(tmp_path_factory.mktemp("kernels"), [*moves, *folds])


def _values(dtype, count, seed=0):
    random = np.random.default_rng(seed)
    if dtype.kind in "iu":
        return random.integers(-1000, 1000, count).astype(dtype)
    return (random.standard_normal(count) * 100).astype(dtype)


def _aligned(dtype, count):
    raw = np.empty(count * dtype.itemsize + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + count * dtype.itemsize].view(dtype)


@contextmanager
def _guarded(dtype, count, shift):
    """Give memory that begins at an element, and find what is written beside it."""
    memory = _aligned(dtype, count + 2)
    memory[:] = 99
    yield memory[shift : shift + count]
    assert (memory[shift + count :] == 99).all()
    assert (memory[:shift] == 99).all()


def _move(kernels, sources, targets, divisor=1):
    dtypes = sources[0].dtype, targets[0].dtype
    table = SegmentTable([source.size for source in sources], *dtypes)
    table.point([source.ctypes.data for source in sources], [target.ctypes.data for target in targets])
    arguments = table.rows.ctypes.data, table.first_tile.ctypes.data, len(table.rows), divisor
    kernels.launch(move_kernel(*dtypes), table.num_tiles, arguments)


def _fold(kernels, buffers, start, target, op, first_peer=0):
    peers = np.array([buffer.ctypes.data for buffer in buffers], np.uint64)
    arguments = peers.ctypes.data, peers.size, start * target.itemsize, target.ctypes.data, target.size
    kernels.launch(fold_kernel(target.dtype, op), 3, (*arguments, first_peer))


def test_the_constants_of_both_languages_agree():
    text = (files("mpistrat.device") / "kernels.cu").read_text()
    constants = dict(re.findall(r"constexpr int (\w+) = (\d+);", text))
    assert (int(constants["THREADS"]), int(constants["BYTES_UNDER_WAY"])) == (THREADS, BYTES_UNDER_WAY)


@pytest.mark.parametrize("dtypes", MOVES, ids=lambda dtypes: f"{dtypes[0]} to {dtypes[1]}")
def test_many_arrays_are_moved_and_cast_at_every_alignment(kernels, dtypes):
    source, target = dtypes
    counts = [0, 1, 3, 7, 0, 8, 31, TILE[dtypes] - 1, TILE[dtypes], TILE[dtypes] + 9, 2 * TILE[dtypes], 5, 0]
    room = sum(counts) + 8 * len(counts)
    sources, targets = _aligned(source, room), _aligned(target, room)
    sources[:], before = _values(source, room), np.full(room, 77, target)
    targets[:] = before
    places = np.cumsum([0, *[count + 1 + index % 8 for index, count in enumerate(counts[:-1])]])
    _move(
        kernels,
        [sources[place : place + count] for place, count in zip(places, counts, strict=True)],
        [targets[place : place + count] for place, count in zip(places, counts, strict=True)],
    )
    expected = before
    for place, count in zip(places, counts, strict=True):
        expected[place : place + count] = sources[place : place + count].astype(target)
    np.testing.assert_array_equal(targets, expected)


@pytest.mark.parametrize(("half", "bits"), [(BF16, np.uint16), (F16, np.uint16)], ids=["bfloat16", "float16"])
def test_every_16_bit_float_survives_the_way_through_float32(kernels, half, bits):
    every = np.arange(2**16, dtype=bits).view(half)
    wide, back = np.empty(every.size, F32), np.empty(every.size, half)
    _move(kernels, [every], [wide])
    np.testing.assert_array_equal(wide, every.astype(F32))
    _move(kernels, [wide], [back])
    is_nan = np.isnan(every.astype(F32))
    np.testing.assert_array_equal(back.view(bits)[~is_nan], every.view(bits)[~is_nan])
    assert np.isnan(back.astype(F32)[is_nan]).all()


@pytest.mark.parametrize("half", [BF16, F16], ids=str)
def test_a_cast_rounds_as_ml_dtypes_and_numpy_do(kernels, half):
    random = np.random.default_rng(5)
    values = random.integers(0, 2**32, 50_000, dtype=np.uint32).view(F32)
    # ties, and what lies one step beside them
    exact = np.arange(2**16, dtype=np.uint32) << 16
    values = np.concatenate([values, *[(exact + offset).view(F32) for offset in (0x7FFF, 0x8000, 0x8001)]])
    cast = np.empty(values.size, half)
    _move(kernels, [values], [cast])
    with np.errstate(all="ignore"):
        expected = values.astype(half)
    is_nan = np.isnan(values)
    np.testing.assert_array_equal(cast.view(np.uint16)[~is_nan], expected.view(np.uint16)[~is_nan])
    assert np.isnan(cast.astype(F32)[is_nan]).all()


@pytest.mark.parametrize(("dtype", "op"), FOLDS, ids=lambda value: str(value))
@pytest.mark.parametrize("num_peers", [1, 2, 5, 16])
def test_a_shard_of_all_peers_is_folded_in_order_from_any_of_them_on(kernels, dtype, op, num_peers):
    for start, count, shift in [(0, 0, 0), (0, 1000, 0), (8, 5003, 0), (3, 517, 0), (8, 64, 1)]:
        buffers = [_aligned(dtype, start + count + 3) for _ in range(num_peers)]
        for rank, buffer in enumerate(buffers):
            buffer[:] = _values(dtype, buffer.size, seed=rank)
            if op is PROD:
                buffer[:] = np.sign(buffer.real)
        wide = accumulation_dtype(ReduceOp.SUM, dtype)
        for first in {0, num_peers // 2}:
            rows = [buffer[start : start + count].astype(wide) for buffer in buffers[first:] + buffers[:first]]
            with _guarded(dtype, count, shift) as target:
                _fold(kernels, buffers, start, target, op, first)
                np.testing.assert_array_equal(target, reduce(combine(op), rows).astype(dtype))


@pytest.mark.parametrize(("dtype", "op"), FOLDS, ids=lambda value: str(value))
def test_what_arrived_is_folded_into_what_is_there(kernels, dtype, op):
    for count, shift, blocks in [(0, 0, 1), (5003, 0, 2), (517, 1, 3), (4096, 0, 1)]:
        arrived, wide = _values(dtype, count, seed=1), accumulation_dtype(ReduceOp.SUM, dtype)
        with _guarded(dtype, count, shift) as mine:
            mine[:] = _values(dtype, count, seed=2)
            expected = combine(op)(mine.astype(wide), arrived.astype(wide)).astype(dtype)
            kernels.launch(fold_into_kernel(dtype, op), blocks, (mine.ctypes.data, arrived.ctypes.data, count))
            np.testing.assert_array_equal(mine, expected)


@pytest.mark.parametrize("dtype", DIVIDED, ids=str)
def test_values_are_divided_where_they_are(kernels, dtype):
    for count, shift in [(1, 0), (4099, 0), (517, 1)]:
        with _guarded(dtype, count, shift) as values:
            values[:] = _values(dtype, count)
            wide = values.astype(accumulation_dtype(ReduceOp.SUM, dtype))
            # 257 is no bfloat16; integers are truncated towards zero
            expected = (np.trunc(wide / 257) if dtype is I64 else wide / F32.type(257)).astype(dtype)
            kernels.launch(divide_kernel(dtype), 2, (values.ctypes.data, count, 257))
            np.testing.assert_array_equal(values, expected)


KERNELS = [
    "move_segments<float, bfloat16>",
    "move_segments<float16, float>",
    "move_segments<bfloat16, bfloat16>",
    "divide_values<float16>",
    "divide_values<long long>",
    "fold_peers<float, Sum>",
    "fold_peers<bfloat16, Max>",
    "fold_into<float, Sum>",
    "fold_into<bfloat16, Max>",
    "fold_into<Complex<double>, Prod>",
]


@pytest.fixture(scope="module")
def nvrtc():
    pytest.importorskip("cupy_backends", reason="missing CuPy; pip install '.[kernels]'", exc_type=ImportError)
    from cupy_backends.cuda.libs import nvrtc

    try:
        nvrtc.getVersion()
    except RuntimeError as error:
        pytest.skip(f"missing NVIDIA's compiler library ({error}); pip install '.[kernels]'")
    return nvrtc


@pytest.mark.parametrize("architecture", [70, 75, 80, 86, 89, 90, 100])
def test_kernels_compile_without_spilling_registers(nvrtc, architecture):
    program = nvrtc.createProgram((files("mpistrat.device") / "kernels.cu").read_text(), "kernels.cu", (), ())
    for kernel in KERNELS:
        nvrtc.addNameExpression(program, kernel)
    options = (f"-arch=sm_{architecture}", "-std=c++17", "--ptxas-options=-v")
    try:
        nvrtc.compileProgram(program, options)
    except Exception:
        pytest.fail(nvrtc.getProgramLog(program))
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", nvrtc.getProgramLog(program))
    assert len(spills) >= len(KERNELS)
    assert {*spills} == {("0", "0")}
    assert len(nvrtc.getCUBIN(program)) > 1000
    nvrtc.destroyProgram(program)
