"""A GPU and an NCCL that do nothing, for what a call costs the host: arrays are CuPy's own, over memory of the host."""

import os
from contextlib import contextmanager, nullcontext
from math import prod
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np

from mpistrat.device import binding
from mpistrat.device.cuda import Device, Event, Identity, Stream, in_blocks

POOL_BYTES = 1 << 28


def _do_nothing(*_):
    pass


class _Event(Event):
    def done(self):
        return True


class _Stream(Stream):
    pointer = 0
    copy = clear = wait = launch = _do_nothing

    def record(self, event=None):
        return event or _Event(None)

    def is_capturing(self):
        return False


def _quiet_arrays(cupy):
    """Return a class of CuPy's arrays that copy nothing."""

    class Array(cupy.ndarray):
        def __setitem__(self, key, value):
            pass

        def copy(self, order="C"):
            return self

        def astype(self, dtype, order="C", copy=True):
            return self

        def __array_function__(self, func, types, args, kwargs):
            return None if func is np.copyto else super().__array_function__(func, types, args, kwargs)

    return Array


class NullDevice(Device):
    """Of `bound`; its memory comes from one block of the host, from the beginning again when that is used up."""

    index, array_module = 0, None
    is_exclusive = staticmethod(lambda: False)
    prepare = put = synchronize = _do_nothing

    def __init__(self, num_ranks):
        import cupy

        self._host, self._at, self._num_ranks = np.zeros(POOL_BYTES, np.uint8), 0, num_ranks
        memory = cupy.cuda.UnownedMemory(self._host.ctypes.data, POOL_BYTES, self._host, 0)
        self._pool, self._array = cupy.cuda.MemoryPointer(memory, 0), _quiet_arrays(cupy)
        self._current = _Stream(None)
        self.array_module = SimpleNamespace(ndarray=self._array, empty=self.empty, asarray=lambda array: array)

    def empty(self, shape, dtype=np.float32):
        extents = (shape,) if isinstance(shape, int) else shape
        return self._array(extents, dtype, self._alloc(prod(extents) * np.dtype(dtype).itemsize))

    def maker(self, arrays):
        return in_blocks(arrays, self._alloc, self._array)

    def _alloc(self, nbytes):
        start = 0 if self._at + nbytes > POOL_BYTES else self._at
        self._at = start + -(-nbytes // 512) * 512
        return self._pool + start

    def identity(self):
        return Identity("null", f"{os.getpid():032x}", "0")

    def activate(self, stream=None):
        return nullcontext()

    def allocate(self, nbytes, allocator=None):
        return self.empty(max(nbytes, 1), np.uint8)[:nbytes]

    def export(self, memory):
        return b""

    def map(self, handle, nbytes):
        return self.allocate(nbytes)

    def pinned(self, nbytes):
        return np.empty(nbytes, np.uint8)

    def get(self, source):
        """Return what the smallest of NCCL's first sums should give: see ``NcclTransport._try_verbs``."""
        return np.full(source.shape, self._num_ranks**3, source.dtype)

    def stream(self):
        return _Stream(None)

    def current_stream(self):
        return self._current


class _Communicator:
    allReduce = reduce = broadcast = reduceScatter = allGather = send = recv = _do_nothing  # noqa: N815 - NCCL's names
    check_async_error = abort = destroy = _do_nothing


@contextmanager
def bound(num_ranks):
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
