"""AbortNotice: a message to the other ranks that this one has aborted work they enqueued together, which will not end."""

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

    A watching thread probes for it, as does the program's own, so no thread receives it: the other one must find it too.

    Parameters
    ----------
    group : Group
        The ranks; nothing else may send messages with this tag on its communicator.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._sent: list[MPI.Request] = []

    def send(self) -> None:
        """Send it to the others. Nobody waits for these messages."""
        if not self._sent:
            others = [rank for rank in range(self._group.size) if rank != self._group.rank]
            self._sent = [self._group.comm.Isend(np.empty(0, np.uint8), rank, _TAG) for rank in others]

    def has_come(self) -> bool:
        """Return whether another rank has sent one."""
        from mpi4py import MPI

        return not MPI.Is_finalized() and self._group.comm.Iprobe(MPI.ANY_SOURCE, _TAG)
