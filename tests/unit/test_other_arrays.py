"""PyTorch and JAX themselves: their arrays come in and go out, without a copy where the memory allows."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from mpistrat.arrays import as_array, as_target, like
from mpistrat.errors import InvalidArgumentError, UnsupportedDtypeError
from tests.other_arrays import installed, jax_array, tensor

_DTYPES = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
_DTYPES += ["float16", "float32", "float64", "complex64", "complex128"]

shapes = arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
memories = arrays.arrays(st.sampled_from([np.dtype(name) for name in _DTYPES]), shapes)
memories |= arrays.arrays(np.uint16, shapes).map(lambda bits: bits.view(np.dtype(ml_dtypes.bfloat16)))


@pytest.fixture(scope="module")
def torch():
    return installed("torch")


@pytest.fixture(scope="module")
def jax():
    jax = installed("jax")
    jax.config.update("jax_enable_x64", True)
    yield jax
    jax.config.update("jax_enable_x64", False)


@given(memories)
def test_a_tensor_comes_in_and_goes_out(torch, memory):
    original = tensor(torch, memory)
    array = as_array(original)
    assert (type(array), array.dtype, array.shape) == (np.ndarray, memory.dtype, memory.shape)
    assert array.tobytes() == memory.tobytes()
    result = like(array, original)
    assert (type(result), result.dtype, result.shape) == (torch.Tensor, original.dtype, original.shape)
    assert result.data_ptr() == original.data_ptr()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
def test_a_tensor_need_not_be_contiguous(torch, dtype):
    original = torch.arange(24).reshape(4, 6).to(getattr(torch, dtype)).T[::2, 1:]
    array = as_array(original)
    assert array.tolist() == original.tolist()
    result = like(array, original)
    assert (result.data_ptr(), result.stride(), result.shape) == (original.data_ptr(), original.stride(), original.shape)


def test_of_a_tensor_with_a_gradient_or_lazily_conjugated_the_values_come_in(torch):
    parameter = torch.nn.Parameter(torch.arange(3.0))
    half = torch.arange(3, dtype=torch.bfloat16, requires_grad=True)
    for original in (parameter, half, parameter * 2):
        result = like(as_array(original), original)
        assert result.data_ptr() == original.data_ptr()
        assert type(result) is torch.Tensor
        assert not result.requires_grad
    original = torch.tensor([1 + 2j, 3 - 4j]).conj()
    assert original.is_conj()
    assert as_array(original).tolist() == [1 - 2j, 3 + 4j]
    assert as_array(original.imag).tolist() == [-2, 4]
    for lazy in (original, original.imag):
        with pytest.raises(InvalidArgumentError, match=r"tensor of PyTorch that is no lazy conj\(\) or negative; got Tensor"):
            as_target(lazy)


def test_a_tensor_elsewhere_or_that_is_no_plain_array_is_refused(torch):
    message = r"^grad is on meta, this replica computes on /cpu:0; copy it first, grad\.cpu\(\)$"
    with pytest.raises(InvalidArgumentError, match=message):
        as_array(torch.zeros(3, device="meta"), "grad")
    with pytest.raises(UnsupportedDtypeError, match="^grad cannot be read as an array: .*Sparse.*; pass an array of numbers$"):
        as_array(torch.eye(2).to_sparse(), "grad")


def test_no_tensor_is_made_of_memory_that_must_not_change(torch, jax):
    fixed = as_array(jax_array(jax, np.arange(3.0)))
    result = like(fixed, torch.zeros(()))
    assert result.tolist() == [0, 1, 2]
    assert result.data_ptr() != fixed.ctypes.data


@given(memories)
def test_a_jax_array_comes_in_and_goes_out(jax, memory):
    original = jax_array(jax, memory)
    array = as_array(original)
    assert (type(array), array.dtype, array.shape) == (np.ndarray, memory.dtype, memory.shape)
    assert array.tobytes() == memory.tobytes()
    assert not array.flags.writeable
    result = like(array, original)
    assert isinstance(result, jax.Array)
    assert (result.dtype, result.shape, result.device) == (original.dtype, original.shape, original.device)
    assert np.asarray(result).tobytes() == memory.tobytes()
    if memory.size:
        assert array.ctypes.data == result.unsafe_buffer_pointer() == original.unsafe_buffer_pointer()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex128"])
@pytest.mark.parametrize("offset", [0, 1])
def test_a_result_is_a_jax_array_with_one_copy_at_most(jax, dtype, offset):
    memory = np.zeros(256, np.uint8)
    memory = memory[-memory.ctypes.data % 64 + 16 * offset :][:64].view(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    result = like(memory, jax_array(jax, np.zeros(2, np.float32)))
    assert (result.dtype, result.shape) == (memory.dtype, memory.shape)
    assert (result.unsafe_buffer_pointer() == memory.ctypes.data) == (offset == 0)


def test_jax_without_64_bit_types_keeps_32(jax):
    original = jax_array(jax, np.arange(3, dtype=np.int32))
    jax.config.update("jax_enable_x64", False)
    try:
        assert like(np.arange(3.0), original).dtype == np.float32
    finally:
        jax.config.update("jax_enable_x64", True)


def test_a_jax_array_that_is_being_traced_is_refused(jax):
    message = r"^x cannot be read as an array: (.|\n)* on traced array with shape int64\[3\](.|\n)*; pass an array of numbers"
    with pytest.raises(UnsupportedDtypeError, match=message):
        jax.jit(lambda traced: as_array(traced, "x"))(np.arange(3))
