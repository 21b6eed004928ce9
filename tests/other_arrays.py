"""Arrays that are not NumPy's: those of PyTorch and JAX, and stand-ins that speak one protocol only."""

from __future__ import annotations

import importlib
import importlib.util
import os
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

# DLPack's numbers of kinds of memory
CPU, CUDA, PINNED = 1, 2, 3


def installed(name: str) -> ModuleType:
    """Return the library ``torch`` or ``jax``, or skip the test and say why."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"no {name}: pip install '.[interop]'")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    return importlib.import_module(name)


def tensor(torch: ModuleType, array: Any) -> Any:
    array = np.array(array, order="C")
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def jax_array(jax: ModuleType, array: Any) -> Any:
    return jax.numpy.array(array, copy=True)


class SpeaksDlpack:
    """An array, said to be in the memory of a device, that speaks nothing but DLPack."""

    def __init__(self, array: Any, device: int = CPU, index: int = 0) -> None:
        self._array, self._device = np.asarray(array), (device, index)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, **arguments: Any) -> Any:
        if self._device[0] not in (CPU, PINNED):
            raise AssertionError("memory of a device was asked for")
        return self._array.__dlpack__(**arguments)


class SpeaksArrayInterface:
    """An array that speaks nothing but ``__array_interface__``."""

    def __init__(self, array: Any) -> None:
        self._array = np.asarray(array)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._array.__array_interface__


class SpeaksCudaArrayInterface:
    """An array that speaks nothing but ``__cuda_array_interface__``."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (3,), "typestr": "<f4", "data": (0, False), "version": 3}


class SpeaksBuffers:
    """Makes what speaks nothing but the buffer protocol."""

    def __new__(cls, array: Any) -> Any:
        return memoryview(np.asarray(array))


class StandardArray(SpeaksDlpack):
    """An array that tells its array API namespace, which makes such arrays again."""

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        return SimpleNamespace(asarray=StandardArray)

    def numpy(self) -> Any:
        return self._array


def fake_torch() -> Any:
    """Return what behaves like PyTorch as far as tensors are read and made; `Tensor` takes an array and its device."""
    bfloat16, int16 = "torch.bfloat16", "torch.int16"
    numpy_dtypes = {bfloat16: np.dtype(ml_dtypes.bfloat16), int16: np.dtype(np.int16)}

    class Tensor:
        def __init__(self, array: Any, device: str = "cpu", requires_grad: bool = False) -> None:
            self.array, self.requires_grad = np.asarray(array), requires_grad
            self.device = TorchDevice(device)
            self.dtype = next((name for name, dtype in numpy_dtypes.items() if dtype == self.array.dtype), self.array.dtype)

        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            if self.device.type == "cpu":
                raise AttributeError("PyTorch has it on GPUs only")
            raise RuntimeError("PyTorch refuses it of a tensor that requires a gradient")

        def detach(self) -> Tensor:
            return Tensor(self.array, str(self.device))

        resolve_conj = resolve_neg = detach

        def to(self, device: Any) -> Tensor:
            return Tensor(self.array, str(device))

        def view(self, dtype: str) -> Tensor:
            return Tensor(self.array.view(numpy_dtypes[dtype]), str(self.device))

        def on_stand_in(self, device: Any) -> Any:
            """Return what a stand-in for CuPy makes of it."""
            assert not self.requires_grad, "PyTorch refuses"
            assert self.dtype != bfloat16, "not every CuPy has it"
            return device.array_module.asarray(self.array)

        def numpy(self, *, force: bool = False) -> Any:
            assert self.dtype != bfloat16, "PyTorch refuses"
            assert force or not self.requires_grad, "PyTorch refuses"
            return self.array

    def from_dlpack(array: Any) -> Tensor:
        return Tensor(array.get(), "cuda:0")

    cuda = SimpleNamespace(is_initialized=lambda: True, is_current_stream_capturing=lambda: False)
    names = {"bfloat16": bfloat16, "int16": int16, "from_numpy": Tensor, "from_dlpack": from_dlpack, "cuda": cuda}
    return SimpleNamespace(Tensor=Tensor, **names)


class TorchDevice:
    """A device of PyTorch, by its name."""

    def __init__(self, name: str) -> None:
        self.name, self.type = name, name.partition(":")[0]
        self.index = int(name.partition(":")[2] or 0)

    def __str__(self) -> str:
        return self.name
