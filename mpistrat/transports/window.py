"""NodeWindow: the shared memory of the ranks of a node, and their barrier in it.

There are two MPI shared windows. The control window lives as long as the object: for each rank counters, the digest (a hash) of
its current call, and slots for small arrays. The data window has one arena per rank; buffers of one collective lie at equal
offsets in all arenas.

Invariant: one counter of each rank counts the barriers it has entered, another the results it has released. A memory fence
between data and counter makes stores visible in order. At every barrier ranks compare the digests of their calls before one
reads what another has written.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat.arrays import Array
from mpistrat.errors import MpistratError, TransportError, UnavailableError
from mpistrat.groups.agreement import CallsDifferError, all_agree, gather_or_raise
from mpistrat.groups.group import Group
from mpistrat.lazy import MPI
from mpistrat.steps import WAITING, Steps
from mpistrat.text import format_bytes
from mpistrat.topology.discover import real_nodes
from mpistrat.transports.cma import CrossMemoryAttach

HEADER_BYTES = 256
ENTERED, CALL, FACTS, RELEASED, RESULT, LEFT = 0, 1, 4, 16, 24, 25
"""Offsets of a rank's control words, in units of 8 bytes: barriers entered; in the same cache line, for each of the last two
calls, its digest plus the number of the barrier, and two facts; results released; small results published; and, which is not
the rank's own, 1 plus the rank of a peer that has left a call in which others read its arrays, or 0."""
LEAST_SMALL_BYTES, MOST_SMALL_BYTES, MOST_READ_BYTES = 1 << 15, 1 << 19, 6 << 20
"""Bounds of the size of a slot for small arrays, and of what all ranks of a node read together: each reads the slots of all.

Beyond, MPI was faster with 7 and 8 ranks on two cores, and slots would take much memory with fewer."""
_PAIR_BYTES = 1 << 20
"""The size of a slot of two ranks: 1 MiB takes 67 us, and 140 by cross-memory attach. Cores that exchange cache lines slowly,
as on two chips, lose by it: 1 MiB takes 500 us there, and 4 MiB 2.3 ms, 0.5 by cross-memory attach, where quick ones would win
a fifth."""
SMALL_SLOTS, RESULT_SLOTS = 4, 2
"""Slots of each rank, used alternately: two for its addends, and from the second number on two for what it publishes."""
_CACHE_LINE_BYTES = 64
_MOST_BARRIERS = 1 << 16
"""The barriers of one call are closer together than this; several are in flight where its operations take turns."""
_open: list[MPI.Win] = []
"""The windows of this process, in the order of their creation, in which ranks agree on the windows that they share."""


def small_slot_bytes(num_ranks: int) -> int:
    """Return the bytes of a slot for small arrays, on a node of so many ranks: whole cache lines, so they are aligned."""
    share = MOST_READ_BYTES // num_ranks**2 // _CACHE_LINE_BYTES * _CACHE_LINE_BYTES
    return min(_PAIR_BYTES if num_ranks == 2 else MOST_SMALL_BYTES, max(LEAST_SMALL_BYTES, share))


def free_open_windows() -> None:
    """Free what windows are left when the programs of all ranks have ended. A collective call.

    Otherwise Open MPI's MPI_Finalize frees them in the order of their handles, which may differ between ranks. Freeing is a
    barrier, so ranks would wait for each other in different windows, for ever.
    """
    while _open:
        _free(_open[0])


def is_freed_by_mpi() -> bool:
    """Return whether MPI_Finalize would free them in the order of their creation: see `free_open_windows`."""
    handles = [window.py2f() for window in _open]
    return handles == sorted(handles)


def _free(window: MPI.Win) -> None:
    if window in _open:
        _open.remove(window)
        window.Unlock_all()
        window.Free()


class NodeWindow:
    """The shared memory of the ranks of a node. Making one is a collective call.

    For each rank there are control `words`, also without this one as `others`, `small` slots of `small_bytes` for small arrays,
    and an arena for data. `cma` accesses what is not shared.

    Raises TransportError on all ranks, if they are not on one node, or it has too little shared memory.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        if len(set(real_nodes(group.comm)[0])) > 1:
            raise TransportError(f"the ranks of {group.name} do not share memory")
        self._window: MPI.Win | None = None
        self.arenas: list[Array] = []
        self._is_backwards = False
        self.entered = 0
        self.small_bytes = nbytes = small_slot_bytes(group.size)
        self._control, memory = self._shared(HEADER_BYTES + SMALL_SLOTS * nbytes)
        memory[group.rank][:HEADER_BYTES] = bytes(HEADER_BYTES)
        self._control.Sync()
        group.comm.Barrier()
        self._control.Sync()
        self.words = [memoryview(buffer)[:HEADER_BYTES].cast("Q") for buffer in memory]
        self.others = [words for rank, words in enumerate(self.words) if rank != group.rank]
        self.own = self.words[group.rank]
        self.small = [
            [np.frombuffer(buffer, np.uint8)[HEADER_BYTES + slot * nbytes :][:nbytes] for slot in range(SMALL_SLOTS)]
            for buffer in memory
        ]
        # x86 does not reorder stores with stores, or loads with loads
        self.is_fenced = platform.machine() != "x86_64"
        self.fence_memory = self._control.Sync if self.is_fenced else lambda: None
        self.cma = CrossMemoryAttach(group)

    def allocate(self, nbytes: int) -> Array:
        """Return this rank's arena; every rank asks for the same size, once until `close`."""
        assert self._window is None, "allocate was called twice without close"
        self._window, memory = self._shared(nbytes)
        self.arenas = [np.frombuffer(buffer, np.uint8)[:nbytes] for buffer in memory]
        return self.arenas[self.group.rank]

    def close(self) -> None:
        """Free the arenas. A collective call."""
        if self._window is not None:
            self.arenas = []
            _free(self._window)
            self._window = None

    def dispose(self) -> None:
        """Free the control window too; nothing can be shared any more. A collective call."""
        self.close()
        self.words, self.others, self.small = [], [], []
        self.own = memoryview(bytes(HEADER_BYTES)).cast("Q")
        _free(self._control)

    def walk(self, starts: range) -> range:
        """Return `starts`, reversed every other time: the cache still holds what the last exchange used last."""
        self._is_backwards = not self._is_backwards
        return starts[::-1] if self._is_backwards else starts

    def _check_space(self, nbytes: int) -> None:
        """Raise on all ranks if the node has too little shared memory: writing to it would kill the process (SIGBUS)."""
        try:
            folder = os.statvfs("/dev/shm")
            free = folder.f_bavail * folder.f_frsize
            flaw = ", which has no inodes left" if folder.f_files > 0 and folder.f_favail < 2 else ""
        except OSError as error:
            free, flaw = 0, f", which cannot be used ({error.strerror})"
        needed = self.group.size * nbytes
        if not all_agree(self.group.comm, free >= needed and not flaw):
            raise TransportError(
                f"{self.group.name}: {format_bytes(needed)} of shared memory are needed, {format_bytes(free)} are free in "
                f"/dev/shm{flaw}; remove what ended jobs have left there, enlarge it (containers: --shm-size), lower "
                "MPISTRAT_CHUNK_BYTES, or set MPISTRAT_INTRA_TRANSPORT=mpi"
            )

    def barrier(self, entered: int = 0) -> Steps:
        """Wait until all ranks have entered a barrier, and compare the digests of their calls. A collective call.

        Enter it, unless this rank has, by `announce`, which returned its number. Raises CallsDifferError on all ranks, if their
        calls differ.
        """
        entered = entered or self.announce()
        yield from self.wait(ENTERED, entered, self.words)
        place = CALL + (entered & 1)
        stamp = self.own[place]
        for words in self.others:
            if words[place] != stamp and not _are_of_one_call(words[place], stamp):
                raise CallsDifferError([words[place] - entered for words in self.words])

    def announce(self) -> int:
        """Enter a barrier with the digest of the call; return the number of the barrier."""
        self.entered = entered = self.entered + 1
        if self.is_fenced:
            self.fence_memory()
        # two slots: a peer that is already in the next barrier must not overwrite what is compared in this one
        self.own[CALL + (entered & 1)] = self.group.call.digest + entered
        if self.is_fenced:
            self.fence_memory()
        self.own[ENTERED] = entered
        return entered

    def barrier_with(self, facts: Sequence[int], memory: Array | None = None) -> Steps:
        """Enter a `barrier` with two numbers for the peers, which `facts` returns, and bytes, which `shared` returns.

        If ranks pass memory, of at most `small_bytes`, they are on one node: between nodes results are published in its place.
        """
        turn = (self.entered + 1) & 1
        if memory is not None:
            self.small[self.group.rank][RESULT_SLOTS + turn][: memory.nbytes] = memory
        place = FACTS + 2 * turn
        for index, fact in enumerate(facts):
            self.own[place + index] = fact
        return self.barrier()

    def facts(self) -> list[list[int]]:
        """Return the numbers that each rank passed to the last `barrier_with`."""
        place = FACTS + 2 * (self.entered & 1)
        return [words[place : place + 2].tolist() for words in self.words]

    def shared(self, rank: int) -> Array:
        """Return the memory that a rank passed to the last `barrier_with`, valid until the next barrier."""
        return self.small[rank][RESULT_SLOTS + (self.entered & 1)]

    def missing(self) -> list[int]:
        """Return the ranks of the group that have not entered the barrier this rank is in."""
        return [rank for rank, words in enumerate(self.words) if words[ENTERED] < self.entered]

    def leave(self) -> None:
        """Tell the peers that an error lets this rank leave a call in which they read its arrays: these may change now."""
        for words in self.words:
            words[LEFT] = 1 + self.group.rank
        self.fence_memory()

    def has_no_result(self, what: str) -> UnavailableError:
        """Return the error of a call that a peer has left: see LEFT."""
        why = "where it raised an error, and may have changed its arrays before they were read"
        who = f"rank {self.group.ranks[self.own[LEFT] - 1]} has left it, {why}"
        return UnavailableError(f"{what} has no result: {who}; make a new strategy on all")

    def wait(self, word: int, least: int, ranks: Sequence[memoryview]) -> Steps:
        """Wait until a control word of some ranks, of which these are the words, is at least `least`."""
        for words in ranks:
            while words[word] < least:
                yield WAITING
        if self.is_fenced:
            self.fence_memory()

    def _shared(self, nbytes: int) -> tuple[MPI.Win, list[Any]]:
        """Return a window with `nbytes` of each rank, and the memory of all ranks."""
        assert nbytes > 0
        self._check_space(nbytes)
        info = MPI.Info.Create({"alloc_shared_noncontig": "true"})
        made: list[MPI.Win] = []
        try:
            gather_or_raise(self.group, lambda: made.append(MPI.Win.Allocate_shared(nbytes, 1, info, self.group.comm)))
        except MpistratError as error:  # some ranks may have the window, but it can be freed by all ranks only
            raise TransportError(f"{self.group.name}: MPI cannot allocate shared memory: {error}") from error
        finally:
            info.Free()
        [window] = made
        _open.append(window)
        window.Lock_all(MPI.MODE_NOCHECK)
        memory: list[Any] = [window.Shared_query(rank)[0] for rank in range(self.group.size)]
        return window, memory


def _are_of_one_call(one: int, other: int) -> bool:
    """Return whether two ranks wrote a slot in the same call: their numbers of barriers differ by a small even number."""
    return not (one - other) & 1 and abs(one - other) < _MOST_BARRIERS
