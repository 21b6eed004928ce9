"""A GPU and an NCCL that do nothing, for what a call costs the host: arrays are CuPy's own, over memory of the host."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from mpistrat.device import binding
from mpistrat.device.abstract import Allocator, Device, DeviceArray, Event, Identity, Stream
from mpistrat.device.cuda import in_blocks

POOL_BYTES = 1 << 28
_ALREADY = nullcontext()


class _Event(Event):
    def done(self) -> bool:
        return True


class _Stream(Stream):
    pointer = 0

    def copy(self, target: int, source: int, nbytes: int) -> None:
        pass

    def clear(self, target: int, nbytes: int) -> None:
        pass

    def record(self, event: Event | None = None) -> Event:
        return event or _Event()

    def wait(self, event: Event) -> None:
        pass

    def is_capturing(self) -> bool:
        return False

    def launch(self, kernel: str, num_blocks: int, arguments: tuple[Any, ...]) -> None:
        pass


def _quiet_arrays(cupy: ModuleType) -> Any:
    """Return a class of CuPy's arrays that copy nothing."""

    class Array(cupy.ndarray):
        def __setitem__(self, key: object, value: object) -> None:
            pass

        def copy(self, order: str = "C") -> Any:
            return self

        def astype(self, dtype: Any, order: str = "C", copy: bool = True) -> Any:
            return self

        def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
            return None if func is np.copyto else super().__array_function__(func, types, args, kwargs)

    return Array


class NullDevice(Device):
    """Of `bound`; its memory comes from one block of the host, from the beginning again when that is used up."""

    index = 0

    def __init__(self, num_ranks: int) -> None:
        import cupy

        self._host, self._at, self._num_ranks = np.zeros(POOL_BYTES, np.uint8), 0, num_ranks
        memory = cupy.cuda.UnownedMemory(self._host.ctypes.data, POOL_BYTES, self._host, 0)
        self._pool, self._array = cupy.cuda.MemoryPointer(memory, 0), _quiet_arrays(cupy)
        self._current = _Stream()
        self._module: Any = SimpleNamespace(ndarray=self._array, empty=self.empty, asarray=lambda array: array)

    def empty(self, shape: int | tuple[int, ...], dtype: Any = np.float32) -> DeviceArray:
        """Return an array."""
        extents = (shape,) if isinstance(shape, int) else shape
        nbytes = np.dtype(dtype).itemsize
        for extent in extents:
            nbytes *= extent
        return self._array(extents, dtype, self._alloc(nbytes))

    def maker(self, arrays: Sequence[DeviceArray]) -> Callable[[], list[DeviceArray]]:
        return in_blocks(arrays, self._alloc, self._array)

    def _alloc(self, nbytes: int) -> Any:
        start = 0 if self._at + nbytes > POOL_BYTES else self._at
        self._at = start + -(-nbytes // 512) * 512
        return self._pool + start

    @property
    def array_module(self) -> ModuleType:
        module: ModuleType = self._module
        return module

    def identity(self) -> Identity:
        return Identity("null", f"{os.getpid():032x}", "0")

    def activate(self, stream: Stream | None = None) -> AbstractContextManager[None]:
        return _ALREADY

    def allocate(self, nbytes: int, allocator: Allocator | None = None) -> DeviceArray:
        return self.empty(max(nbytes, 1), np.uint8)[:nbytes]

    def export(self, memory: DeviceArray) -> bytes:
        return b""

    def map(self, handle: bytes, nbytes: int) -> DeviceArray:
        return self.allocate(nbytes)

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        return np.empty(nbytes, np.uint8)

    def prepare(self, kernel: str) -> None:
        pass

    def put(self, target: DeviceArray, values: NDArray[Any]) -> None:
        pass

    def get(self, source: DeviceArray) -> NDArray[Any]:
        """Return what the smallest of NCCL's first sums should give: see ``NcclTransport._try_verbs``."""
        return np.full(source.shape, self._num_ranks**3, source.dtype)

    def stream(self) -> Stream:
        return _Stream()

    def current_stream(self) -> Stream:
        return self._current


class _Communicator:
    def _do_nothing(self, *_: object) -> None:
        pass

    allReduce = reduce = broadcast = reduceScatter = allGather = send = recv = _do_nothing  # noqa: N815 - NCCL's names
    check_async_error = abort = destroy = _do_nothing


@contextmanager
def bound(num_ranks: int) -> Iterator[NullDevice]:
    """Have this process compute on a null device, with an NCCL that joins any ranks."""
    from mpistrat.transports import nccl, nccl_bindings

    device = NullDevice(num_ranks)
    types = {f"NCCL_{name}": 0 for name in (*map(str.upper, nccl_bindings._TYPES), "SUM", "PROD", "MIN", "MAX")}
    library = SimpleNamespace(
        available=True,
        get_version=lambda: 23203,
        get_unique_id=lambda: 1,
        NcclCommunicator=lambda *_: _Communicator(),
        groupStart=lambda: None,
        groupEnd=lambda: None,
        **types,
    )
    binding.bind(device)
    try:
        with patch.multiple(nccl, find_binding=lambda: library, TRIAL_BYTES=()):
            yield device
    finally:
        binding.bind(None)
