"""NodeWindow: memory that the ranks of a node share, and in which they meet.

There are two MPI shared windows. The control window lives as long as the object: counters of each rank, the word that describes
its present call, and slots for small arrays. The data window holds one arena per rank, and what belongs together lies at equal
offsets in all arenas.

File law: a counter of each rank says how many meetings it has entered, a second one how many results it has released. A store
becomes visible in order because a memory fence stands between data and counter. At every meeting ranks compare the words of
their calls before one of them reads what another has written.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat import settings
from mpistrat.arrays import Array
from mpistrat.errors import TransportError
from mpistrat.groups.agreement import CallsDifferError
from mpistrat.groups.group import Group
from mpistrat.text import format_bytes
from mpistrat.transports.peer_memory import PeerMemory
from mpistrat.transports.steps import WAITING, Steps, address

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["CALL", "ENTERED", "LEAST_SMALL_BYTES", "RESULT", "NodeWindow", "window_refusal"]

HEADER_BYTES = 256
ENTERED, CALL, FACTS, RELEASED, GIVEN_UP, RESULT = 0, 1, 4, 16, 17, 24
"""Where a rank's control words lie, in words of 8 bytes: meetings entered; beside them, so that peers read them in one cache
line, the words of the last two calls, and three facts of each; results released; whether it has given up; small results
published."""
LEAST_SMALL_BYTES, MOST_SMALL_BYTES, ALL_SMALL_BYTES = 1 << 15, 1 << 18, 1 << 20
"""The longest array that has a slot in the control window: every rank reads those of all."""
SMALL_SLOTS = 4
"""Of each rank: two for what it adds, two for the results it publishes, each used by turns."""


def window_refusal(group: Group) -> str:
    """Return why the ranks of a group cannot share a window, or an empty text. A collective call."""
    from mpi4py import MPI

    node = group.comm.Split_type(MPI.COMM_TYPE_SHARED)
    together = node.Get_size() == group.size
    node.Free()
    # one rank's answer is everybody's, since a node is a property of all its ranks
    if not group.comm.allreduce(together, MPI.LAND):
        return f"the ranks of {group.name} do not share memory"
    return ""


class NodeWindow:
    """The shared memory of the ranks of a node. Making one is a collective call.

    Parameters
    ----------
    group : Group
        The ranks.

    Attributes
    ----------
    words : list of memoryview
        The control words of each rank.
    others, compared : list of memoryview
        Those of the peers, and those of them whose calls are compared: none where MPISTRAT_CHECK is off.
    small : list of list of ndarray
        The slots for small arrays of each rank.
    small_bytes : int
        How long each of them is.
    arenas : list of ndarray
        The data of each rank.
    peers : PeerMemory
        Reads and writes memory of the peers that is not shared.

    Raises
    ------
    TransportError
        On all ranks, if the node has too little shared memory.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self._window: MPI.Win | None = None
        self.arenas: list[Array] = []
        self._is_backwards = False
        self._turn = 0
        self.entered = 0
        self._released = 0
        self.small_bytes = nbytes = min(MOST_SMALL_BYTES, max(LEAST_SMALL_BYTES, ALL_SMALL_BYTES // group.size))
        self._control, memory = self._shared(HEADER_BYTES + SMALL_SLOTS * nbytes)
        memory[group.rank][:HEADER_BYTES] = bytes(HEADER_BYTES)
        self._control.Sync()
        group.comm.Barrier()
        self._control.Sync()
        self.words = [memoryview(buffer)[:HEADER_BYTES].cast("Q") for buffer in memory]
        self.others = [words for rank, words in enumerate(self.words) if rank != group.rank]
        self.compared = self.others if settings.CHECK.read() else []
        self.own = self.words[group.rank]
        self.small = [
            [np.frombuffer(buffer, np.uint8)[HEADER_BYTES + slot * nbytes :][:nbytes] for slot in range(SMALL_SLOTS)]
            for buffer in memory
        ]
        # x86 keeps the order of stores, and that of loads
        self.is_fenced = platform.machine() not in ("x86_64", "AMD64")
        self.fence_memory = self._control.Sync if self.is_fenced else _nothing
        self.peers = PeerMemory(group)

    def allocate(self, nbytes: int) -> Array:
        """Return this rank's arena; every rank asks for the same size, once until `close`."""
        assert self._window is None, "allocate was called twice without close"
        self._window, memory = self._shared(nbytes)
        self.arenas = [np.frombuffer(buffer, np.uint8)[:nbytes] for buffer in memory]
        return self.arenas[self.group.rank]

    def release(self) -> int:
        """Publish that this rank has read every result so far."""
        self._released += 1
        if self.is_fenced:
            self.fence_memory()
        self.own[RELEASED] = self._released
        return self._released

    def give_up(self) -> None:
        """Publish that this rank has left a call before its end, and enters no other one."""
        self.own[GIVEN_UP] = 1

    def has_given_up(self) -> bool:
        """Return whether a rank has."""
        return any(words[GIVEN_UP] for words in self.words)

    def fence(self, mark: int) -> Steps:
        """Wait until every peer has released as often as this rank had when it got `mark`."""
        return self._wait(RELEASED, mark)

    def close(self) -> None:
        """Free the arenas. A collective call."""
        if self._window is not None:
            self.arenas = []
            self._window.Unlock_all()
            self._window.Free()
            self._window = None

    def dispose(self) -> None:
        """Free the control window too; nothing can be shared any more. A collective call."""
        self.close()
        self.words, self.others, self.compared, self.small = [], [], [], []
        self._control.Unlock_all()
        self._control.Free()

    def walk(self, starts: range) -> range:
        """Return `starts`, backwards every other time: what the last exchange touched last is still in the cache."""
        self._is_backwards = not self._is_backwards
        return starts[::-1] if self._is_backwards else starts

    def next_turn(self) -> int:
        """Return how often this was asked before, which ranks do in step."""
        self._turn += 1
        return self._turn

    def _check_space(self, nbytes: int) -> None:
        """Refuse, on all ranks, what the node's shared memory cannot hold: touching it would kill the process."""
        from mpi4py import MPI

        folder = os.statvfs("/dev/shm")
        free = folder.f_bavail * folder.f_frsize
        needed = self.group.size * nbytes
        if self.group.comm.allreduce(free < needed, MPI.LOR):
            raise TransportError(
                f"{self.group.name}: {format_bytes(needed)} of shared memory are needed, {format_bytes(free)} are free in "
                "/dev/shm; enlarge it (containers: --shm-size), lower MPISTRAT_CHUNK_BYTES, or set MPISTRAT_INTRA_TRANSPORT=mpi"
            )

    def views(self, buffer: Array) -> list[Array]:
        """Return the memory at the offset of a buffer of this rank's arena in every arena."""
        arena = self.arenas[self.group.rank]
        offset = address(buffer) - address(arena)
        assert 0 <= offset <= arena.nbytes - buffer.nbytes, "the buffer does not lie in the arena of allocate"
        return [peer[offset : offset + buffer.nbytes].view(buffer.dtype) for peer in self.arenas]

    def meet(self) -> Steps:
        """Tell the peers that this rank has come here, at once, and return the steps that wait until all have.

        Raises
        ------
        CallsDifferError
            On all ranks, if they have come with different calls: before anything of a peer is read.
        """
        return self._meet(self.announce(self.group.call.word))

    def announce(self, word: int) -> int:
        """Tell the peers that this rank enters a meeting with a call; return the number of the meeting."""
        self.entered = entered = self.entered + 1
        # of two meetings in a row: a peer that has gone on to the next one must not change what is compared here
        self.own[CALL + (entered & 1)] = word
        if self.is_fenced:
            self.fence_memory()
        self.own[ENTERED] = entered
        return entered

    def meet_with(self, facts: Sequence[int]) -> Steps:
        """Meet the peers as `meet` does, and leave three numbers for them, which `facts` returns."""
        place = FACTS + 3 * ((self.entered + 1) & 1)
        for index, fact in enumerate(facts):
            self.own[place + index] = fact
        return self.meet()

    def facts(self) -> list[list[int]]:
        """Return what each rank has left for the others in the last meeting."""
        place = FACTS + 3 * (self.entered & 1)
        return [words[place : place + 3].tolist() for words in self.words]

    def compare(self, entered: int) -> None:
        """Compare the words of all ranks in a meeting that all have entered.

        Raises
        ------
        CallsDifferError
            On all ranks, if they differ.
        """
        if self.is_fenced:
            self.fence_memory()
        place = CALL + (entered & 1)
        word = self.own[place]
        for words in self.compared:
            if words[place] != word:
                raise CallsDifferError([words[place] for words in self.words])

    def missing(self) -> list[int]:
        """Return the ranks, counted over all nodes, that have not entered the meeting that this rank is in."""
        ranks = zip(self.group.ranks, self.words, strict=True)
        return [rank for rank, words in ranks if words[ENTERED] < self.entered]

    def _meet(self, entered: int) -> Steps:
        yield from self._wait(ENTERED, entered)
        self.compare(entered)

    def _wait(self, word: int, least: int) -> Steps:
        """Yield until that counter has reached `least` at every rank."""
        for words in self.words:
            while words[word] < least:
                yield WAITING
        if self.is_fenced:
            self.fence_memory()

    def _shared(self, nbytes: int) -> tuple[MPI.Win, list[Any]]:
        """Return a window with so many bytes of each rank, and the memory of all."""
        from mpi4py import MPI

        assert nbytes > 0, "there is nothing to share"
        self._check_space(nbytes)
        info = MPI.Info.Create({"alloc_shared_noncontig": "true"})
        window = MPI.Win.Allocate_shared(nbytes, 1, info, self.group.comm)
        info.Free()
        window.Lock_all(MPI.MODE_NOCHECK)
        memory: list[Any] = [window.Shared_query(rank)[0] for rank in range(self.group.size)]
        return window, memory


def _nothing() -> None:
    """Do what a memory fence does on a processor that needs none."""
