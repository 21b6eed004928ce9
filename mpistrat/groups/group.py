"""Group: a communicator that we own, with its name, the world ranks in it, and the call that is under way in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from mpistrat import settings
from mpistrat.text import ranks_text

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MOST_UNCONFIRMED", "Group", "PresentCall", "ranks_text"]

_CHANNELS = 32
_FIRST_TAG, _MOST_TAG = 1 << 15, 1 << 30  # smaller tags are those of single messages
_MULTIPLIER, _MASK = 0x9E3779B97F4A7C15, (1 << 62) - 1
MOST_UNCONFIRMED, _BYTES_PER_CALL = 64, 1 << 13


class PresentCall:
    """The collective call that is under way on the communicators of a hierarchy: one at a time.

    Attributes
    ----------
    word : int
        Describes it: see `groups.agreement.word_of`. Ranks compare it before one reads memory of another, and messages carry it
        in their tags, so that messages of different calls never meet.
    has_deadline : bool
        Whether nothing may wait for the other ranks in a call of MPI that blocks.
    drive : callable
        Goes through the steps of a wait, under the deadline of the call.
    confirm : callable
        Compares the words of those calls that MPI has carried out without a look at them, on all ranks. A collective call.
    """

    __slots__ = ("_history", "_span", "_unconfirmed", "confirm", "drive", "has_deadline", "word")

    def __init__(self) -> None:
        from mpi4py import MPI

        self.word = self._history = self._unconfirmed = 0
        self.has_deadline = False
        self.confirm: Callable[[int], None] = _confirm_nothing
        self.drive: Callable[[Iterator[bool]], None] = _go_through
        most = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 0
        self._span = (min(int(most), _MOST_TAG) - _FIRST_TAG) // _CHANNELS if settings.CHECK.read() else 0

    def tag(self, channel: int) -> int:
        """Return the tag of the call's messages on a channel, of which there are 32."""
        if self._span <= 0:  # MPISTRAT_CHECK is off, or MPI has the fewest tags that the standard allows
            return channel
        return _FIRST_TAG + (self.word >> 1) % self._span * _CHANNELS + channel

    def add_unconfirmed(self, nbytes: int) -> None:
        """Note that MPI has carried out this call with ranks of other nodes, whatever call they were in; confirm it in time.

        Comparing takes as long as a small call. Every 64 small calls, and more often after long ones, it adds 2 % at most.
        """
        self._history = (self._history * _MULTIPLIER + self.word) & _MASK
        self._unconfirmed += 1 + nbytes // _BYTES_PER_CALL
        if self._unconfirmed >= MOST_UNCONFIRMED:
            self.settle()

    @property
    def is_unconfirmed(self) -> bool:
        """Whether there are calls that have not been confirmed."""
        return self._unconfirmed > 0

    def settle(self) -> None:
        """Confirm what has not been confirmed yet. A collective call where there is something."""
        if self._unconfirmed:
            self._unconfirmed = 0
            self.confirm(self._history)


def _go_through(steps: Iterator[bool]) -> None:
    """Stand in where there is no deadline."""
    for _ in steps:
        os.sched_yield()


def _confirm_nothing(history: int) -> None:
    """Stand in where nobody compares."""


class Group:
    """Some ranks of the world and the communicator that joins them.

    Parameters
    ----------
    comm : MPI.Intracomm
        A communicator made for this group; the group owns it and frees it.
    name : str
        What errors call it: ``world``, ``intra node0``, ``rail 1``.
    ranks : tuple of int
        The world ranks, in the order of their rank in `comm`.
    call : PresentCall, optional
        What is under way; groups of one hierarchy share it.
    """

    def __init__(self, comm: MPI.Intracomm, name: str, ranks: tuple[int, ...], call: PresentCall | None = None) -> None:
        assert comm.Get_size() == len(ranks), f"group {name} has {comm.Get_size()} members, {len(ranks)} ranks were named"
        self.comm = comm
        self.name = name
        self.ranks = ranks
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self.call = PresentCall() if call is None else call

    def close(self) -> None:
        """Free the communicator. A collective call in this group; the group cannot be used afterwards."""
        self.comm.Free()

    def __repr__(self) -> str:
        return f"Group({self.name}, rank={self.rank}({self.size}))"
