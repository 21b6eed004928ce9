"""Arrays: what is accepted as one, in which memory it is, where results lie, conversion without a copy, and checksums."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from itertools import pairwise
from typing import Any, cast

import ml_dtypes
import numpy as np
from numpy.lib.array_utils import byte_bounds
from numpy.typing import NDArray

from mpistrat.device.binding import bound_device, own_device, why_cpu
from mpistrat.device.cuda import Device, address, addresses, are_contiguous
from mpistrat.errors import InvalidArgumentError, MpistratError, UnsupportedDtypeError
from mpistrat.reduction import ACCEPTED, quiet

Array = NDArray[Any]
"""A NumPy array; if this process computes on a GPU, also a CuPy array."""

MALLOC_REUSES_BYTES = (32 << 20) - (64 << 10)
"""With its header below the 32 MiB up to which glibc adapts its limits to what is freed: it maps larger blocks anew."""
_MOST_RETAINED_BYTES = 256 << 20

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

# DLPack's device types whose memory the host reads directly: CPU, and memory pinned by CUDA or ROCm
_HOST_MEMORY = (1, 3, 11)
# Names of its other device types. The host could read managed memory, but cannot tell when the device has finished writing it.
_DEVICE_NAMES = {2: "cuda", 8: "metal", 10: "rocm", 13: "cuda (managed memory)", 14: "oneapi"}

# How a user copies an array of these libraries to host memory, and to the GPU, for error messages.
_OF_JAX = ('jax.device_put({name}, jax.devices("cpu")[0])', 'jax.device_put({name}, jax.devices("gpu")[0])')
_COPIES = {"torch": ("{name}.cpu()", "{name}.cuda()"), "cupy": ("{name}.get()", ""), "jax": _OF_JAX, "jaxlib": _OF_JAX}


class Readable:
    """A value of this library that can be used as an array. NumPy reads it by ``__array__``, and then in host memory only."""

    def read(self) -> Array:
        """Return the array."""
        raise NotImplementedError


def array_module() -> Any:
    """Return the array library of this process: CuPy if it computes on a GPU, else NumPy."""
    device = bound_device()
    return np if device is None else device.array_module


def is_on_device(array: Any) -> bool:
    """Return whether an array that `as_array` returned is in GPU memory."""
    return type(array) is not np.ndarray and hasattr(type(array), "__cuda_array_interface__")


def to_host(array: Array) -> Array:
    """Return an array in host memory: itself, or a copy from the GPU that waits for all work on the current stream."""
    return cast("Any", array).get() if is_on_device(array) else array


def to_device(array: Array) -> Array:
    """Return an array on the device of this process: itself, or a copy on the GPU, enqueued on the current stream."""
    device = bound_device()
    if device is None or is_on_device(array):
        return array
    with device.activate():
        copied: Array = device.array_module.asarray(array)
        return copied


def as_bytes(array: Array) -> Array:
    """Return the memory of a C-contiguous array as uint8, with one axis. Nothing is copied."""
    return array.reshape(-1).view(np.uint8)


def flat(array: Array) -> Array:
    """Return a contiguous, aligned array with one axis, a copy if needed: `reshape` alone may return a strided view."""
    return array.reshape(-1) if array.flags.c_contiguous and is_aligned(array) else array.copy().reshape(-1)


def part_bounds(extent: int, num_parts: int) -> list[int]:
    """Return where parts begin that are as equal as can be, the first ones longer by one; and where the last one ends."""
    least, longer = divmod(extent, num_parts)
    return [part * least + min(part, longer) for part in range(num_parts + 1)]


def is_aligned(array: Array) -> bool:
    """Return whether the address of each element suits its dtype, as MPI needs; a view of packed bytes may differ."""
    return getattr(array.flags, "aligned", True)  # arrays on GPUs always are


def are_disjoint(arrays: Sequence[Array]) -> bool:
    """Return whether no two arrays share memory."""
    if len(arrays) == 2 and all([each.__class__ is np.ndarray for each in arrays]):
        return not np.may_share_memory(arrays[0], arrays[1])
    # one without a base may still lie in memory of another library
    if len(set(map(id, arrays))) == len(arrays) and all(each.__class__ is np.ndarray and each.flags.owndata for each in arrays):
        return True
    filled = [array for array in arrays if array.size]
    if are_contiguous(filled):
        bounds = [(start, start + array.nbytes) for start, array in zip(addresses(filled), filled, strict=True)]
    else:
        bounds = list(map(_bounds, filled))
    bounds.sort()
    return all([stop <= start for (_, stop), (start, _) in pairwise(bounds)])


def are_apart(arrays: Sequence[Array], out: Sequence[Array]) -> bool:
    """Return whether no array shares memory with another one's target, nor two targets; an array may be its own target."""
    return are_disjoint([*out, *(array for array, target in zip(arrays, out, strict=True) if array is not target)])


def copy_overlapping(arrays: Sequence[Array], out: Sequence[Array]) -> list[Array]:
    """Return `arrays`, copied if one overlaps with the target of another, which may be written before the array is read."""
    if all(map(operator.is_, arrays, out)) or are_apart(arrays, out):
        return list(arrays)
    return [array if array is out[index] else array.copy() for index, array in enumerate(arrays)]


def _bounds(array: Array) -> tuple[int, int]:
    """Return the first address of an array's memory, and the first address after it."""
    if not is_on_device(array):
        return byte_bounds(array)
    first, reach = address(array), [(extent - 1) * step for extent, step in zip(array.shape, array.strides, strict=True)]
    return first + sum(min(step, 0) for step in reach), first + sum(max(step, 0) for step in reach) + array.itemsize


def in_dtype(array: Array, dtype: np.dtype[Any]) -> Array:
    """Return an array converted to a dtype, without a copy if it has it already; a NumPy scalar becomes a 0-d array."""
    return array.astype(dtype, copy=False) if is_on_device(array) else cast("Array", quiet()(np.asarray, array, dtype))


def as_array(value: Any, name: str = "value") -> Array:
    """Return `value` as an array, without a copy wherever that is possible.

    The result is a NumPy array, or a CuPy array if the value is in the memory of the GPU that this process computes on. In host
    memory anything is read that supports ``__array__``, ``__array_interface__``, the buffer protocol or DLPack, numbers, and
    rectangular lists of them. If the value is read-only, as JAX arrays are, so is the result. A tensor that requires a gradient
    is read by its values: no gradient flows through a collective. `name` is that of the value in errors.
    """
    array: Array = value if type(value) is np.ndarray else _read(value, name)
    if array.dtype.kind in "OUSMmT" or array.dtype.type is np.void:
        found = "" if array is value else f". It is made of a value of type {type(value).__name__}"
        raise UnsupportedDtypeError(
            f"{name} has dtype {array.dtype}, which collectives do not support; accepted are arrays of {ACCEPTED}{found}"
        )
    return array


def as_operand(value: Any, name: str = "value") -> Array:
    """Return `value` as an array, like `as_array`, for use as the operand of a collective.

    An array whose elements are not aligned, as in a view of packed bytes, is copied: neither MPI nor mpi4py works on such
    memory. An array in host memory is refused if this process computes on a GPU: an implicit copy would hide that the program
    computes on the wrong device. Numbers are accepted.
    """
    array = as_array(value, name)
    if not is_aligned(array):
        array = array.copy()
    if array.ndim and bound_device() is not None and not is_on_device(array):
        copied = (_COPIES.get(_library(value), ("", ""))[1] or "strategy.array_module.asarray({name})").format(name=name)
        raise InvalidArgumentError(
            f"{name} is in host memory, this replica computes on {own_device()}; copy it first, {copied}, or compute in host "
            "memory with MPISTRAT_DEVICE=cpu"
        )
    return array


def as_target(target: Any, name: str = "out") -> Array:
    """Return the memory of an array that a result is written to; what would be a copy of it is refused."""
    device = bound_device()
    is_tensor = is_a(target, "torch", "Tensor")
    is_array = isinstance(target, np.ndarray) or (device is not None and isinstance(target, device.array_module.ndarray))
    if not (is_tensor or is_array) or (is_tensor and (target.is_conj() or target.is_neg())):
        raise InvalidArgumentError(
            f"{name} must be an array to write to: NumPy's, CuPy's, or a tensor of PyTorch that is no lazy conj() or negative; "
            f"got {type(target).__name__}"
        )
    return as_array(target, name)


def like(result: Array, original: Any) -> Any:
    """Return `result`, which the caller must not write to any more, as an array of the library that `original` belongs to.

    For PyTorch and JAX it is on the device of `original`, for CuPy on this replica's GPU. It shares the memory of `result` if
    that is on the same device, and for JAX if its address has the alignment that JAX needs. JAX without 64-bit types keeps 32
    bits. For everything else, numbers and lists too, it is `result` itself; but for a number, if this process computes on a
    GPU, a NumPy scalar: CuPy computes with these, and not with 0-d NumPy arrays.
    """
    if type(original) is np.ndarray:
        return result
    device = bound_device()
    if device is not None and isinstance(original, device.array_module.ndarray):
        return to_device(result)
    on_device = is_on_device(result)
    if is_a(original, "torch", "Tensor"):
        tensor = _tensor(result)
        return tensor if on_device or original.device.type == "cpu" else tensor.to(original.device)
    if is_a(original, "jax", "Array"):
        jax = sys.modules["jax"]
        return jax.dlpack.from_dlpack(result) if on_device else jax.device_put(result, original.device, may_alias=True)
    if on_device:
        return result
    if device is not None and type(result) is np.ndarray and not result.ndim:
        return result[()]
    if hasattr(original, "__array_namespace__"):
        return original.__array_namespace__().asarray(result)
    return result


def is_a(value: Any, module: str, name: str) -> bool:
    """Return whether `value` is an instance of a class, without importing its module: if nobody did, there is no instance."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)


def _read(value: Any, name: str) -> Array:
    if isinstance(value, Readable):
        return value.read()
    device = bound_device()
    if device is not None and isinstance(value, device.array_module.ndarray):
        _check_index(value.device.id, device, name)
        return cast("Array", value)
    try:
        place = _device_of(value)
        if device is not None and place.startswith("cuda"):
            return _read_on_device(value, place, device, name)
        if place:
            copied = _COPIES.get(_library(value))
            advice = f"copy it first, {copied[0].format(name=name)}" if copied else "copy it to host memory first"
            why = f" ({why_cpu()})" if place.startswith("cuda") and why_cpu() else ""
            raise InvalidArgumentError(f"{name} is on {place}, this replica computes on {own_device()}{why}; {advice}")
        if is_a(value, "torch", "Tensor"):
            return _array_of(value, lambda tensor: tensor.numpy(force=True))  # copies only tensors with a lazy conjugation
        if is_a(value, "numpy.ma", "MaskedArray"):
            raise TypeError("it has a mask, which would be lost; fill in a value for the masked elements, x.filled(0)")
        return _memory(value)
    except MpistratError:
        raise  # from the __array__ of a variable, for example
    except (TypeError, ValueError, BufferError) as error:
        raise UnsupportedDtypeError(f"{name} cannot be read as an array: {error}; pass an array of numbers") from None


def _memory(value: Any) -> Array:
    if hasattr(value, "__array__") or hasattr(value, "__array_interface__") or not hasattr(value, "__dlpack__"):
        return np.asarray(value)
    try:
        return np.from_dlpack(value)
    except RuntimeError as error:  # NumPy does not know the dtype
        raise TypeError(error) from None


def _read_on_device(value: Any, place: str, device: Device, name: str) -> Array:
    """Return a value in GPU memory as an array of CuPy that shares it; what is in the memory of another GPU is refused.

    Work on the current stream of the caller is ordered after work that the other library has enqueued on its own stream.
    """
    index = place.partition(":")[2]
    _check_index(int(index) if index else device.index, device, name)
    check_capture(device, name)
    module = device.array_module
    with device.activate():
        if is_a(value, "torch", "Tensor"):
            array = _array_of(value.detach().resolve_conj().resolve_neg(), module.from_dlpack)
        else:
            array = module.from_dlpack(value) if hasattr(value, "__dlpack__") else module.asarray(value)
    _check_index(cast("Any", array).device.id, device, name)
    return array


def is_captured_elsewhere(device: Device) -> bool:
    """Return whether PyTorch captures a CUDA graph on another stream than the current one, whose work is no part of it."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return False
    with device.activate(), suppress(RuntimeError):  # PyTorch cannot tell, where CuPy captures
        return bool(cuda.is_current_stream_capturing() and cuda.current_stream().cuda_stream != device.current_stream().pointer)
    return False


def check_capture(device: Device, name: str) -> None:
    """Refuse to use an array on the current stream, if PyTorch captures a CUDA graph on another one."""
    if is_captured_elsewhere(device):
        raise InvalidArgumentError(
            f"PyTorch is capturing a CUDA graph, in which {name} can be read only on its stream: make the call before or "
            "after, or in Communicator.capture with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)"
        )


def _check_index(found: int, device: Device, name: str) -> None:
    if found != device.index:
        raise InvalidArgumentError(
            f"{name} is on GPU {found}, this replica computes on GPU {device.index}; copy it first, "
            f"with cupy.cuda.Device({device.index}): {name} = cupy.array({name})"
        )


def _array_of(tensor: Any, convert: Callable[[Any], Array]) -> Array:
    """Return a tensor as a function converts it; NumPy has no bfloat16 of its own, nor every CuPy: reinterpret the bits."""
    torch = sys.modules["torch"]
    return convert(tensor.view(torch.int16)).view(_BFLOAT16) if tensor.dtype is torch.bfloat16 else convert(tensor)


def _tensor(array: Array) -> Any:
    torch, on_device = sys.modules["torch"], is_on_device(array)
    if not (on_device or array.flags.writeable):  # PyTorch has no read-only tensors
        array = array.copy()
    convert = torch.from_dlpack if on_device else torch.from_numpy
    return convert(array.view(np.int16)).view(torch.bfloat16) if array.dtype == _BFLOAT16 else convert(array)


def _library(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def _device_of(value: Any) -> str:
    """Return the device whose memory `value` is in, ``cuda:1`` or without an index; an empty string for host memory."""
    if is_a(value, "torch", "Tensor"):
        return "" if value.device.type == "cpu" else str(value.device)
    if hasattr(value, "__dlpack_device__"):
        kind, index = map(int, value.__dlpack_device__())
        return "" if kind in _HOST_MEMORY else f"{_DEVICE_NAMES.get(kind, f'DLPack device type {kind}')}:{index}"
    return "cuda" if hasattr(value, "__cuda_array_interface__") else ""


def new_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return an array for a result, above 32 MiB in the memory of an earlier one that nobody has any more.

    Otherwise the kernel clears its pages while other ranks wait: a sum of 102 MB on two ranks of a node takes 26 ms then, and
    13 ms in memory that was used before. At most 256 MiB are retained.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if not MALLOC_REUSES_BYTES < nbytes <= _MOST_RETAINED_BYTES:
        return np.empty(shape, dtype)
    # of a copy, since a thread or a finalizer may change it meanwhile, or take what is found
    fitting = [key for key, memory in _retained.copy().items() if memory.nbytes == nbytes]
    memory = _retained.pop(fitting[0], None) if fitting else None
    return np.asarray(_Block(np.empty(nbytes, np.uint8) if memory is None else memory)).view(dtype).reshape(shape)


_retained = dict[int, Array]()  # memory that no array uses, the oldest first


def retained_bytes(retained: Mapping[int, Array] = _retained) -> int:
    """Return how many bytes are retained."""
    return sum(memory.nbytes for memory in [*retained.values()])


class _Block:
    """The base of all arrays that share some memory: it ends with the last of them, and the memory can be used again."""

    def __init__(self, memory: Array) -> None:
        self._memory, self.__array_interface__ = memory, memory.__array_interface__

    def __del__(self, retained: dict[int, Array] = _retained, count: Callable[[], int] = retained_bytes) -> None:
        retained[id(self._memory)] = self._memory  # the arguments: at the end of the program there are no globals any more
        while count() > _MOST_RETAINED_BYTES:
            retained.pop(next(iter([*retained]), 0), None)


def checksum(arrays: Iterable[Array], most_bytes: int | None = None, start: int = 0) -> int:
    """Return a hash of the bits of arrays, below 2**62; of those above `most_bytes`, of spaced elements, from `start` on."""
    digest = blake2b(digest_size=8)
    for array in arrays:
        if array.itemsize >= 16 and array.dtype.char in "gG" and np.finfo(np.longdouble).nmant == 63:
            # x86: 6 of 16 bytes are no part of a number, and hold anything
            array = np.ascontiguousarray(array).view(np.uint8).reshape(-1, 16)[:, :10]
        if most_bytes is not None and array.nbytes > most_bytes:
            spacing = -(-array.nbytes // most_bytes)
            digest.update(to_host(array.reshape(-1)[start % spacing :: spacing]).tobytes())
        else:
            digest.update(np.ascontiguousarray(to_host(array)).view(np.uint8).data)
    return int.from_bytes(digest.digest(), "little") >> 2
