"""DeadlineBarrier: wait until every rank has come to a collective call, and find out which have not.

A rank enters by starting a collective of MPI that does not block, and looks by turns for its end and for notices. When its time
is up it tells the others; those who have come answer at once, so that after a short grace all know who is there. What has ended
by then has ended: all have come, if late. Otherwise all raise.

File law: a rank that finds a notice before it enters does not enter. The call of those who gave up can then never end behind
their back, and leave them out of step with ranks for which it did.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from mpistrat.errors import CollectiveError, DeadlineExceededError, UnavailableError
from mpistrat.groups.group import Group, ranks_text

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["LONGEST_GRACE_SECONDS", "NOTICE_TAG", "DeadlineBarrier"]

NOTICE_TAG = 32_767  # the largest that every MPI accepts
SHORTEST_GRACE_SECONDS, LONGEST_GRACE_SECONDS = 0.2, 1.0

# what a notice says: "my time is up, and I am here"; "another's time is up, and I am here"; "I come to no call any more", for
# that reason; the same, because a call has failed here
_OVERDUE, _HERE, _GONE, _FAILED = 1, 2, 3, 4
_WAITING = False

# a look makes MPI take in messages, and only a later one may show them
_LOOKS = 8


class DeadlineBarrier:
    """Meets the other ranks of a group, under a deadline.

    Parameters
    ----------
    group : Group
        The ranks; nothing else may send single messages with NOTICE_TAG on its communicator.
    nodes : sequence of str
        The name of each rank's node, for errors.
    """

    def __init__(self, group: Group, nodes: Sequence[str]) -> None:
        from mpi4py import MPI

        self._any, self._status = MPI.ANY_SOURCE, MPI.Status()
        self._group, self._nodes = group, nodes
        self._others = [rank for rank in range(group.size) if rank != group.rank]
        self._turn = 0
        # rank -> the turn of its last notice; for those that are gone also whether they had come to it
        self._overdue: dict[int, int] = {}
        self._here: dict[int, int] = {}
        self._gone: dict[int, tuple[int, bool]] = {}
        self._failed: set[int] = set()
        self._notice = np.empty(3, np.int64)
        self._sent: list[MPI.Request] = []

    def steps(
        self,
        enter: Callable[[], MPI.Request],
        what: Callable[[], str],
        seconds: float,
        absent: Callable[[], Collection[int]] = frozenset,
    ) -> Iterator[bool]:
        """Yield (False) until all ranks have entered. A collective call.

        Parameters
        ----------
        enter : callable
            Starts the collective that ends when all have started it.
        what : callable
            Says, for an error, what the ranks were to meet for.
        seconds : float
            Deadline in seconds from now; 0 means none of its own: the deadlines of others hold all the same.
        absent : callable
            Returns which ranks are known not to be in this call; others that have not entered may wait for those.

        Raises
        ------
        DeadlineExceededError
            On every rank that has come by then, if the deadline of one passes first; and on a rank that comes later.
        """
        self._turn += 1
        for _ in range(_LOOKS):
            self._listen()
        if self._gone or any(turn >= self._turn for turn in self._here.values()):
            self._tell(_GONE, came=False)
            raise self._too_late(what)
        request = enter()
        deadline, grace_ends = time.monotonic() + seconds if seconds else math.inf, math.inf
        while not request.Test():
            self._listen()
            now = time.monotonic()
            if grace_ends < math.inf:
                if now > grace_ends or (self._gone and not self._silent()):
                    self._tell(_GONE, came=True)
                    raise self._not_all_came(what, seconds, now > deadline, absent())
            elif now > deadline or self._gone or self._turn in self._here.values():
                self._tell(_OVERDUE if now > deadline else _HERE, came=True)
                grace_ends = now + _grace(seconds)
            yield _WAITING
        if grace_ends < math.inf and self._listen():
            self._tell(_GONE, came=True)
            raise self._not_all_came(what, seconds, time.monotonic() > deadline, absent())

    def is_given_up(self) -> bool:
        """Return whether a rank has told that it comes to no call any more."""
        return self._listen()

    def give_up(self) -> None:
        """Tell all that this rank comes to no call any more, because one has failed here."""
        self._tell(_FAILED, came=True)

    @property
    def who_gave_up(self) -> str:
        """The ranks that have told so, by name."""
        return self._names(sorted(self._gone))

    def given_up(self, what: str, missing: Sequence[int] = ()) -> CollectiveError:
        """Return the error of a call that another rank has given up, with the ranks that are known not to have come."""
        if self._failed:
            self._tell(_FAILED, came=True)
            return UnavailableError(
                f"{self._where}: {what} cannot end: {self._names(sorted(self._failed))} gave up, for it failed there"
            )
        self._tell(_GONE, came=True)
        late = f"; not all ranks have arrived: missing {self._names(missing)}" if missing else ""
        return DeadlineExceededError(f"{self._where}: {what} was given up by {self.who_gave_up}, whose time was up{late}")

    def overdue(self, what: str, seconds: float, missing: Sequence[int] = ()) -> DeadlineExceededError:
        """Tell all that this rank gives up a call; return the error, with who has not come, or else who does not answer."""
        self._tell(_GONE, came=True)
        if missing:
            return DeadlineExceededError(
                f"{self._where}: {what} did not end within {seconds:g} s; not all ranks have arrived: missing "
                f"{self._names(missing)}"
            )
        grace_ends = time.monotonic() + _grace(seconds)
        while self._silent() and time.monotonic() < grace_ends:
            self._listen()
            time.sleep(0.001)
        silent = self._silent()
        found = f"no answer from {self._names(silent)}" if silent else "all ranks gave up together"
        return DeadlineExceededError(
            f"{self._where}: {what} did not end within {seconds:g} s; all ranks had arrived, and then {found}"
        )

    def _listen(self) -> bool:
        """Take in all notices that have come; return whether a rank is gone."""
        comm = self._group.comm
        while comm.Iprobe(self._any, NOTICE_TAG, self._status):
            source = self._status.Get_source()
            comm.Recv(self._notice, source, NOTICE_TAG)
            kind, turn, came = (int(word) for word in self._notice)
            if kind in (_GONE, _FAILED):
                self._gone[source] = turn, bool(came)
                self._failed |= {source} if kind == _FAILED else set()
            else:
                self._here[source] = turn
                if kind == _OVERDUE:
                    self._overdue[source] = turn
        return bool(self._gone)

    def _tell(self, kind: int, came: bool) -> None:
        # whether the receiver ever takes it is its own affair: nobody waits for these messages
        notice = np.array([kind, self._turn, came], np.int64)
        self._sent += [self._group.comm.Isend(notice, rank, NOTICE_TAG) for rank in self._others]

    def _silent(self) -> list[int]:
        """Return the ranks that have sent no notice of this turn."""
        return [rank for rank in self._others if self._here.get(rank) != self._turn and rank not in self._gone]

    def _missing(self) -> list[int]:
        """Return the ranks that have not entered, as far as is known."""
        late = [rank for rank, (turn, came) in self._gone.items() if not came or turn != self._turn]
        return sorted({*self._silent(), *late})

    def _not_all_came(
        self, what: Callable[[], str], seconds: float, is_own: bool, absent: Collection[int]
    ) -> DeadlineExceededError:
        missing = [rank for rank in self._missing() if rank in absent] or self._missing()
        impatient = [rank for rank, turn in self._overdue.items() if turn == self._turn] or list(self._gone)
        end = f"did not end within {seconds:g} s" if is_own else f"was given up by {self._names(impatient)}, whose time was up"
        return DeadlineExceededError(
            f"{self._where}: {what()} {end}; not all ranks have arrived: missing {self._names(missing)}"
        )

    def _too_late(self, what: Callable[[], str]) -> DeadlineExceededError:
        gave_up = [rank for rank, turn in self._here.items() if turn >= self._turn]
        gave_up += [rank for rank, (_, came) in self._gone.items() if came]
        names = self._names(sorted({*(gave_up or self._gone)}))
        return DeadlineExceededError(f"{self._where}: {what()} comes too late: {names} gave up waiting")

    @property
    def _where(self) -> str:
        return self._names([self._group.rank])

    def _names(self, ranks: Sequence[int]) -> str:
        """Return ``ranks 0-2 (node0), rank 3 (node1)``."""
        parts = groupby(sorted(ranks), key=lambda rank: self._nodes[rank])
        return ", ".join(f"{ranks_text([self._group.ranks[rank] for rank in members])} ({node})" for node, members in parts)


def _grace(seconds: float) -> float:
    return min(max(seconds, SHORTEST_GRACE_SECONDS), LONGEST_GRACE_SECONDS) if seconds else LONGEST_GRACE_SECONDS
