"""AbortNotice: a rank tells the others that it has aborted what they enqueued together, and what therefore does not end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpistrat.groups.deadline_barrier import NOTICE_TAG
from mpistrat.groups.group import Group

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["AbortNotice"]

_TAG = NOTICE_TAG - 1


class AbortNotice:
    """A message to all other ranks, sent once at most.

    A thread beside the program's looks for it too, so it is never received: no thread can take it from another.

    Parameters
    ----------
    group : Group
        The ranks; nothing else may send messages with this tag on its communicator.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._sent: list[MPI.Request] = []

    def send(self) -> None:
        """Tell the others. Nobody waits for these messages."""
        if not self._sent:
            others = [rank for rank in range(self._group.size) if rank != self._group.rank]
            self._sent = [self._group.comm.Isend(np.empty(0, np.uint8), rank, _TAG) for rank in others]

    def has_come(self) -> bool:
        """Return whether another rank has sent one."""
        from mpi4py import MPI

        return not MPI.Is_finalized() and self._group.comm.Iprobe(MPI.ANY_SOURCE, _TAG)
