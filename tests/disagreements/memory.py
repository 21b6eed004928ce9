"""Memory in which each array stands between canaries: bytes that nobody may change.

It is a file, so that who runs the job can look at the canaries of a rank that hangs or died as well. What a call itself
allocates lies in the process's heap: there arrays that take part in nothing lie on both sides of it, if the allocator allows.
"""

import mmap
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

_TABLE, _BYTES = 1 << 16, 1 << 30  # of the table, and of the file, of which only what is touched exists
# Read as a number of any dtype it is neither so large that a sum with it gives the same again, nor one of a case's.
_CANARY = 0x41
_LEAST, _MOST = 4096, 4 << 20
_ALIGNMENT = 64


class Memory:
    """The guarded arrays of a rank."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(descriptor, _BYTES)
        self._map = mmap.mmap(descriptor, _BYTES)
        os.close(descriptor)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._table = np.frombuffer(self._map, np.int64, _TABLE // 8)
        self.reset()

    def reset(self) -> None:
        """Forget all arrays; the next ones lie where they lay."""
        self._table[0] = 0
        self._end = _TABLE

    def array(self, shape: int | Sequence[int], dtype: Any, misaligned: int = 0) -> np.ndarray:
        """Return an array between two canaries; its bytes are any."""
        kind = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64))
        nbytes = count * kind.itemsize
        guard = min(max(nbytes, _LEAST), _MOST)
        self._guard(self._end, guard + misaligned)
        start = self._end
        self._guard(start + nbytes, guard)
        self._end += -self._end % _ALIGNMENT
        return np.frombuffer(self._map, kind, count, start).reshape(shape)

    def seal(self, array: np.ndarray) -> None:
        """Declare that the bytes of an array made here must stay as they are."""
        start = array.__array_interface__["data"][0] - self._bytes.__array_interface__["data"][0]
        self._enter(1, start, array.nbytes, zlib.crc32(self._bytes[start : start + array.nbytes]))

    def _guard(self, start: int, nbytes: int) -> None:
        if start + nbytes > _BYTES:
            raise MemoryError("a case needs more guarded memory than there is")
        self._bytes[start : start + nbytes] = _CANARY
        self._enter(0, start, nbytes, 0)
        self._end = start + nbytes

    def _enter(self, kind: int, *row: int) -> None:
        number = int(self._table[0])
        self._table[1 + 4 * number : 5 + 4 * number] = (kind, *row)
        self._table[0] = number + 1  # last, so that whoever looks from outside sees whole rows


def changed(path: Path) -> list[str]:
    """Return what of a rank's guarded memory was changed, from outside of it, dead or alive."""
    if not path.exists():
        return []
    content = np.memmap(path, np.uint8, "r")
    table = content[:_TABLE].view(np.int64)
    found = []
    for kind, start, nbytes, checksum in table[1 : 1 + 4 * int(table[0])].reshape(-1, 4).tolist():
        part = content[start : start + nbytes]
        if kind == 0 and (part != _CANARY).any():
            places = np.flatnonzero(part != _CANARY)
            found.append(f"{len(places)} bytes of a canary of {nbytes}, the first at {places[0]}")
        if kind == 1 and zlib.crc32(part) != checksum:
            found.append(f"an operand of {nbytes} bytes")
    return found


class Neighbours:
    """Arrays of the heap that take part in nothing, with holes between them into which what is allocated next may fall."""

    def __init__(self, nbytes: int) -> None:
        size = max(nbytes, 64)
        # the allocator hands out memory of its own heap rather than of the kernel once as much was freed
        np.empty(size, np.uint8)
        arrays = [np.full(size, _CANARY, np.uint8) for _ in range(7)]
        self._kept = arrays[::2]

    def changed(self) -> list[str]:
        """Return which of them were changed."""
        counts = [int((array != _CANARY).sum()) for array in self._kept]
        return [f"{count} bytes of an array that takes part in nothing" for count in counts if count]
