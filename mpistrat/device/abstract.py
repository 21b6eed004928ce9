"""Device: what transports and packing ask of a GPU, in a few verbs.

File law: nothing here waits but `Device.get`. Work is put on streams; who must know when it is through polls an event. A
device-wide synchronisation would stall the peers of a collective, as memory that is allocated or freed while one runs would.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Device", "DeviceArray", "Event", "Identity", "Stream", "address"]

DeviceArray = Any
"""A one-dimensional array in the memory of a device: has `size`, `dtype`, `nbytes`, slices, and speaks
``__cuda_array_interface__``."""


class Event(ABC):
    """A point in a stream."""

    @abstractmethod
    def done(self) -> bool:
        """Return whether everything before it is through; never waits."""


class Stream(ABC):
    """Work that a device does in order."""

    @property
    @abstractmethod
    def pointer(self) -> int:
        """What CUDA's libraries call the stream."""

    @abstractmethod
    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy bytes from address to address; either may be of the device, or pinned memory of the host."""

    @abstractmethod
    def clear(self, target: int, nbytes: int) -> None:
        """Set bytes of the device to zero."""

    @abstractmethod
    def record(self) -> Event:
        """Return the point that the stream has been filled to."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Let nothing that is put on this stream from now on begin before the event, of whichever stream."""

    @abstractmethod
    def launch(self, kernel: str, num_blocks: int, arguments: tuple[Any, ...]) -> None:
        """Run a kernel of `kernels.cu`, such as ``fold_peers<float, Sum>``.

        Parameters
        ----------
        kernel : str
            The name of the instance.
        num_blocks : int
            Blocks of 256 threads.
        arguments : tuple
            Integers for addresses and counts of 64 bits; NumPy scalars of the width that the kernel declares for the rest.
        """


@dataclass(frozen=True)
class Identity:
    """What tells a GPU from all others, in whichever process.

    Attributes
    ----------
    name : str
        Such as ``NVIDIA H200``.
    uuid : str
        Of the GPU, or of the instance of a divided one: hexadecimal; empty if the driver tells none.
    pci_bus_id : str
        Such as ``0000:17:00.0``.
    """

    name: str
    uuid: str
    pci_bus_id: str


class Device(ABC):
    """The GPU of this rank.

    Attributes
    ----------
    index : int
        As CUDA counts in this process.
    """

    index: int

    @property
    @abstractmethod
    def array_module(self) -> ModuleType:
        """The namespace of its arrays: CuPy."""

    @abstractmethod
    def identity(self) -> Identity:
        """Return which GPU it is, whatever its index."""

    @abstractmethod
    def activate(self, stream: Stream | None = None) -> AbstractContextManager[None]:
        """Make this the device that the calling thread computes on, and the stream its current one; undone when left."""

    @abstractmethod
    def allocate(self, nbytes: int) -> DeviceArray:
        """Return memory of the device (uint8) in an allocation of its own, which other processes can map.

        Raises
        ------
        TransportError
            If the device has not so much left.
        """

    @abstractmethod
    def export(self, memory: DeviceArray) -> bytes:
        """Return what another process of this machine maps memory from `allocate` by.

        Raises
        ------
        TransportError
            If no other process can.
        """

    @abstractmethod
    def map(self, handle: bytes, nbytes: int) -> DeviceArray:
        """Return the memory (uint8) that another process has exported.

        Raises
        ------
        TransportError
            If this device cannot reach it.
        """

    @abstractmethod
    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        """Return memory of the host that the device copies to and from by itself."""

    @abstractmethod
    def put(self, target: DeviceArray, values: NDArray[Any]) -> None:
        """Write values of the host on the current stream."""

    @abstractmethod
    def get(self, source: DeviceArray) -> NDArray[Any]:
        """Return the values of an array, after what was put on the current stream before; the one verb that waits."""

    @abstractmethod
    def stream(self) -> Stream:
        """Return a new stream, which follows no other one unless told to."""

    @abstractmethod
    def current_stream(self) -> Stream:
        """Return the stream on which the caller computes."""


def address(array: DeviceArray) -> int:
    """Return where an array begins in the memory of the device; an empty one may be nowhere, at 0."""
    try:
        return int(array.data.ptr)  # CuPy: some microseconds less than the whole interface takes
    except (AttributeError, ValueError):  # NumPy's `data` refuses dtypes that are not its own
        return int(array.__cuda_array_interface__["data"][0])
