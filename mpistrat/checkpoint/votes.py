"""Votes: numbers of which all ranks learn the highest a step later, so that a step waits for none that is just behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpistrat.communicator.communicator import Communicator
from mpistrat.communicator.interface import BaseCommunicator
from mpistrat.groups.group import keep_alive_for_peers
from mpistrat.launch import abort
from mpistrat.launch.environment import detect
from mpistrat.steps import drive, until
from mpistrat.watch import watcher
from mpistrat.watch.recorder import watched

if TYPE_CHECKING:
    from mpi4py import MPI


class Votes:
    """Numbers of the ranks of a communicator, of which all learn the highest. Making one is a collective call."""

    def __init__(self, communicator: BaseCommunicator) -> None:
        view = detect()
        self.are_of_whole_job = view is None or not view.has_peers
        self._comm: MPI.Intracomm | None = None
        self._request: MPI.Request | None = None
        self._mine, self._highest = np.zeros(1, np.int64), np.zeros(1, np.int64)
        if isinstance(communicator, Communicator) and communicator.size > 1:
            from mpi4py import MPI

            self._maximum, self._guard, self._members = MPI.MAX, communicator._guard, communicator.hierarchy.members
            self._comm = communicator.hierarchy.world_group.comm.Dup()
            self.are_of_whole_job = communicator.size == MPI.COMM_WORLD.Get_size()
            abort.before_finalize(self.close)

    def exchange(self, number: int) -> int:
        """Return the highest number of the call before, 0 at first, and start to find that of this one; at once if alone."""
        if self._comm is None:
            return number
        highest = self._complete("a step")
        self._mine[0] = number
        self._request = self._comm.Iallreduce(self._mine, self._highest, self._maximum)
        return highest

    def close(self) -> None:
        """Complete what was started, free the communicator; both are kept where ranks are out of step. A collective call."""
        if self._comm is None:
            return
        if self._request is not None and self._guard.is_broken():
            keep_alive_for_peers(self)
        else:
            self._complete("its end")
            self._comm.Free()
        self._comm = None

    def _complete(self, what: str) -> int:
        """Wait for what was started, as long as all can still come to it, and return it; 0 if nothing was."""
        what = f"PreemptionCheckpointHandler: {what}"
        with watched(what, self._members):
            if self._request is None:
                return 0
            if not self._request.Test():
                watching, seconds = watcher.watcher(), self._guard.default_seconds
                check = None if watching is None else watching.raise_verdict
                drive(until(self._request.Test), lambda: what, seconds, check=check)
            self._request = None
            return int(self._highest[0])
