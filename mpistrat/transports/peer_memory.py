"""PeerMemory: read and write the memory of another process of this node, where the kernel lets us (cross-memory attach).

One system call copies between a peer's array and ours: nobody has to put anything into shared memory first. A kernel or a
container may forbid it between processes that are not parent and child; so it is tried once, on all ranks together.
"""

from __future__ import annotations

import ctypes
import os
from itertools import chain
from typing import NoReturn

import numpy as np

from mpistrat import settings
from mpistrat.arrays import Array
from mpistrat.errors import UnavailableError
from mpistrat.groups.group import Group
from mpistrat.transports.base import address

__all__ = ["PeerMemory"]

# Yama lets siblings attach only to a process that has asked for it; the same call is made by MPI libraries
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)
_PROOF = 0x6D70697374726174
_READ, _WRITE = 0, 1


class _Span(ctypes.Structure):
    """``struct iovec``: an address and a length."""

    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class PeerMemory:
    """Reads from and writes to the ranks of a group. Making one is a collective call.

    Parameters
    ----------
    group : Group
        Ranks of one node.

    Attributes
    ----------
    refusal : str
        Why the memory of peers cannot be reached here; empty where it can.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        library = ctypes.CDLL(None, use_errno=True)
        self._move = [getattr(library, name, None) for name in ("process_vm_readv", "process_vm_writev")]
        for move in self._move:
            if move is not None:
                move.restype = ctypes.c_ssize_t
        if settings.PEER_MEMORY.read():
            library.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
        self._local, self._remote = _Span(), _Span()
        self._spans = ctypes.byref(self._local), ctypes.byref(self._remote)
        self._one, self._none = ctypes.c_ulong(1), ctypes.c_ulong(0)
        self.refusal = self._try()

    def read(self, rank: int, remote: int, into: Array) -> None:
        """Copy what lies at the address `remote` of a rank of the group into a contiguous array.

        Raises
        ------
        UnavailableError
            If the process is gone, or its memory there cannot be read.
        """
        problem = self._copy(_READ, rank, remote, into)
        if problem:
            self._fail(f"reading {into.nbytes} bytes of", rank, problem)

    def write(self, rank: int, remote: int, values: Array) -> None:
        """Copy a contiguous array to the address `remote` of a rank of the group.

        Raises
        ------
        UnavailableError
            If the process is gone, or its memory there cannot be written.
        """
        problem = self._copy(_WRITE, rank, remote, values)
        if problem:
            self._fail(f"writing {values.nbytes} bytes to", rank, problem)

    def _fail(self, act: str, rank: int, problem: str) -> NoReturn:
        ranks = self._group.ranks
        raise UnavailableError(
            f"rank {ranks[self._group.rank]}: {act} rank {ranks[rank]} failed ({problem}); the rank has ended, or its array is "
            "no ordinary memory: MPISTRAT_PEER_MEMORY=0 goes through shared memory instead"
        )

    def _copy(self, way: int, rank: int, remote: int, array: Array) -> str:
        """Copy, and return what went wrong or an empty text."""
        self._local.address, self._local.nbytes = address(array), array.nbytes
        self._remote.address, self._remote.nbytes = remote, array.nbytes
        move = self._move[way]
        assert move is not None, "the C library does not have it"
        local, remotes = self._spans
        count = move(self._pids[rank], local, self._one, remotes, self._one, self._none)
        if count == array.nbytes:
            return ""
        return os.strerror(ctypes.get_errno()) if count < 0 else f"only {count} bytes can be reached"

    def _try(self) -> str:
        """Read a number from every peer and write it back; return, on all ranks alike, why that fails somewhere."""
        proof = np.array([_PROOF], np.uint64)
        seen = np.empty_like(proof)
        is_wanted = settings.PEER_MEMORY.read() and None not in self._move
        facts = self._group.comm.allgather((os.getpid(), address(proof), is_wanted))
        self._pids = [ctypes.c_int(pid) for pid, _, _ in facts]
        if not all(wanted for _, _, wanted in facts):
            return "it is switched off by MPISTRAT_PEER_MEMORY, or the C library has no process_vm_readv"
        problems = []
        for rank, (_, remote, _) in enumerate(facts):
            seen[0] = 0
            problem = self._copy(_READ, rank, remote, seen)
            if not problem and seen[0] != _PROOF:
                problem = "another process answered"
            problem = problem or self._copy(_WRITE, rank, remote, seen)
            if problem:
                problems.append(f"rank {self._group.ranks[rank]}: {problem}")
        # nobody may drop its proof before all have read it
        found: list[list[str]] = self._group.comm.allgather(problems)
        return "; ".join(chain.from_iterable(found))
