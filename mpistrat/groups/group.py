"""Group: a communicator of this library, with its name, the world ranks in it, and the call that is under way in it."""

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
_FIRST_TAG, _MAX_TAG = 1 << 15, 1 << 30  # smaller tags are used for messages outside of calls
_MULTIPLIER, _MASK = 0x9E3779B97F4A7C15, (1 << 62) - 1
MOST_UNCONFIRMED, _BYTES_PER_CALL = 64, 1 << 13


class PresentCall:
    """The collective call that is under way on the communicators of a hierarchy: one at a time.

    Attributes
    ----------
    digest : int
        A hash of its text: see `groups.agreement.digest_of`. Ranks compare it before one reads memory of another, and messages
        carry it in their tags, so that messages of different calls are never matched.
    must_poll : bool
        Whether the call has a deadline, or was started: a blocking MPI call that waits for other ranks could not be given up.
    drive : callable
        Runs the steps of a wait to the end, under the deadline of the call.
    confirm : callable
        Compares the digests of calls that ran as MPI collectives without a comparison, on all ranks. A collective call.
    unconfirmed : int
        Calls since the first one that has not been confirmed; a large one counts as several. 0 if all are confirmed.
    """

    __slots__ = ("_history", "_span", "confirm", "digest", "drive", "must_poll", "unconfirmed")

    def __init__(self) -> None:
        from mpi4py import MPI

        self.digest = self._history = self.unconfirmed = 0
        self.must_poll = False
        self.confirm: Callable[[int], None] = _confirm_nothing
        self.drive: Callable[[Iterator[bool]], None] = _run_to_end
        tag_ub = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 0
        self._span = (min(int(tag_ub), _MAX_TAG) - _FIRST_TAG) // _CHANNELS if settings.CHECK.read() else 0

    def tag(self, channel: int) -> int:
        """Return the tag of the call's messages on a channel, of which there are 32."""
        if self._span <= 0:  # MPISTRAT_CHECK is off, or MPI has only the smallest range of tags that the standard allows
            return channel
        return _FIRST_TAG + (self.digest >> 1) % self._span * _CHANNELS + channel

    def add_unconfirmed(self, nbytes: int) -> None:
        """Record that this call ran as an MPI collective without comparing it with other nodes; compare some calls later.

        A comparison takes as long as a small call. One for 64 small calls, or for fewer large ones, adds 2 % at most.
        """
        self._history = (self._history * _MULTIPLIER + self.digest) & _MASK
        self.unconfirmed += nbytes // _BYTES_PER_CALL + (not self.unconfirmed)
        if self.unconfirmed >= MOST_UNCONFIRMED:
            self.settle()

    def count(self) -> None:
        """Count a call that begins while earlier ones are unconfirmed; confirm them if it is the last that may be."""
        if self.unconfirmed:
            self.unconfirmed += 1
            if self.unconfirmed >= MOST_UNCONFIRMED:
                self.settle()

    def settle(self) -> None:
        """Confirm the calls that have not been confirmed yet. A collective call if there are any."""
        if self.unconfirmed:
            self.unconfirmed = 0
            self.confirm(self._history)


def _run_to_end(steps: Iterator[bool]) -> None:
    """Run the steps of a wait without a deadline: the default of `PresentCall.drive`."""
    for _ in steps:
        os.sched_yield()


def _confirm_nothing(history: int) -> None:
    """Do nothing: the default of `PresentCall.confirm`, for calls that are not compared."""


class Group:
    """Some ranks of the world and the communicator that joins them.

    Parameters
    ----------
    comm : MPI.Intracomm
        A communicator made for this group; the group owns it and frees it.
    name : str
        The name in error messages: ``world``, ``intra node0``, ``rail 1``.
    ranks : tuple of int
        The world ranks, in the order of their rank in `comm`.
    call : PresentCall, optional
        The call that is under way; groups of one hierarchy share it.
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
