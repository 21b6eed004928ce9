"""Device: an NVIDIA GPU, by CuPy, with its streams and events: what transports and packing use of it.

Invariant: nothing here waits but `Device.get` and `Device.synchronize`. Work is enqueued on streams, and its completion is
polled with events. A device-wide synchronisation during a collective would stall its peers, and so would allocating or freeing
device memory.

Memory and streams are created on the GPU of the object, whatever the current device of the calling thread: in CUDA every new
thread begins with GPU 0. Events and launches need a thread for which `activate` has been called.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpistrat.device.kernels import THREADS
from mpistrat.errors import TransportError
from mpistrat.lazy import LazyModule

cupy: Any = LazyModule("cupy")
cupyx: Any = LazyModule("cupyx")
runtime: Any = LazyModule("cupy:cuda.runtime")

_NOT_READY = 600  # of cudaError_t
_EXCLUSIVE_PROCESS = 3  # of cudaComputeMode
BLOCK_BYTES, ALIGNMENT_BYTES = 1 << 20, 512  # of arrays that share an allocation; CuPy aligns its own so
_RELAXED = 2  # of CUstreamCaptureMode
_ALREADY = nullcontext()  # that needs no change of the current device

DeviceArray = Any
"""A one-dimensional array in device memory: has `size`, `dtype`, `nbytes`, slices, and supports
``__cuda_array_interface__``."""


def count_visible() -> tuple[int, str]:
    """Return the number of GPUs that this process sees, and if none, why. CuPy is imported only if there is a driver."""
    if find_spec("cupy") is None:
        return 0, "CuPy is not installed: pip install '.[cuda12]' in the checkout, or cuda13"
    if not _has_driver():
        return 0, "this machine has no NVIDIA driver (libcuda.so.1)"
    try:
        from cupy.cuda import runtime
    except Exception as error:  # a CuPy that was built for another NumPy raises a ValueError, for example
        return 0, f"CuPy cannot be imported: {_first_line(error.__cause__ or error)}"
    try:
        count = int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        return 0, f"CUDA shows no GPU: {error}"
    return count, "" if count else "CUDA shows no GPU"


@dataclass(frozen=True)
class Identity:
    """Identifiers of a GPU that are valid in every process."""

    name: str  # such as NVIDIA H200
    uuid: str  # of the GPU, or of the MIG instance, in hexadecimal; empty if the driver gives none
    pci_bus_id: str  # such as 0000:17:00.0


class Allocator(NamedTuple):
    """Functions of another library that allocate memory of the current device: one raises MemoryError, one frees it."""

    allocate: Callable[[int], int]
    free: Callable[[int], None]


class Device:
    """A GPU that is visible to this process, by CUDA's index; by default the current one."""

    last_call: Event | None = None
    """The end of what NCCL was given last on this GPU, by whichever communicator."""

    def __init__(self, index: int | None = None) -> None:
        self.index = cupy.cuda.Device().id if index is None else index

    @property
    def array_module(self) -> ModuleType:
        """The array library of this device: CuPy."""
        import cupy

        module: ModuleType = cupy
        return module

    def identity(self) -> Identity:
        """Return the identifiers of the GPU."""
        name = runtime.getDeviceProperties(self.index)["name"].decode()
        return Identity(name, _uuid(self.index), runtime.deviceGetPCIBusId(self.index).lower())

    def is_exclusive(self) -> bool:
        """Return whether the GPU's compute mode, EXCLUSIVE_PROCESS, keeps a second process from opening it."""
        return int(runtime.deviceGetAttribute(runtime.cudaDevAttrComputeMode, self.index)) == _EXCLUSIVE_PROCESS

    def use(self) -> None:
        """Make this the current device of CuPy on the calling thread."""
        cupy.cuda.Device(self.index).use()

    def activate(self, stream: Stream | None = None) -> AbstractContextManager[None]:
        """Return a context manager in which this is the current device of the calling thread, and `stream` its stream."""
        is_current = stream is None and runtime.getDevice() == self.index
        return _ALREADY if is_current else self._activated(stream)

    @contextmanager
    def _activated(self, stream: Stream | None) -> Iterator[None]:
        with cupy.cuda.Device(self.index), _ALREADY if stream is None else stream.native:
            yield

    def allocate(self, nbytes: int, allocator: Allocator | None = None) -> DeviceArray:
        """Return memory (uint8) from cudaMalloc, or an allocator; raise TransportError if the device is out of memory.

        Not of CuPy's pool: what other processes map by a handle of CUDA IPC is a whole allocation.
        """
        allocator = allocator or Allocator(runtime.malloc, runtime.free)
        with self.activate():
            try:
                start = allocator.allocate(max(nbytes, 1))
            except (runtime.CUDARuntimeError, MemoryError) as error:
                free, total = runtime.memGetInfo()
                raise TransportError(
                    f"GPU {self.index} is out of memory: a buffer of {nbytes / 2**20:.3g} MiB for collectives was asked for "
                    f"({error}), and {free / 2**20:.0f} of {total / 2**20:.0f} MiB are free. CuPy's pool keeps memory that was "
                    "freed: call cupy.get_default_memory_pool().free_all_blocks(), or limit the pool (set_limit); or set "
                    "bytes_per_pack, which makes the buffers of collectives smaller"
                ) from None
            return self._array(_Memory(start, allocator.free, self), nbytes)

    def export(self, memory: DeviceArray) -> bytes:
        """Return a handle by which another process of this machine can map memory from `allocate` without an allocator.

        Raises TransportError if the memory cannot be shared.
        """
        try:
            handle: bytes = runtime.ipcGetMemHandle(address(memory))
        except runtime.CUDARuntimeError as error:
            raise TransportError(f"memory of GPU {self.index} cannot be shared with other processes ({error})") from None
        return handle

    def map(self, handle: bytes, nbytes: int) -> DeviceArray:
        """Return the memory (uint8) that another process has exported, mapped until the last array on it is deleted.

        Raises TransportError if this device cannot reach it.
        """
        try:
            with self.activate():
                start = runtime.ipcOpenMemHandle(handle, runtime.cudaIpcMemLazyEnablePeerAccess)
        except runtime.CUDARuntimeError as error:
            raise TransportError(
                f"memory of another process's GPU cannot be mapped ({error}): CUDA IPC needs peer access between the GPUs of a "
                "node, and each process must see all of them (SLURM: --gpu-bind=none instead of --gpus-per-task)"
            ) from None
        return self._array(_Memory(start, runtime.ipcCloseMemHandle, self), nbytes)

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        """Return pinned host memory, which the device can copy to and from asynchronously."""
        with self.activate():
            memory: NDArray[np.uint8] = cupyx.empty_pinned(max(nbytes, 1), np.uint8)
        return memory[:nbytes]

    def maker(self, arrays: Sequence[DeviceArray]) -> Callable[[], list[DeviceArray]]:
        """Return what makes new arrays of the caller's current stream, of the shapes and dtypes of others.

        Small ones share allocations, each of which is freed with the last of them.
        """
        return in_blocks(arrays, cupy.cuda.alloc, cupy.ndarray)

    def prepare(self, kernel: str) -> None:
        """Compile a kernel of `kernels.cu` and load it, unless that has been done: before it is launched for the first time.

        Both take their time, and to load it may wait for the device.
        """
        with self.activate():
            _kernel(kernel)

    def put(self, target: DeviceArray, values: NDArray[Any]) -> None:
        """Copy a host array to the device, on the current stream."""
        target.set(values)

    def get(self, source: DeviceArray) -> NDArray[Any]:
        """Return a host copy of an array, after all work on the current stream."""
        values: NDArray[Any] = source.get()
        return values

    def synchronize(self) -> None:
        """Wait until all work has completed, on all streams."""
        with self.activate():
            runtime.deviceSynchronize()

    def stream(self) -> Stream:
        """Return a new stream, which is not synchronised with the legacy default stream."""
        with self.activate():
            return Stream(cupy.cuda.Stream(non_blocking=True))

    def current_stream(self) -> Stream:
        """Return the current stream of the caller on this device, whichever is the current one."""
        return Stream(cupy.cuda.get_current_stream(self.index))

    def _array(self, memory: _Memory, nbytes: int) -> DeviceArray:
        """Return memory as an array on this GPU, even if it is mapped from the GPU of a peer."""
        owned = cupy.cuda.UnownedMemory(memory.start, nbytes, memory, self.index)
        return cupy.ndarray((nbytes,), np.uint8, cupy.cuda.MemoryPointer(owned, 0))


class Event:
    """A point in a stream, of CuPy's."""

    def __init__(self, event: Any) -> None:
        self.native = event

    def done(self) -> bool:
        """Return whether all work before it has completed; never waits."""
        # in the default mode a query by any thread invalidates a capture of a CUDA graph that is under way on another one
        mode = _exchange_capture_mode(_RELAXED)
        # CuPy's `Event.done` would report a GPU that has failed as still busy
        try:
            status = runtime.eventQuery(self.native.ptr)
        finally:
            _exchange_capture_mode(mode)
        if status == _NOT_READY:
            return False
        try:
            runtime.check_status(status)
        except runtime.CUDARuntimeError as error:
            raise TransportError(f"the GPU has failed: {error}; CUDA cannot be used any more in this process") from None
        return True


class Stream:
    """A queue of work that a device executes in order, of CuPy's."""

    def __init__(self, native: Any) -> None:
        self.native = native

    @property
    def pointer(self) -> int:
        """The cudaStream_t, as an integer."""
        return int(self.native.ptr)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy bytes from address to address; each may be in device memory or in pinned host memory."""
        runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDefault, self.pointer)

    def clear(self, target: int, nbytes: int) -> None:
        """Set bytes of the device to zero."""
        runtime.memsetAsync(target, 0, nbytes, self.pointer)

    def record(self, event: Event | None = None) -> Event:
        """Return an event that completes with all work enqueued so far: a new one, or `event`, which is recorded again.

        Streams that were told to wait for it before go on waiting for what came before that.
        """
        event = event or Event(cupy.cuda.Event(disable_timing=True))
        event.native.record(self.native)
        return event

    def wait(self, event: Event) -> None:
        """Make all work that is enqueued from now on wait for an event, which may be of another stream."""
        self.native.wait_event(event.native)

    def is_capturing(self) -> bool:
        """Return whether a CUDA graph is being captured on it, so that what is enqueued does not run."""
        try:
            return bool(self.native.is_capturing())
        except runtime.CUDARuntimeError:  # of the legacy default stream, which what is captured on another one may not use
            return True

    def launch(self, kernel: str, num_blocks: int, arguments: tuple[Any, ...]) -> None:
        """Run an instance of a kernel of `kernels.cu`, such as ``fold_peers<float, Sum>``, in blocks of 256 threads.

        Arguments are integers for addresses and counts of 64 bits, NumPy scalars of the width that the kernel declares for the
        rest.
        """
        _kernel(kernel)((num_blocks,), (THREADS,), arguments, stream=self.native)


def in_blocks(arrays: Sequence[DeviceArray], alloc: Callable[[int], Any], kind: type[Any]) -> Callable[[], list[DeviceArray]]:
    """Return what makes arrays like others, in allocations of up to 1 MiB or one array: each takes CuPy longer than a view.

    One array that is kept keeps its whole allocation: that must not be large.
    """
    sizes, places = [0], []
    for array in arrays:
        nbytes = -(-array.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if sizes[-1] + nbytes > BLOCK_BYTES:
            sizes.append(0)
        # CuPy takes a fifth less time for a type than for its dtype
        places.append((array.shape, array.dtype.type, len(sizes) - 1, sizes[-1]))
        sizes[-1] += nbytes

    def make() -> list[DeviceArray]:
        blocks, new = list(map(alloc, sizes)), kind.__new__  # CuPy's arrays are complete then: to call `__init__` takes a sixth
        return [new(kind, shape, dtype, blocks[index] + start) for shape, dtype, index, start in places]

    return make


class _Memory:
    """Memory that is freed with the last array on it, on whichever thread that happens."""

    def __init__(self, start: int, free: Callable[[int], None], device: Device) -> None:
        self.start, self._free, self._device = start, free, device

    def __del__(self) -> None:
        if not sys.is_finalizing():  # CUDA may have been shut down by then, and has freed everything
            with self._device.activate():
                self._free(self.start)


def _uuid(index: int) -> str:
    """Return the UUID of a GPU, or of the MIG instance, in hexadecimal; an empty text if the driver gives none.

    The driver is asked, because the UUID that CuPy returns ends at its first zero byte.
    """
    driver, device, uuid = _driver(), ctypes.c_int(), (ctypes.c_ubyte * 16)()
    failed = driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), index) or driver.cuDeviceGetUuid_v2(uuid, device)
    return "" if failed else bytes(uuid).hex()


def _exchange_capture_mode(mode: int) -> int:
    """Set which captures calls of this thread may disturb, and return what it was; CuPy has no function for it."""
    value = ctypes.c_int(mode)
    _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(value))
    return value.value


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@cache
def _kernel(name: str) -> Any:
    """Return an instance of a kernel, compiled for the current device; CuPy caches it on disk."""
    source = Path(__file__).with_name("kernels.cu").read_text()
    module = cupy.RawModule(code=source, options=("-std=c++17",), name_expressions=[name])
    return module.get_function(name)


def _first_line(error: BaseException) -> str:
    """Return the first line of an error that is not empty."""
    return next(filter(None, map(str.strip, f"{error}".splitlines())), type(error).__name__)


def _has_driver() -> bool:
    try:
        _driver()
    except OSError:
        return False
    return True


def addresses(arrays: Sequence[DeviceArray]) -> list[int]:
    """Return the address of each array on a device: see `address`."""
    try:
        return [array.data.ptr for array in arrays]  # a third of the time
    except (AttributeError, ValueError):  # as there
        return list(map(address, arrays))


def are_contiguous(arrays: Sequence[DeviceArray]) -> bool:
    """Return whether arrays, of the host or a device, are C-contiguous."""
    try:
        return all([array._c_contiguous for array in arrays])  # CuPy makes an object for `flags`, which takes ten times as long
    except AttributeError:
        return all([array.flags.c_contiguous for array in arrays])


def address(array: NDArray[Any] | DeviceArray) -> int:
    """Return the address of an array's first element, on the host or a device; that of an empty one may be 0."""
    if isinstance(array, np.ndarray):
        return int(array.__array_interface__["data"][0])
    try:
        return int(array.data.ptr)  # CuPy: some microseconds faster than the whole interface
    except (AttributeError, ValueError):  # NumPy's `data` raises for dtypes such as bfloat16
        return int(array.__cuda_array_interface__["data"][0])
