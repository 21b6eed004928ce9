"""CrossMemoryAttach: read and write the memory of another process of this node, by process_vm_readv and process_vm_writev.

One system call copies between a peer's array and ours, without a copy in shared memory. A kernel or a container may forbid it
between processes that are not parent and child, so all ranks try it once, together.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpistrat.device.cuda import address
from mpistrat.errors import TransportError, UnavailableError
from mpistrat.groups.group import Group
from mpistrat.launch import process
from mpistrat.lazy import MPI
from mpistrat.settings import PEER_MEMORY

# the Yama security module lets a process attach only to descendants, and to processes that have admitted it or an ancestor
_PR_SET_PTRACER = 0x59616D61
_PROOF = 0x6D70697374726174
READ, WRITE = 0, 1
_IOV_MAX, _IOVEC_BYTES = 1024, 16


def addresses(arrays: Sequence[NDArray[Any]]) -> list[int]:
    """Return the addresses of contiguous arrays, for each in a tenth of the time that `address` takes."""
    return list(map(MPI.Get_address, arrays))


class IoVectors:
    """An array of ``struct iovec``: ranges of memory that are copied by one system call."""

    __slots__ = ("_rows", "at", "count", "nbytes")

    def __init__(self, addresses: int | NDArray[Any], sizes_bytes: int | NDArray[Any]) -> None:
        self._rows: NDArray[np.uint64] = np.empty((np.size(sizes_bytes), 2), np.uint64)
        self._rows[:, 0], self._rows[:, 1] = addresses, sizes_bytes
        self._note()

    def part(self, first: int, last: int) -> IoVectors:
        """Return a view of elements [first, last), which moves with these."""
        part = IoVectors.__new__(IoVectors)
        part._rows = self._rows[first:last]
        part._note()
        return part

    def move(self, addresses: NDArray[np.uint64]) -> None:
        """Change the addresses."""
        self._rows[:, 0] = addresses

    def _note(self) -> None:
        self.at, self.count, self.nbytes = address(self._rows), len(self._rows), int(self._rows[:, 1].sum())


class CrossMemoryAttach:
    """Reads from and writes to the ranks of a group, unless there is a `refusal`. Making one is a collective call."""

    def __init__(self, group: Group) -> None:
        self._group = group
        library = ctypes.CDLL(None, use_errno=True)
        self._move = [getattr(library, name) for name in ("process_vm_readv", "process_vm_writev")]
        for move in self._move:
            move.restype = ctypes.c_ssize_t
            move.argtypes = [ctypes.c_int, *[ctypes.c_void_p, ctypes.c_ulong] * 2, ctypes.c_ulong]
        if group.settings[PEER_MEMORY]:
            _admit_ranks(library)
        self.refusal = self._try()

    def copy(self, direction: int, rank: int, remote: IoVectors, local: IoVectors) -> None:
        """READ from memory of a rank of the group, or WRITE to it; the ranges must have equal sizes.

        Raises UnavailableError if the process is gone, as all ranks find; TransportError if its memory cannot be reached.
        """
        if problem := self._copy(direction, rank, remote, local):
            act = ("reading {} bytes of rank {}", "writing {} bytes to rank {}")[direction]
            act = f"rank {self._group.ranks[self._group.rank]}: {act.format(local.nbytes, self._group.ranks[rank])} failed"
            if problem == os.strerror(errno.ESRCH):
                raise UnavailableError(f"{act} ({problem}): the rank has ended")
            raise TransportError(f"{act} ({problem}): an array is not in ordinary memory; set MPISTRAT_PEER_MEMORY=0")

    def _copy(self, direction: int, rank: int, remote: IoVectors, local: IoVectors) -> str:
        """Copy; return the error as text, or an empty text."""
        move, moved = self._move[direction], 0
        for first in range(0, local.count, _IOV_MAX):
            rows, skipped = min(local.count - first, _IOV_MAX), first * _IOVEC_BYTES
            count = move(self._pids[rank], local.at + skipped, rows, remote.at + skipped, rows, 0)
            if count < 0:
                return os.strerror(ctypes.get_errno())
            moved += count
        return "" if moved == local.nbytes else f"only {moved} bytes can be reached"

    def _try(self) -> str:
        """Read a number from every peer and write it back; return, on all ranks, why that failed on any rank."""
        proof = np.array([_PROOF], np.uint64)
        seen = np.empty_like(proof)
        here = IoVectors(address(seen), seen.nbytes)
        facts = self._group.comm.allgather((os.getpid(), address(proof), self._group.settings[PEER_MEMORY]))
        self._pids = [pid for pid, _, _ in facts]
        if not all(wanted for _, _, wanted in facts):
            return "it is switched off by MPISTRAT_PEER_MEMORY"
        problems = []
        for rank, (_, remote, _) in enumerate(facts):
            seen[0] = 0
            there = IoVectors(remote, proof.nbytes)
            problem = self._copy(READ, rank, there, here)
            if not problem and seen[0] != _PROOF:
                problem = "another process answered"
            problem = problem or self._copy(WRITE, rank, there, here)
            if problem:
                problems.append(f"rank {self._group.ranks[rank]}: {problem}")
        # no rank may free its proof before all have read it
        found: list[list[str]] = self._group.comm.allgather(problems)
        return "; ".join(chain.from_iterable(found))


def _admit_ranks(library: Any) -> None:
    """Let the descendants of this node's launcher attach to this process, and no other processes of the user.

    This overrides the MPI library, which may have admitted all processes.
    """
    launcher = process.watched_launcher()
    if launcher is not None:
        library.prctl(_PR_SET_PTRACER, ctypes.c_ulong(launcher.pid), 0, 0, 0)
