"""Device: the interface of a GPU that transports and packing use.

Invariant: nothing here waits but `Device.get` and `Device.synchronize`. Work is enqueued on streams, and its completion is
polled with events. A device-wide synchronisation during a collective would stall its peers, and so would allocating or freeing
device memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

DeviceArray = Any
"""A one-dimensional array in device memory: has `size`, `dtype`, `nbytes`, slices, and supports
``__cuda_array_interface__``."""


class Event(ABC):
    """A point in a stream."""

    @abstractmethod
    def done(self) -> bool:
        """Return whether all work before it has completed; never waits."""


class Stream(ABC):
    """A queue of work that a device executes in order."""

    @property
    @abstractmethod
    def pointer(self) -> int:
        """The cudaStream_t, as an integer."""

    @abstractmethod
    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy bytes from address to address; each may be in device memory or in pinned host memory."""

    @abstractmethod
    def clear(self, target: int, nbytes: int) -> None:
        """Set bytes of the device to zero."""

    @abstractmethod
    def record(self, event: Event | None = None) -> Event:
        """Return an event that completes with all work enqueued so far: a new one, or `event`, which is recorded again.

        Streams that were told to wait for it before go on waiting for what came before that.
        """

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Make all work that is enqueued from now on wait for an event, which may be of another stream."""

    @abstractmethod
    def is_capturing(self) -> bool:
        """Return whether a CUDA graph is being captured on it, so that what is enqueued does not run."""

    @abstractmethod
    def launch(self, kernel: str, num_blocks: int, arguments: tuple[Any, ...]) -> None:
        """Run an instance of a kernel of `kernels.cu`, such as ``fold_peers<float, Sum>``, in blocks of 256 threads.

        Arguments are integers for addresses and counts of 64 bits, NumPy scalars of the width that the kernel declares for the
        rest.
        """


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


class Device(ABC):
    """The GPU of this rank."""

    index: int
    """CUDA's index in this process."""
    last_call: Event | None = None
    """The end of what NCCL was given last on this GPU, by whichever communicator."""

    @property
    @abstractmethod
    def array_module(self) -> ModuleType:
        """The array library of this device: CuPy."""

    @abstractmethod
    def identity(self) -> Identity:
        """Return the identifiers of the GPU."""

    def is_exclusive(self) -> bool:
        """Return whether the GPU's compute mode, EXCLUSIVE_PROCESS, keeps a second process from opening it."""
        return False

    @abstractmethod
    def activate(self, stream: Stream | None = None) -> AbstractContextManager[None]:
        """Return a context manager in which this is the current device of the calling thread, and `stream` its stream."""

    @abstractmethod
    def allocate(self, nbytes: int, allocator: Allocator | None = None) -> DeviceArray:
        """Return device memory (uint8) in a separate allocation, which other processes can map if no allocator is given.

        Raises TransportError if the device is out of memory.
        """

    @abstractmethod
    def export(self, memory: DeviceArray) -> bytes:
        """Return a handle by which another process of this machine can map memory from `allocate`.

        Raises TransportError if the memory cannot be shared.
        """

    @abstractmethod
    def map(self, handle: bytes, nbytes: int) -> DeviceArray:
        """Return the memory (uint8) that another process has exported; raises TransportError if this device cannot reach it."""

    @abstractmethod
    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        """Return pinned host memory, which the device can copy to and from asynchronously."""

    def maker(self, arrays: Sequence[DeviceArray]) -> Callable[[], list[DeviceArray]]:
        """Return what makes new arrays of the caller's current stream, of the shapes and dtypes of others."""
        module, alike = self.array_module, [(array.shape, array.dtype) for array in arrays]
        return lambda: [module.empty(shape, dtype) for shape, dtype in alike]

    @abstractmethod
    def prepare(self, kernel: str) -> None:
        """Compile a kernel of `kernels.cu` and load it, unless that has been done: before it is launched for the first time.

        Both take their time, and to load it may wait for the device.
        """

    @abstractmethod
    def put(self, target: DeviceArray, values: NDArray[Any]) -> None:
        """Copy a host array to the device, on the current stream."""

    @abstractmethod
    def get(self, source: DeviceArray) -> NDArray[Any]:
        """Return a host copy of an array, after all work on the current stream."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all work has completed, on all streams."""

    @abstractmethod
    def stream(self) -> Stream:
        """Return a new stream, independent of all others."""

    @abstractmethod
    def current_stream(self) -> Stream:
        """Return the current stream of the caller on this device, whichever is the current one."""


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
