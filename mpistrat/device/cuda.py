"""CudaDevice: a GPU of NVIDIA's, over CuPy.

File law: memory and streams are made on the GPU of the object, whichever one the calling thread computes on: CUDA lets every
new thread begin with GPU 0. Events and launches belong to the thread that `activate` has prepared.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpistrat.device.abstract import Device, DeviceArray, Event, Identity, Stream, address
from mpistrat.device.segments import THREADS
from mpistrat.errors import TransportError

__all__ = ["CudaDevice", "count_visible"]

_SUCCESS, _NOT_READY = 0, 600  # of cudaError_t


def count_visible() -> tuple[int, str]:
    """Return how many GPUs this process sees, and why none where there is none. CuPy is imported only where it could work."""
    if find_spec("cupy") is None:
        return 0, "CuPy is not installed: pip install 'mpistrat[cuda12]', or cuda13"
    if not _has_driver():
        return 0, "this machine has no driver of NVIDIA's (libcuda.so.1)"
    try:
        from cupy.cuda import runtime
    except Exception as error:  # one that was built for another NumPy raises a ValueError, for example
        return 0, f"CuPy cannot be imported: {_first_words(error.__cause__ or error)}"
    try:
        count = int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        return 0, f"CUDA shows no GPU: {error}"
    return count, "" if count else "CUDA shows no GPU"


class CudaDevice(Device):
    """A GPU that CUDA shows to this process.

    Parameters
    ----------
    index : int, optional
        As CUDA counts in this process; by default the current device of CuPy.
    """

    def __init__(self, index: int | None = None) -> None:
        import cupy

        self.index = cupy.cuda.Device().id if index is None else index

    @property
    def array_module(self) -> ModuleType:
        """CuPy."""
        import cupy

        module: ModuleType = cupy
        return module

    def identity(self) -> Identity:
        """Return what the driver says."""
        from cupy.cuda import runtime

        name = runtime.getDeviceProperties(self.index)["name"].decode()
        return Identity(name, _uuid(self.index), runtime.deviceGetPCIBusId(self.index).lower())

    def use(self) -> None:
        """Make this the current device of CuPy on the calling thread, from here on."""
        import cupy

        cupy.cuda.Device(self.index).use()

    @contextmanager
    def activate(self, stream: Stream | None = None) -> Iterator[None]:
        """Make this the current device of CuPy on the calling thread, and `stream` its current stream."""
        import cupy

        with cupy.cuda.Device(self.index):
            if stream is None:
                yield
            else:
                assert isinstance(stream, _CudaStream)
                with stream.native:
                    yield

    def allocate(self, nbytes: int) -> DeviceArray:
        """Return memory from cudaMalloc: a handle of CUDA IPC names a whole allocation, which a pool would share out.

        Raises
        ------
        TransportError
            If the GPU has not so much left.
        """
        from cupy.cuda import runtime

        with self.activate():
            try:
                start = runtime.malloc(max(nbytes, 1))
            except runtime.CUDARuntimeError as error:
                free, total = runtime.memGetInfo()
                raise TransportError(
                    f"GPU {self.index} has no {nbytes / 2**20:.3g} MiB more for collectives ({error}): {free / 2**20:.0f} of "
                    f"{total / 2**20:.0f} MiB are free. CuPy's pool keeps what was freed: "
                    "cupy.get_default_memory_pool().free_all_blocks(), or make it smaller from the beginning (set_limit); or "
                    "set bytes_per_pack, which makes the buffers of collectives smaller"
                ) from None
            return self._array(_Memory(start, runtime.free, self), nbytes)

    def export(self, memory: DeviceArray) -> bytes:
        """Return the handle of the allocation.

        Raises
        ------
        TransportError
            If this machine shares no memory of GPUs between processes.
        """
        from cupy.cuda import runtime

        try:
            handle: bytes = runtime.ipcGetMemHandle(address(memory))
        except runtime.CUDARuntimeError as error:
            raise TransportError(f"memory of GPU {self.index} cannot be shown to other processes ({error})") from None
        return handle

    def map(self, handle: bytes, nbytes: int) -> DeviceArray:
        """Return the memory, mapped until the last array on it is gone."""
        from cupy.cuda import runtime

        try:
            with self.activate():
                start = runtime.ipcOpenMemHandle(handle, runtime.cudaIpcMemLazyEnablePeerAccess)
        except runtime.CUDARuntimeError as error:
            raise TransportError(
                f"memory of another process's GPU cannot be mapped ({error}): the GPUs of a node must reach each other, and "
                "each process must see all of them (SLURM: --gpu-bind=none instead of --gpus-per-task)"
            ) from None
        return self._array(_Memory(start, runtime.ipcCloseMemHandle, self), nbytes)

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        """Return memory of the host, page-locked."""
        import cupyx

        with self.activate():
            memory: NDArray[np.uint8] = cupyx.empty_pinned(max(nbytes, 1), np.uint8)
        return memory[:nbytes]

    def put(self, target: DeviceArray, values: NDArray[Any]) -> None:
        """Write values of the host on CuPy's current stream."""
        target.set(values)

    def get(self, source: DeviceArray) -> NDArray[Any]:
        """Return the values, after CuPy's current stream."""
        values: NDArray[Any] = source.get()
        return values

    def stream(self) -> Stream:
        """Return a stream that does not wait for the legacy default stream, nor that for it."""
        import cupy

        with self.activate():
            return _CudaStream(cupy.cuda.Stream(non_blocking=True))

    def current_stream(self) -> Stream:
        """Return CuPy's current stream of this thread."""
        import cupy

        return _CudaStream(cupy.cuda.get_current_stream())

    def _array(self, memory: _Memory, nbytes: int) -> DeviceArray:
        """Return memory as an array; that of a peer's GPU counts as ours, since this one reaches it."""
        import cupy

        owned = cupy.cuda.UnownedMemory(memory.start, nbytes, memory, self.index)
        return cupy.ndarray((nbytes,), np.uint8, cupy.cuda.MemoryPointer(owned, 0))


class _CudaEvent(Event):
    def __init__(self, event: Any) -> None:
        self.native = event

    def done(self) -> bool:
        from cupy.cuda import runtime

        # CuPy's `Event.done` takes a GPU that has failed for one that is still busy
        status = runtime.eventQuery(self.native.ptr)
        if status not in (_SUCCESS, _NOT_READY):
            raise TransportError(f"the GPU has failed: {_meaning(status)}; CUDA cannot go on in this process")
        return bool(status == _SUCCESS)


class _CudaStream(Stream):
    def __init__(self, native: Any) -> None:
        self.native = native

    @property
    def pointer(self) -> int:
        return int(self.native.ptr)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        from cupy.cuda import runtime

        runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDefault, self.pointer)

    def clear(self, target: int, nbytes: int) -> None:
        from cupy.cuda import runtime

        runtime.memsetAsync(target, 0, nbytes, self.pointer)

    def record(self) -> Event:
        import cupy

        event = cupy.cuda.Event(disable_timing=True)
        event.record(self.native)
        return _CudaEvent(event)

    def wait(self, event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        self.native.wait_event(event.native)

    def launch(self, kernel: str, num_blocks: int, arguments: tuple[Any, ...]) -> None:
        _kernel(kernel)((num_blocks,), (THREADS,), arguments, stream=self.native)


class _Memory:
    """Memory that is given back with the last array on it, on whichever thread that happens."""

    def __init__(self, start: int, give_back: Callable[[int], None], device: CudaDevice) -> None:
        self.start, self._give_back, self._device = start, give_back, device

    def __del__(self) -> None:
        if not sys.is_finalizing():  # CUDA may be gone by then, and everything with it
            with self._device.activate():
                self._give_back(self.start)


def _uuid(index: int) -> str:
    """Return the UUID of a GPU, or of the instance of a divided one, in hexadecimal; an empty text if the driver tells none.

    The driver is asked: what CuPy hands out ends at the first zero byte.
    """
    driver, device, uuid = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), (ctypes.c_ubyte * 16)()
    ask = getattr(driver, "cuDeviceGetUuid_v2", None) or driver.cuDeviceGetUuid  # drivers before 11.4 know the first one
    failed = driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), index) or ask(uuid, device)
    return "" if failed else bytes(uuid).hex()


def _meaning(status: int) -> str:
    """Return what CUDA calls an error."""
    from cupy.cuda import runtime

    try:
        runtime.check_status(status)
    except runtime.CUDARuntimeError as error:
        return f"{error}"
    raise AssertionError(f"{status} is not an error")


@cache
def _kernel(name: str) -> Any:
    """Return an instance of a kernel, compiled for the current device; CuPy keeps the result on disk."""
    import cupy

    source = (files("mpistrat.device") / "kernels.cu").read_text()
    module = cupy.RawModule(code=source, options=("-std=c++17",), name_expressions=[name])
    return module.get_function(name)


def _first_words(error: BaseException) -> str:
    """Return the first line of an error that says something; CuPy puts a frame of ='s around what caused its own."""
    return next(filter(None, map(str.strip, f"{error}".splitlines())), type(error).__name__)


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
