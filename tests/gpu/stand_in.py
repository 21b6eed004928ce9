"""A device made of host memory, whose streams run as late, and in as odd an order, as CUDA allows.

Nothing that is put on a stream happens before somebody polls an event; then a few pieces of work are done, on streams chosen
at random. What waits for no event that it should have waited for is therefore found to be wrong, not only on a bad day.
The arrays advertise ``__cuda_array_interface__`` and refuse every access from the host. As by CuPy's pool, memory that an array
leaves is given at once to the next one that is made on the same stream, whatever other streams still do with it. A stream takes
a limited number of pieces of work, and whoever puts one more on it waits, as for a launch.

What CUDA does not check, or punishes later, is an error: a launch of no blocks, which CuPy makes one, an export of memory that
shares a block with other memory, and memory that is freed while a peer has it mapped.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import random
import tempfile
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from mpistrat.device.cuda import Allocator, Device, Event, Identity, Stream
from mpistrat.errors import TransportError
from tests.gpu.on_host import HostKernels

WORK_PER_POLL = 3
MOST_BLOCKS = (1 << 31) - 1
SHARED_BLOCK_BYTES = 1 << 21
POOL_BLOCK_BYTES = 512
QUEUE_DEPTH, STUCK_SECONDS = 1024, 10.0
RUBBISH = 0xA5
UNFINISHED = object()
"""What work returns that must be done again later."""
_closed_with_work: list[StandInDevice] = []
"""Devices whose streams a test left busy: MPI may still write into their memory while a later test of this process runs."""


class StandInArray(np.ndarray):
    """Memory of the stand-in device: addresses and slices may be had, values may not."""

    def __array_ufunc__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("memory of the device was computed with on the host")

    def __array_function__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("memory of the device was given to NumPy")

    def __setitem__(self, *_: Any) -> None:
        raise TypeError("memory of the device was written by the host")

    def __getitem__(self, key: Any) -> Any:
        assert isinstance(key, slice), "memory of the device was read by the host"
        return super().__getitem__(key)

    def fill(self, *_: Any) -> None:
        raise TypeError("memory of the device was written by the host")

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": self.shape, "typestr": self.dtype.str, "data": (self.ctypes.data, False), "version": 3}


class _Event(Event):
    def __init__(self, device: StandInDevice, stream: _Stream, position: int) -> None:
        self._device, self.stream, self.position = device, stream, position

    def passed(self) -> bool:
        return self.stream.finished >= self.position

    def done(self) -> bool:
        assert self._device.is_active(), "an event was asked for by a thread that computes on another GPU"
        self._device.progress()
        return self.passed()


class _Stream(Stream):
    def __init__(self, device: StandInDevice) -> None:
        self._device = device
        self.waiting: deque[_Event | Callable[[], object]] = deque()
        self.filled = self.finished = 0
        self.graph: list[Callable[[], object]] | None = None

    @property
    def pointer(self) -> int:
        return self._device.streams.index(self)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        assert self._device.is_active(), "a copy by a thread that computes on another GPU"
        self.put(lambda: ctypes.memmove(target, source, nbytes))

    def clear(self, target: int, nbytes: int) -> None:
        assert self._device.is_active(), "memory is cleared by a thread that computes on another GPU"
        self.put(lambda: ctypes.memset(target, 0, nbytes))

    def record(self, event: Event | None = None) -> Event:
        assert self._device.is_active(), "an event of a thread that computes on another GPU"
        assert not self.is_capturing(), "an event of a collective was captured"
        if event is None:
            return _Event(self._device, self, self.filled)
        assert isinstance(event, _Event)
        event.stream, event.position = self, self.filled
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, _Event)
        assert self._device.is_active(), "a stream was told to wait by a thread that computes on another GPU"
        self.put(_Event(self._device, event.stream, event.position))  # which may be recorded again

    def is_capturing(self) -> bool:
        return self.graph is not None

    @contextmanager
    def capturing(self) -> Iterator[list[Callable[[], object]]]:
        """Capture what is put on it meanwhile, and give that."""
        self.graph = graph = []
        try:
            yield graph
        finally:
            self.graph = None

    def launch(self, kernel: str, num_blocks: int, arguments: tuple[Any, ...]) -> None:
        assert self._device.kernels is not None, "this device was given no kernels"
        assert kernel in self._device.prepared, f"{kernel} would be compiled while ranks wait"
        assert self._device.is_active(), "a launch by a thread that computes on another GPU"
        assert 0 < num_blocks <= MOST_BLOCKS, f"{kernel} is launched with {num_blocks} blocks"
        self.put(lambda: self._device.kernels.launch(kernel, num_blocks, arguments))

    def put(self, work: _Event | Callable[[], object]) -> None:
        if self.graph is not None:
            assert not isinstance(work, _Event), "a graph waits for what was enqueued before it was captured"
            self.graph.append(work)
            return
        ends = time.monotonic() + STUCK_SECONDS
        while len(self.waiting) >= self._device.queue_depth:
            assert time.monotonic() < ends, "a launch waits for room on a stream that gets on no further"
            self._device.progress()
        self.waiting.append(work)
        self.filled += 1

    def advance(self) -> bool:
        """Do the next piece of work, unless it waits; return whether anything was done."""
        if not self.waiting:
            return False
        work = self.waiting[0]
        if isinstance(work, _Event):
            if not work.passed():
                return False
        elif work() is UNFINISHED:
            return False
        self.waiting.popleft()
        self.finished += 1
        return True


def _unmap(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_UN)  # to close it is not enough: the mapping has a duplicate
    os.close(descriptor)


class StandInDevice(Device):
    """Streams that dawdle."""

    def __init__(self, seed: int = 0, index: int = 0) -> None:
        self._random, self.index = random.Random(seed), index
        self.other = SimpleNamespace(index=1 - index, keep=lambda memory: None)  # the GPU on which threads begin
        self.streams: list[_Stream] = []
        # CUDA frees no memory of a GPU that work under way still needs: it waits for the device
        self._memory: list[mmap.mmap | np.ndarray] = []
        self.errors: list[str] = []
        self._lock = threading.RLock()
        self._kept: list[np.ndarray] = []
        # of each stream, the blocks of each size that arrays have left
        self._pools: defaultdict[tuple[Stream, int], list[np.ndarray]] = defaultdict(list)
        self._computing = self.stream()
        self._current: dict[int, Stream] = {threading.get_ident(): self._computing}
        self._paths: dict[int, str] = {}
        self.kernels: HostKernels | None = None
        self.prepared: set[str] = set()
        self.most_bytes, self.queue_depth = 1 << 40, QUEUE_DEPTH
        self.held: Stream | None = None  # gets on no further
        self.namespace: ModuleType | None = None

    def identity(self) -> Identity:
        """Return one that no other process has."""
        return Identity("stand-in", f"{os.getpid():032x}", "0000:00:00.0")

    def is_exclusive(self) -> bool:
        return False

    def maker(self, arrays: Sequence[Any]) -> Callable[[], list[Any]]:
        alike = [(array.shape, array.dtype) for array in arrays]
        return lambda: [self.array_module.empty(shape, dtype) for shape, dtype in alike]

    def allocate(self, nbytes: int, allocator: Allocator | None = None) -> StandInArray:
        if nbytes > self.most_bytes:
            raise TransportError(f"planted: no {nbytes} bytes are left")
        if allocator is not None:
            assert self.is_active(), "another library allocates memory of GPU 0"
            start = allocator.allocate(nbytes)
            lent = np.frombuffer((ctypes.c_char * nbytes).from_address(start), np.uint8)
            weakref.finalize(lent, allocator.free, start).atexit = False
            return lent.view(StandInArray)
        descriptor, path = tempfile.mkstemp(prefix="stand-in-device-", dir="/dev/shm")
        os.ftruncate(descriptor, max(nbytes, 1))
        memory = self._mapped(descriptor, nbytes)
        os.close(descriptor)
        self._paths[memory.ctypes.data] = path
        weakref.finalize(memory, self._free, path).atexit = False
        return memory[:nbytes].view(StandInArray)

    def lend(self, nbytes: int) -> tuple[np.ndarray, bool]:
        """Return memory of the current stream's pool, and whether an array has left it: then work may be under way there."""
        blocks = -(-nbytes // POOL_BLOCK_BYTES)
        left = self._pools[self.current_stream(), blocks]
        is_used = bool(left)
        if not is_used:
            self._memory.append(np.full(blocks * POOL_BLOCK_BYTES, RUBBISH, np.uint8))
        block = left.pop() if is_used else self._memory[-1]
        lent = np.frombuffer(memoryview(block)[:nbytes], np.uint8) if nbytes else np.empty(0, np.uint8)
        weakref.finalize(lent, left.append, block).atexit = False
        return lent, is_used

    def export(self, memory: StandInArray) -> bytes:
        assert not memory.nbytes % SHARED_BLOCK_BYTES, "what else lies in the block of this memory would be shared too"
        return self._paths[memory.ctypes.data].encode()

    def map(self, handle: bytes, nbytes: int) -> StandInArray:
        descriptor = os.open(handle.decode(), os.O_RDWR)
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # until it is unmapped
        memory = self._mapped(descriptor, nbytes)
        weakref.finalize(memory, _unmap, descriptor).atexit = False
        return memory[:nbytes].view(StandInArray)

    def close(self) -> None:
        """Raise what went wrong where no exception could be seen."""
        if any(stream.waiting for stream in self.streams):
            _closed_with_work.append(self)
        for path in self._paths.values():
            Path(path).unlink()
        self._paths.clear()
        assert not self.errors, self.errors

    def pinned(self, nbytes: int) -> Any:
        self._memory.append(np.empty(nbytes, np.uint8))
        return self._memory[-1]

    def _mapped(self, descriptor: int, nbytes: int) -> np.ndarray:
        """Return memory of a file, which stays for whatever work still needs it; nobody has the array yet."""
        self._memory.append(mmap.mmap(descriptor, max(nbytes, 1)))
        return np.frombuffer(self._memory[-1], np.uint8)

    def _free(self, path: str) -> None:
        if path not in self._paths.values():
            return  # the device is closed
        descriptor = os.open(path, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.errors.append("memory was freed while a peer had it mapped")
        os.close(descriptor)

    def stream(self) -> Stream:
        self.streams.append(_Stream(self))
        return self.streams[-1]

    def current_stream(self) -> Stream:
        return self._current.get(threading.get_ident(), self._computing)

    def is_active(self) -> bool:
        """Return whether the calling thread computes on this device: the one that made it does, others must say so."""
        return threading.get_ident() in self._current

    @property
    def array_module(self) -> ModuleType:
        assert self.namespace is not None, "this device was given no namespace"
        return self.namespace

    @contextmanager
    def activate(self, stream: Stream | None = None) -> Iterator[None]:
        thread = threading.get_ident()
        before = self._current.get(thread)
        self._current[thread] = stream or before or self._computing
        try:
            yield
        finally:
            if before is None:
                del self._current[thread]
            else:
                self._current[thread] = before

    def progress(self) -> None:
        with self._lock:  # the engine polls while the program does
            for _ in range(self._random.randrange(WORK_PER_POLL + 1)):
                busy = [stream for stream in self.streams if stream.waiting and stream is not self.held]
                if busy:
                    self._random.choice(busy).advance()

    def synchronize(self) -> None:
        while any(stream.waiting for stream in self.streams):
            self.progress()

    def keep(self, memory: np.ndarray) -> None:
        """Keep the memory of an array for as long as any stream may need it."""
        with self._lock:
            if not any(stream.waiting for stream in self.streams):
                self._kept.clear()
            self._kept.append(memory)

    def prepare(self, kernel: str) -> None:
        assert self.is_active(), "a kernel is compiled by a thread that computes on another GPU"
        self.prepared.add(kernel)

    def put(self, target: StandInArray, values: np.ndarray) -> None:
        """Let the current stream write values, some time."""
        kept = np.ascontiguousarray(values)
        address, source = target.ctypes.data, kept.copy()
        assert source.nbytes == target.nbytes
        self.current_stream().put(lambda: ctypes.memmove(address, source.ctypes.data, source.nbytes))

    def get(self, source: StandInArray) -> np.ndarray:
        """Return what the current stream reads, after all that was put on it before."""
        if not isinstance(source, np.ndarray):
            return source.get()
        found = np.empty(source.shape, source.dtype)
        self.current_stream().copy(found.ctypes.data, source.ctypes.data, source.nbytes)
        event = self.current_stream().record()
        while not event.done():
            pass
        return found
