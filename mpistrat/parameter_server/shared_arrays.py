"""SharedArrays: the arrays of a server, in memory that other ranks of its node read, each array under a sequence lock.

The memory is a file without a name, which readers open through /proc: it ends with the last process that maps it, however that
one ends, and is never in /dev/shm.

File law: only the server writes. It makes the number of a sequence lock odd before a change and even after it; a copy counts
only if the number was even, and the same, before and after it was taken. That needs stores and loads to become visible in
their order: x86 sees to it, but for the streaming stores of large copies, which a locked instruction keeps in order. On other
processors nothing is shared.
"""

from __future__ import annotations

import mmap
import os
import platform
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpistrat.arrays import Array

__all__ = ["ArrayAddress", "AttachedArray", "SequenceLock", "SharedArrays", "attach"]

_WORD = 8
_HEADER = 64  # bytes before the elements: the sequence number, and so that they begin with a cache line
_ATTEMPTS = 3  # to copy an array while it is being changed; then the server is asked, which does one thing after the other


class ArrayAddress(NamedTuple):
    """Where another process of the node finds an array.

    Attributes
    ----------
    path : str
        The file, as an open file of the server.
    device, inode : int
        The identity of the file.
    start, nbytes : int
        Where the array begins in it, and how long it is, with its header.
    """

    path: str
    device: int
    inode: int
    start: int
    nbytes: int


class SequenceLock:
    """Is held, as a context, by the server while it changes an array.

    Parameters
    ----------
    word : memoryview
        Of one number of 8 bytes: twice the number of changes, and one more during a change.
    """

    def __init__(self, word: memoryview) -> None:
        self._word, self._fence = word, threading.Lock()

    @property
    def version(self) -> int:
        """How often the array was changed."""
        number: int = self._word[0]
        return number // 2

    def __enter__(self) -> None:
        self._word[0] += 1
        with self._fence:  # a locked instruction: what follows becomes visible later
            pass

    def __exit__(self, *error: object) -> None:
        with self._fence:
            pass
        self._word[0] += 1


class SharedArrays:
    """Makes the arrays of a server.

    Parameters
    ----------
    num_ranks : int
        Of the job.

    Attributes
    ----------
    done : memoryview
        For each rank the number of its updates that have been made, for readers: before a rank reads, its own must be.
    """

    def __init__(self, num_ranks: int) -> None:
        self._file, self._end = _unnamed_file(), 0
        memory, _ = self._extended(num_ranks * _WORD)
        self.done = memoryview(memory)[: num_ranks * _WORD].cast("Q")

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Array, SequenceLock, ArrayAddress | None]:
        """Return a new array, its lock, and where other processes find it; None if they cannot."""
        nbytes = _HEADER + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        memory, start = self._extended(nbytes)
        array: Array = np.ndarray(shape, dtype, memory, _HEADER)
        return array, SequenceLock(memoryview(memory)[:_WORD].cast("Q")), self._address(start, nbytes)

    def _extended(self, nbytes: int) -> tuple[mmap.mmap, int]:
        """Return so much new memory, and where it begins in the file."""
        start = self._end
        if self._file < 0:
            return mmap.mmap(-1, nbytes), start
        self._end += -(-nbytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        os.ftruncate(self._file, self._end)
        return mmap.mmap(self._file, nbytes, offset=start), start

    def _address(self, start: int, nbytes: int) -> ArrayAddress | None:
        if self._file < 0:
            return None
        found = os.fstat(self._file)
        return ArrayAddress(f"/proc/{os.getpid()}/fd/{self._file}", found.st_dev, found.st_ino, start, nbytes)


class AttachedArray:
    """An array of a server of this node, as another rank reads it.

    Parameters
    ----------
    done : memoryview
        The numbers of updates that the server has made, in its memory.
    memory : mmap
        The array, with its header.
    """

    def __init__(self, done: memoryview, memory: mmap.mmap) -> None:
        self.done, self._memory = done, memory
        self._word = memoryview(memory)[:_WORD].cast("Q")
        self._elements = memoryview(memory)[_HEADER:]

    def read(self, start: int, target: Array) -> bool:
        """Copy the rows from `start` on into a C-contiguous array; return False if it was changed each time meanwhile."""
        if not target.nbytes:
            return True
        first = start * (target.nbytes // len(target)) if target.ndim else 0
        source = self._elements[first : first + target.nbytes]
        into = target.reshape(-1).view(np.uint8).data

        def copy() -> None:
            into[:] = source

        return self._copies_whole(copy)

    def take(self, indices: Array, target: Array) -> bool:
        """Copy single rows into a C-contiguous array, as `read` does."""
        rows: Array = np.ndarray((len(self._elements) // target[0].nbytes, *target.shape[1:]), target.dtype, self._elements)
        # the indices are known to fit; "raise" would copy once more
        return self._copies_whole(lambda: rows.take(indices, 0, target, "clip"))

    def _copies_whole(self, copy: Callable[[], object]) -> bool:
        """Copy between two updates; return False if there was one during each attempt."""
        word = self._word
        for _ in range(_ATTEMPTS):
            before = word[0]
            if before & 1:
                os.sched_yield()
                continue
            copy()
            if word[0] == before:
                return True
        return False


def attach(address: ArrayAddress, num_ranks: int) -> AttachedArray | None:
    """Return an array of another process of this node; None if its memory cannot be reached from here."""
    try:
        found = Path(address.path).stat()
        if (found.st_dev, found.st_ino) != (address.device, address.inode):
            return None  # in another container that is another process
        descriptor = os.open(address.path, os.O_RDONLY)
    except OSError:
        return None
    try:
        done = mmap.mmap(descriptor, num_ranks * _WORD, prot=mmap.PROT_READ)
        memory = mmap.mmap(descriptor, address.nbytes, prot=mmap.PROT_READ, offset=address.start)
    finally:
        os.close(descriptor)
    return AttachedArray(memoryview(done).cast("Q"), memory)


def _unnamed_file() -> int:
    """Return a new file without a name; -1 where memory cannot be shared."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return -1
    try:
        return os.memfd_create("mpistrat")
    except OSError:
        return -1
