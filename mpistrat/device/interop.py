"""Arrays in GPU memory: CuPy's as they are, those of PyTorch, JAX and others through DLPack, without a copy."""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np

from mpistrat.device.abstract import Device, DeviceArray
from mpistrat.errors import InvalidArgumentError

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_CUDA_KINDS = (2, 13)  # DLPack's device types for CUDA memory, and for CUDA managed memory


def is_a(value: Any, module: str, name: str) -> bool:
    """Return whether `value` is an instance of a class, without importing its module: if nobody did, there is no instance."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)


def read(value: Any, device: Device, name: str) -> DeviceArray | None:
    """Return `value` as an array of the device's library that shares its memory; None if it is not in GPU memory.

    Work on the current stream of the caller is ordered after work that the other library has enqueued on its own stream.
    What is in the memory of another GPU is refused, and what PyTorch would not capture in its CUDA graph.
    """
    module = device.array_module
    is_own = isinstance(value, module.ndarray)
    found = value.device.id if is_own else _gpu_of(value)
    if found is None:
        return None
    _check_index(found, device, name)
    with device.activate():
        if is_captured_elsewhere(device):
            raise InvalidArgumentError(
                f"PyTorch is capturing a CUDA graph, in which {name} can be read only on its stream: make the call before or "
                "after, or in Communicator.capture with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)"
            )
        if is_own:
            return value
        value = _imported(value, module)
    _check_index(value.device.id, device, name)
    return value


def is_captured_elsewhere(device: Device) -> bool:
    """Return whether PyTorch captures a CUDA graph on another stream than the current one, whose work is no part of it."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not (cuda.is_initialized() and cuda.is_current_stream_capturing()):
        return False
    return bool(cuda.current_stream().cuda_stream != device.current_stream().pointer)


def export(result: DeviceArray, original: Any) -> Any:
    """Return `result` as an array of the library that `original` belongs to, sharing memory if that library supports GPUs."""
    if is_a(original, "torch", "Tensor"):
        torch = sys.modules["torch"]
        if result.dtype == _BFLOAT16:
            return torch.from_dlpack(result.view(np.int16)).view(torch.bfloat16)
        return torch.from_dlpack(result)
    if is_a(original, "jax", "Array"):
        return sys.modules["jax"].dlpack.from_dlpack(result)
    return result


def _gpu_of(value: Any) -> int | None:
    """Return the index of the GPU that holds a value of another library; -1 if it is not known yet, None if no GPU does."""
    if is_a(value, "torch", "Tensor"):
        return int(value.device.index or 0) if value.device.type == "cuda" else None
    if hasattr(value, "__dlpack_device__"):
        kind, index = map(int, value.__dlpack_device__())
        return index if kind in _CUDA_KINDS else None
    return -1 if hasattr(value, "__cuda_array_interface__") else None


def _imported(value: Any, module: Any) -> DeviceArray:
    if is_a(value, "torch", "Tensor"):
        return _imported_tensor(value.detach().resolve_conj().resolve_neg(), module)
    return module.from_dlpack(value) if hasattr(value, "__dlpack__") else module.asarray(value)


def _imported_tensor(tensor: Any, module: Any) -> DeviceArray:
    torch = sys.modules["torch"]
    if tensor.dtype is torch.bfloat16:  # not every CuPy accepts it through DLPack: reinterpret the bits
        return module.from_dlpack(tensor.view(torch.int16)).view(_BFLOAT16)
    return module.from_dlpack(tensor)


def _check_index(found: int, device: Device, name: str) -> None:
    if found not in (-1, device.index):
        raise InvalidArgumentError(
            f"{name} is on GPU {found}, this replica computes on GPU {device.index}; copy it first, "
            f"with cupy.cuda.Device({device.index}): {name} = cupy.array({name})"
        )
