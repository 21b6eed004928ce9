"""Arrays: what counts as one, without a copy where possible, what is refused, and as what kind a result is given back."""

import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.arrays import as_array, as_operand, like
from mpistrat.context.values import Mirrored
from mpistrat.device.binding import bind
from mpistrat.errors import InvalidArgumentError, UnsupportedDtypeError
from tests.other_arrays import (
    CUDA,
    PINNED,
    SpeaksArrayInterface,
    SpeaksBuffers,
    SpeaksCudaArrayInterface,
    SpeaksDlpack,
    StandardArray,
    fake_torch,
)

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(autouse=True)
def on_cpu():
    bind(None)


@pytest.fixture
def torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", fake_torch())
    return sys.modules["torch"]


@pytest.mark.parametrize("dtype", ["?", "i1", "u8", "f2", "f8", "c8", BFLOAT16])
def test_an_array_is_itself(dtype):
    array = np.zeros((2, 3), dtype)[:, ::-1]
    assert as_array(array) is array
    assert as_operand(array) is array


def test_what_is_to_be_combined_lies_as_mpi_wants_it():
    packed = np.frombuffer(b"\0" + np.arange(6.0).tobytes(), offset=1)
    field = np.zeros(3, [("label", "u1"), ("value", "f4")])["value"]
    for array in (packed, field):
        assert not array.flags.aligned
        assert as_operand(array).flags.aligned
        np.testing.assert_array_equal(as_operand(array), array)


class SpeaksArrayToo(SpeaksDlpack):
    def __array__(self, dtype=None, copy=None):
        return self._array


@pytest.mark.parametrize(
    ("value", "shape", "dtype"),
    [
        *((3, (), "int64"), (2.5, (), "float64"), (True, (), "bool"), (1j, (), "complex128")),
        *((np.float32(1), (), "float32"), (BFLOAT16.type(1), (), "bfloat16")),
        *(([[1, 2], [3, 4]], (2, 2), "int64"), ([], (0,), "float64"), (range(3), (3,), "int64")),
        *((Mirrored([1.0, 2.0]), (2,), "float64"), (SpeaksDlpack(np.zeros((2, 0), "c8")), (2, 0), "complex64")),
    ],
)
def test_what_is_like_an_array_becomes_one(value, shape, dtype):
    array = as_array(value)
    assert (type(array), array.shape, array.dtype.name) == (np.ndarray, shape, dtype)


KINDS = [SpeaksDlpack, SpeaksArrayInterface, SpeaksBuffers, SpeaksArrayToo, StandardArray, Mirrored]


@pytest.mark.parametrize("speaks", [*KINDS, lambda array: SpeaksDlpack(array, PINNED), lambda array: array.view(np.memmap)])
@pytest.mark.parametrize("is_writable", [True, False])
def test_the_memory_of_others_is_shared(speaks, is_writable):
    memory = np.arange(24.0).reshape(4, 6)[::2, ::-1]
    memory.flags.writeable = is_writable
    array = as_array(speaks(memory))
    assert type(array) is np.ndarray
    np.testing.assert_array_equal(array, memory)
    assert np.shares_memory(array, memory)
    assert is_writable or not array.flags.writeable


class SpeaksOfAnUnknownDtype(SpeaksDlpack):
    def __dlpack__(self, **arguments):
        raise RuntimeError("Unsupported dtype in DLTensor.")


class IsSpreadOverDevices(SpeaksDlpack):
    def __dlpack_device__(self):
        raise BufferError("only supported for unsharded arrays")


class RefusesItself:
    def __array__(self, dtype=None, copy=None):
        raise InvalidArgumentError("not outside strategy.run")


NO_NUMBERS = r"x\[0\] has dtype {}, which collectives do not support; accepted are arrays of bool, integers, float16"
UNREADABLE = r"^x\[0\] cannot be read as an array: {}; pass an array of numbers$"
ELSEWHERE = r"^x\[0\] is on {}, this replica computes on /cpu:0; copy it to host memory first$"


@pytest.mark.parametrize(
    ("value", "message", "found"),
    [
        (None, NO_NUMBERS, "object"),
        ("text", NO_NUMBERS, "<U4"),
        ([object()], NO_NUMBERS, "object"),
        (np.array(["a"]), NO_NUMBERS, "<U1"),
        (np.array([b"a"]), NO_NUMBERS, r"\|S1"),
        (np.array(["2024-01-01"], "M8[D]"), NO_NUMBERS, r"datetime64\[D\]"),
        (np.array([1], "m8[s]"), NO_NUMBERS, r"timedelta64\[s\]"),
        (np.zeros(2, "f4,i4"), NO_NUMBERS, r"\[\('f0', '<f4'\), \('f1', '<i4'\)\]"),
        (SpeaksArrayInterface(np.zeros(2, BFLOAT16)), NO_NUMBERS, r"\|V2"),
        ({"a": 1}, NO_NUMBERS, "object"),
        ([[1, 2], [3]], UNREADABLE, ".*inhomogeneous.*"),
        (np.ma.masked_equal([1, 2], 2), UNREADABLE, r"it has a mask, which would be lost; fill in .*, x\.filled\(0\)"),
        (SpeaksOfAnUnknownDtype(0), UNREADABLE, r"Unsupported dtype in DLTensor\."),
        (IsSpreadOverDevices(0), UNREADABLE, "only supported for unsharded arrays"),
        (SpeaksDlpack(0, CUDA, 1), ELSEWHERE, "cuda:1"),
        (SpeaksDlpack(0, 10), ELSEWHERE, "rocm:0"),
        (SpeaksDlpack(0, 13), ELSEWHERE, r"cuda \(managed memory\):0"),
        (SpeaksDlpack(0, 99, 2), ELSEWHERE, "DLPack device type 99:2"),
        (SpeaksArrayToo(0, CUDA), ELSEWHERE, "cuda:0"),
        (StandardArray(0, CUDA), ELSEWHERE, "cuda:0"),
        (SpeaksCudaArrayInterface(), ELSEWHERE, "cuda"),
        (RefusesItself(), "^{}$", r"not outside strategy\.run"),  # an error of our own values stays as it is
    ],
)
def test_what_cannot_be_an_array_here_is_refused(value, message, found):
    error = UnsupportedDtypeError if message in (NO_NUMBERS, UNREADABLE) else InvalidArgumentError
    with pytest.raises(error, match=message.format(found)):
        as_array(value, "x[0]")


def test_how_to_copy_is_said_where_it_is_known(torch):
    for value, message in (
        (_named("torch", torch.Tensor)(0, "cuda:1"), r"^x is on cuda:1, .* on /cpu:0; copy it first, x\.cpu\(\)$"),
        (_named("cupy", type("ndarray", (SpeaksDlpack,), {}))(0, CUDA), r"^x is on cuda:0, .*; copy it first, x\.get\(\)$"),
        (
            _named("jaxlib", type("Array", (SpeaksDlpack,), {}))(0, CUDA, 3),
            r'^x is on cuda:3, .*; copy it first, jax\.device_put\(x, jax\.devices\("cpu"\)\[0\]\)$',
        ),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            as_array(value, "x")


@pytest.mark.parametrize(
    "original",
    [
        *(np.zeros(2), np.float32(0), 0, 0.5, True, [1, 2], None, np.zeros(2).view(np.memmap), Mirrored(1.0)),
        *(SpeaksDlpack(0), SpeaksArrayInterface(0), SpeaksBuffers(0)),
    ],
)
def test_everything_else_comes_back_as_a_numpy_array(original):
    result = np.arange(3)
    assert like(result, original) is result


dtypes = st.sampled_from("?bhilqBHILQefdFD")  # NumPy hands out no bfloat16: test_other_arrays has it
shapes = st.lists(st.integers(0, 3), max_size=4).map(tuple)
kinds = st.sampled_from([np.asarray, SpeaksDlpack, SpeaksArrayInterface, StandardArray])


@given(dtypes, shapes, kinds, st.integers(0, 255))
def test_what_comes_in_goes_out_bit_by_bit(dtype, shape, kind, fill):
    memory = np.full(shape, fill).astype(dtype)
    original = kind(memory)
    array = as_array(original)
    result = like(array, original)
    assert type(result) is (StandardArray if kind is StandardArray else np.ndarray)
    seen = result.numpy() if kind is StandardArray else result
    assert (seen.dtype, seen.shape, seen.tobytes()) == (memory.dtype, memory.shape, memory.tobytes())
    assert not memory.size or np.shares_memory(seen, memory)


def _named(module, kind):
    """Return the class as one of this module, as its users see it."""
    kind.__module__ = module
    return kind
