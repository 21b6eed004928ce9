"""Arrays where this process computes on a GPU: which are taken, which are refused, as what kind results are given back."""

import pickle
import sys
import threading
from types import SimpleNamespace
from unittest.mock import Mock

import ml_dtypes
import numpy as np
import pytest

from mpistrat.arrays import (
    array_module,
    as_array,
    as_operand,
    in_dtype,
    is_captured_elsewhere,
    is_on_device,
    like,
    to_device,
    to_host,
)
from mpistrat.context.values import Mirrored, PerReplica
from mpistrat.device.cuda import in_blocks
from mpistrat.errors import InvalidArgumentError, UnsupportedDtypeError
from tests.gpu.stand_in import UNFINISHED, StandInDevice
from tests.gpu.stand_in_arrays import Namespace, stand_in_gpu
from tests.other_arrays import CUDA, SpeaksDlpack, StandardArray, fake_torch

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture
def gpu():
    with stand_in_gpu(3) as device:
        yield device


@pytest.fixture
def xp(gpu):
    return gpu.array_module


@pytest.fixture
def elsewhere():
    device = StandInDevice()
    device.index, device.namespace = 2, Namespace(device)
    yield device
    device.close()


class OnGpu(SpeaksDlpack):
    """What speaks DLPack and is on a GPU."""

    def on_stand_in(self, device):
        return device.array_module.asarray(self._array)


@pytest.fixture
def torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", fake_torch())
    return sys.modules["torch"]


def test_an_array_of_this_gpu_is_itself_and_copies_go_down_and_up(xp):
    array = xp.asarray(np.arange(3.0))
    assert as_array(array) is as_operand(array) is array
    assert is_on_device(array)
    assert not is_on_device(np.zeros(3))
    assert array_module() is xp
    assert like(array, array) is array
    up = to_device(np.arange(3.0))
    assert isinstance(up, xp.ndarray)
    assert to_device(up) is up
    down = to_host(up)
    assert type(down) is np.ndarray
    assert down.tolist() == [0, 1, 2]
    assert in_dtype(up, np.dtype("i2")).dtype == "i2"
    assert isinstance(in_dtype(up, np.dtype("i2")), xp.ndarray)
    result = like(np.arange(3.0), xp.zeros(1))
    assert isinstance(result, xp.ndarray)
    assert result.tolist() == [0, 1, 2]
    assert type(like(np.arange(3.0), StandardArray(np.zeros(1)))) is StandardArray


def test_what_comes_from_the_host_for_a_tensor_of_the_gpu_is_brought_there(torch):
    """Such as the batch of no rows that a replica gets at the end of its data."""
    for device in ("cpu", "cuda:0"):
        made = like(np.zeros((0, 3)), torch.Tensor(np.ones((2, 3)), device))
        assert (str(made.device), made.array.shape) == (device, (0, 3))


def test_without_a_gpu_all_is_in_host_memory():
    array = np.zeros(3)
    assert array_module() is np
    assert to_device(array) is to_host(array) is as_operand(array) is array
    assert type(like(np.zeros(()), 1.0)) is np.ndarray


def test_an_array_of_another_device_is_refused_with_both_and_the_cure(xp, elsewhere, torch):
    torch.Tensor.__module__ = "torch"
    for read, value, message in (
        (as_array, elsewhere.array_module.zeros(3), r"copy it first, with cupy\.cuda\.Device\(0\): x = cupy\.array\(x\)$"),
        (as_array, OnGpu(np.zeros(3), CUDA, 2), r"^x is on GPU 2, this replica computes on GPU 0; copy it first, with cupy"),
        (as_array, torch.Tensor(np.zeros(2), "cuda:1"), "^x is on GPU 1, this replica computes on GPU 0"),
        (as_array, SpeaksDlpack(0, 10, 1), r"^x is on rocm:1, this replica computes on /gpu:0; copy it to host memory"),
        (as_operand, torch.Tensor(np.zeros(2)), r"this replica computes on /gpu:0; copy it first, x\.cuda\(\), or compute"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            read(value, "x")
    with pytest.raises(UnsupportedDtypeError, match=r"x has dtype \[\('f0', '<f4'\), \('f1', '<i4'\)\], which collectives"):
        as_array(xp.zeros(2, "f4,i4"), "x")


@pytest.fixture
def streams(gpu, torch, monkeypatch):
    """Have PyTorch capture on another stream than the current one of the GPU; give what says which, on threads of that GPU."""
    found, of_another_gpu = SimpleNamespace(cuda_stream=gpu.stream().pointer), SimpleNamespace(cuda_stream=-1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: found if gpu.is_active() else of_another_gpu, raising=False)
    return found


def test_a_tensor_is_refused_while_a_graph_is_captured_on_another_stream_but_for_threads_of_another_gpu(gpu, torch, streams):
    with pytest.raises(InvalidArgumentError, match="^PyTorch is capturing a CUDA graph, in which x can be read only on its"):
        as_operand(torch.Tensor(np.zeros(2), "cuda:0"), "x")
    assert is_on_device(as_operand(gpu.array_module.zeros(2))), "nothing is ordered for an array of CuPy"
    streams.cuda_stream = gpu.current_stream().pointer
    assert is_on_device(as_operand(torch.Tensor(np.zeros(2), "cuda:0"), "x"))
    streams.cuda_stream = gpu.current_stream().pointer
    found, tensor = [], torch.Tensor(np.zeros(2), "cuda:0")
    thread = threading.Thread(target=lambda: found.append(as_operand(tensor, "x")))
    thread.start()
    thread.join()
    assert is_on_device(found[0])


def test_pytorch_cannot_tell_where_cupy_captures_on_a_stream_that_the_default_one_waits_for(gpu, torch, streams, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", Mock(side_effect=RuntimeError("implicit capture")))
    assert not is_captured_elsewhere(gpu)


def test_small_new_arrays_share_allocations_that_are_not_large():
    given, asked = [np.empty(nbytes, np.uint8) for nbytes in (1, 512, 0, (1 << 20) - 1024, 1, 5 << 20, 3)], []
    kind = type("Start", (), {"__new__": lambda kind, shape, dtype, start: start})
    starts = in_blocks(given, lambda nbytes: asked.append(nbytes) or len(asked) << 30, kind)()
    assert asked == [1 << 20, 512, 5 << 20, 512]
    assert starts == [1 << 30, (1 << 30) + 512, (1 << 30) + 1024, (1 << 30) + 1024, 2 << 30, 3 << 30, 4 << 30]


def test_arrays_that_share_an_allocation_are_those_that_cupy_makes():
    cupy, host = pytest.importorskip("cupy"), np.zeros(4096, np.uint8)
    block = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(host.ctypes.data, host.nbytes, host, 0), 0)
    given = [np.empty((3, 5), np.float32), np.empty((), BFLOAT16), np.empty((0, 2), np.int64)]
    for made, array, start in zip(in_blocks(given, lambda _: block, cupy.ndarray)(), given, (0, 512, 1024), strict=True):
        wanted = cupy.ndarray(array.shape, array.dtype, block + start)
        for name in ("shape", "dtype", "strides", "nbytes", "base", "__class__", "_c_contiguous", "_f_contiguous"):
            assert getattr(made, name) == getattr(wanted, name), name
        assert made.data.ptr == host.ctypes.data + start


@pytest.mark.parametrize("kind", [np.asarray, lambda array: SpeaksDlpack(array), lambda array: memoryview(array)])
def test_arrays_of_the_host_are_read_but_are_not_operands(gpu, kind):
    value = kind(np.arange(3.0))
    assert type(as_array(value)) is np.ndarray
    message = (
        r"^grads\['w'\] is in host memory, this replica computes on /gpu:0; copy it first, strategy\.array_module\.asarray"
        r"\(grads\['w'\]\), or compute in host memory with MPISTRAT_DEVICE=cpu$"
    )
    with pytest.raises(InvalidArgumentError, match=message):
        as_operand(value, "grads['w']")


@pytest.mark.parametrize("number", [1, 2.5, True, 1j, np.float32(3), BFLOAT16.type(2), np.array(4.0)])
def test_numbers_pass_and_come_back_as_what_cupy_computes_with(xp, number):
    array = as_operand(number)
    assert type(array) is np.ndarray
    result = like(array, number)
    assert type(result) is (np.ndarray if type(number) is np.ndarray else array.dtype.type)
    if type(number) is not np.ndarray:
        assert float(abs((xp.ones(2) * result)[1])) == abs(complex(number))


@pytest.mark.parametrize("dtype", ["f4", BFLOAT16])
def test_a_tensor_of_the_gpu_comes_in_and_goes_out(xp, torch, dtype):
    array = as_operand(torch.Tensor(np.arange(3).astype(dtype), "cuda:0", requires_grad=True))
    assert isinstance(array, xp.ndarray)
    assert array.dtype == dtype
    result = like(array * array.dtype.type(2), torch.Tensor(0, "cuda:0"))
    assert type(result) is torch.Tensor
    assert (str(result.device), result.array.dtype, result.array.tolist()) == ("cuda:0", np.dtype(dtype), [0, 2, 4])


def test_a_jax_array_of_the_gpu_comes_in_and_goes_out(xp, monkeypatch):
    class Array(OnGpu):
        pass

    jax = SimpleNamespace(Array=Array, dlpack=SimpleNamespace(from_dlpack=lambda array: Array(array.get(), CUDA)))
    monkeypatch.setitem(sys.modules, "jax", jax)
    array = as_operand(Array(np.arange(3.0), CUDA))
    assert isinstance(array, xp.ndarray)
    result = like(array, Array(0, CUDA))
    assert type(result) is Array
    assert result._array.tolist() == [0, 1, 2]


def test_what_speaks_only_the_cuda_array_interface_is_read(gpu, xp):
    memory = gpu.allocate(12).view(np.float32)
    gpu.put(memory, np.arange(3, dtype=np.float32))
    array = as_array(SimpleNamespace(__cuda_array_interface__=memory.__cuda_array_interface__))
    assert isinstance(array, xp.ndarray)
    assert array.tolist() == [0, 1, 2]
    assert array.__cuda_array_interface__["data"] == memory.__cuda_array_interface__["data"]


@pytest.mark.parametrize("kind", [Mirrored, PerReplica])
def test_values_are_not_copied_to_the_host_unasked(xp, kind, monkeypatch):
    value = kind(xp.asarray(np.arange(3.0)))
    monkeypatch.setattr(PerReplica, "read", lambda self: as_array(self._component))  # as inside strategy.run
    assert as_array(value) is value._component
    message = rf"a {kind.__name__} on a GPU was read by NumPy, which needs a copy.*\n.*np\.asarray\(variable\)\n.*variable\.num"
    with pytest.raises(TypeError, match=message):
        np.asarray(value)


def test_values_take_part_in_expressions_on_the_gpu(xp):
    value, array = Mirrored(xp.asarray(np.arange(1.0, 4.0))), xp.ones((2, 3))
    for result in (array * value, value * array, np.multiply(array, value), np.concatenate([array, np.stack([value, value])])):
        assert isinstance(result, xp.ndarray)
        assert result.get()[-1].tolist() == [1, 2, 3]
    assert isinstance(array @ value, xp.ndarray)
    assert (array @ value).tolist() == [6, 6]
    assert (np.sum(value).item(), float(value[1]), 2 in value, len(value), value.nbytes) == (6, 2, True, 3, 24)
    assert [10, 11, 12][Mirrored(xp.asarray(2))] == 12
    assert f"{Mirrored(xp.asarray(0.5)):.2f}" == "0.50"


def test_the_stand_in_behaves_as_cupy_where_it_matters(gpu, xp):
    array = xp.asarray(np.arange(6.0).reshape(2, 3))
    names = {"np": np, "x": array, "host": np.ones(3), "mirrored": Mirrored(array)}
    for refused in ("np.asarray(x)", "x + host", "x += host", "np.add(x, np.array(1.0))", "x[0] = host", "x += mirrored"):
        with pytest.raises(TypeError):
            exec(refused, {**names})
    with pytest.raises(TypeError):
        xp.exp(Mirrored(array))
    array[0] = 7
    assert array[np.array([0])].tolist() == [[7, 7, 7]]
    assert array[1, 2].shape == ()
    assert pickle.loads(pickle.dumps(array)).tolist() == array.tolist()
    stream = gpu.stream()
    late, blocked = gpu.stream(), gpu.stream()
    blocked.put(lambda: UNFINISHED)
    late.wait(blocked.record())
    with gpu.activate(stream):
        stream.copy(array.__cuda_array_interface__["data"][0], xp.zeros(6).__cuda_array_interface__["data"][0], 48)
        assert array.tolist() == [[0, 0, 0], [0, 0, 0]], "what is on the current stream comes first"
    late.copy(array.__cuda_array_interface__["data"][0], xp.ones(6).__cuda_array_interface__["data"][0], 48)
    assert array.tolist() == [[0, 0, 0], [0, 0, 0]], "what is on another one need not"
