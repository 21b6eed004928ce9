"""DeadlineBarrier: wait until every rank has entered a collective call, or find out which ranks are missing.

A rank enters by starting a nonblocking MPI collective, and polls in turn for its completion and for notices. When its deadline
passes it sends a notice to the others; ranks that have entered answer at once, so that after a short grace period all know who
has entered. If the collective has completed by then, all ranks have entered, though late. Otherwise all raise.

Invariant: a rank that finds a notice before it enters does not enter. So the collective cannot complete on some ranks after
others have given it up, which would leave the ranks out of step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import groupby

import numpy as np

from mpistrat.errors import CollectiveError, DeadlineExceededError, UnavailableError
from mpistrat.groups.group import PROBES, Group, keep_alive_for_peers
from mpistrat.lazy import MPI
from mpistrat.steps import WAITING, Steps
from mpistrat.text import ranks_text

Ranks = Callable[[], Collection[int]]
_NOTICE_TAG = 32_767  # the largest that every MPI accepts
_ABORT_TAG = _NOTICE_TAG - 1
SHORTEST_GRACE_SECONDS, LONGEST_GRACE_SECONDS = 0.2, 1.0

# kinds of notices: "my deadline has passed, and I have entered"; "I have entered", in answer to that; "I enter no further
# call", because a deadline has passed; the same, because a call has failed here
_OVERDUE, _HERE, _GONE, _FAILED = 1, 2, 3, 4
_SPINS = 64


class DeadlineBarrier:
    """A barrier of the ranks of a group, with a deadline; `nodes` are the names of the ranks' nodes, for errors."""

    def __init__(self, group: Group, nodes: Sequence[str]) -> None:
        self._any, self._new_status = MPI.ANY_SOURCE, MPI.Status
        self._group, self._nodes = group, nodes
        self._others = [rank for rank in range(group.size) if rank != group.rank]
        self._turn = 0
        # rank -> the turn of its last notice; for ranks that have given up also whether they had entered it
        self._overdue: dict[int, int] = {}
        self._here: dict[int, int] = {}
        self._gone: dict[int, tuple[int, bool]] = {}
        self._failed: set[int] = set()
        self._sent: list[MPI.Request] = []

    def steps(self, enter: Callable[[], MPI.Request], what: Callable[[], str], seconds: float, absent: Ranks) -> Steps:
        """Wait until all ranks have started the collective that `enter` starts. A collective call.

        If the deadline of a rank passes first, every rank that has entered raises a DeadlineExceededError, and so does a rank
        that tries to enter later. With 0 seconds this rank has none of its own: those of others hold all the same. `absent`
        returns which ranks are known not to be in this call; others that have not entered may be waiting for those.
        """
        self._turn += 1
        self.raise_if_given_up(what, self._turn, PROBES)
        request = enter()
        try:
            yield from self._wait(request, what, seconds, absent)
        except BaseException:
            keep_alive_for_peers(request)  # MPI may still write to its buffers
            raise

    def _wait(self, request: MPI.Request, what: Callable[[], str], seconds: float, absent: Ranks) -> Steps:
        test = request.Test
        for _ in range(_SPINS):  # before this rank lets go of its core
            if test():
                return
        deadline, grace_ends = time.monotonic() + seconds if seconds else math.inf, math.inf
        while not test():
            self._listen()
            if self._failed:  # a failed rank is not waited for, nor who else is missing
                raise self.given_up(what())
            now = time.monotonic()
            if grace_ends < math.inf:
                if now > grace_ends or (self._gone and not self._silent()):
                    raise self._not_all_entered(what, seconds, now > deadline, absent)
            elif now > deadline or self._gone or self._turn in self._here.values():
                self._tell(_OVERDUE if now > deadline else _HERE, entered=True)
                grace_ends = now + _grace(seconds)
            yield WAITING
        if grace_ends < math.inf and self._listen():
            if self._failed:
                raise self.given_up(what())
            raise self._not_all_entered(what, seconds, time.monotonic() > deadline, absent)

    def raise_if_given_up(self, what: Callable[[], str], turn: float = math.inf, probes: int = 1) -> None:
        """Raise a CollectiveError if other ranks do not wait any more for a call that this one begins, or ends.

        With several `probes` it finds all notices that were sent before.
        """
        for _ in range(probes - 1):
            self._listen()
        if self._listen() or any(other >= turn for other in self._here.values()):
            if self._failed:
                raise self.given_up(what(), has_entered=False)
            self._tell(_GONE, entered=False)
            raise self._too_late(what)

    def is_given_up(self) -> bool:
        """Return whether a rank has sent a notice that it enters no further call."""
        return self._listen()

    def give_up(self) -> None:
        """Send a notice to all that this rank enters no further call, because one has failed here."""
        self._tell(_FAILED, entered=True)

    def given_up(self, what: str, missing: Sequence[int] = (), has_entered: bool = True) -> CollectiveError:
        """Return the error of a call that another rank has given up, with the ranks that are known not to have entered."""
        if self._failed:
            self._tell(_FAILED, entered=has_entered)
            return UnavailableError(
                f"{self._where}: {what} cannot complete: {self._names(sorted(self._failed))} gave up because it failed there"
            )
        self._tell(_GONE, entered=True)
        return self._expired(what, self._given_up_by(self._gone), missing)

    def overdue(self, what: str, seconds: float, missing: Sequence[int] = ()) -> DeadlineExceededError:
        """Notify all ranks that this one gives up a call; return the error, with ranks that are missing or do not answer."""
        self._tell(_GONE, entered=True)
        end = f"did not end within {seconds:g} s"
        if missing:
            return self._expired(what, end, missing)
        grace_ends = time.monotonic() + _grace(seconds)
        while self._silent() and time.monotonic() < grace_ends:
            self._listen()
            time.sleep(0.001)
        silent = self._silent()
        found = f"no answer from {self._names(silent)}" if silent else "all ranks gave up together"
        return self._expired(what, f"{end}; all ranks had arrived, and then {found}")

    def _listen(self) -> bool:
        """Receive all notices that have arrived; return whether a rank has given up."""
        comm = self._group.comm
        # a message that is found is received by nobody else: the engine's thread may look here too
        while (message := comm.Improbe(self._any, _NOTICE_TAG)) is not None:
            notice, status = np.empty(3, np.int64), self._new_status()
            message.Recv(notice, status)
            source, (kind, turn, entered) = status.Get_source(), notice.tolist()
            if kind in (_GONE, _FAILED):
                self._gone[source] = turn, bool(entered)
                self._failed |= {source} if kind == _FAILED else set()
            else:
                self._here[source] = turn
                if kind == _OVERDUE:
                    self._overdue[source] = turn
        return bool(self._gone)

    def _tell(self, kind: int, entered: bool) -> None:
        # nobody waits for these messages, and the receiver may never receive them
        notice = np.array([kind, self._turn, entered], np.int64)
        self._sent += [self._group.comm.Isend(notice, rank, _NOTICE_TAG) for rank in self._others]

    def _silent(self) -> list[int]:
        """Return the ranks that have sent no notice of this turn."""
        return [rank for rank in self._others if self._here.get(rank) != self._turn and rank not in self._gone]

    def _missing(self) -> list[int]:
        """Return the ranks that have not entered, as far as is known."""
        late = [rank for rank, (turn, entered) in self._gone.items() if not entered or turn != self._turn]
        return sorted({*self._silent(), *late})

    def _not_all_entered(self, what: Callable[[], str], seconds: float, is_own: bool, absent: Ranks) -> DeadlineExceededError:
        """Notify all ranks that this one gives up, and return the error."""
        self._tell(_GONE, entered=True)
        known = absent()
        missing = [rank for rank in self._missing() if rank in known] or self._missing()
        overdue = [rank for rank, turn in self._overdue.items() if turn == self._turn] or list(self._gone)
        return self._expired(what(), f"did not end within {seconds:g} s" if is_own else self._given_up_by(overdue), missing)

    def _given_up_by(self, ranks: Iterable[int]) -> str:
        return f"was given up by {self._names(ranks)}, whose deadline had passed"

    def _expired(self, what: str, end: str, missing: Sequence[int] = ()) -> DeadlineExceededError:
        """Return the error of a call that has ended so, with the ranks that are known not to have entered."""
        absent = f"; not all ranks have arrived: missing {self._names(missing)}" if missing else ""
        return DeadlineExceededError(f"{self._where}: {what} {end}{absent}")

    def _too_late(self, what: Callable[[], str]) -> DeadlineExceededError:
        gave_up = [rank for rank, turn in self._here.items() if turn >= self._turn]
        gave_up += [rank for rank, (_, entered) in self._gone.items() if entered]
        names = self._names(sorted({*(gave_up or self._gone)}))
        return DeadlineExceededError(f"{self._where}: {what()} comes too late: {names} gave up waiting")

    @property
    def _where(self) -> str:
        return self._names([self._group.rank])

    def _names(self, ranks: Iterable[int]) -> str:
        """Return ``ranks 0-2 (node0), rank 3 (node1)``."""
        parts = groupby(sorted(ranks), key=lambda rank: self._nodes[rank])
        return ", ".join(f"{ranks_text([self._group.ranks[rank] for rank in members])} ({node})" for node, members in parts)


class AbortNotice:
    """Tells the other ranks, once at most, that this one has aborted work they enqueued together, which will not end.

    A watching thread probes for it, as does the program's own, so no thread receives it: the other one must find it too.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._sent: list[MPI.Request] = []

    def send(self) -> None:
        if not (self._sent or MPI.Is_finalized()):
            others = [rank for rank in range(self._group.size) if rank != self._group.rank]
            self._sent = [self._group.comm.Isend(np.empty(0, np.uint8), rank, _ABORT_TAG) for rank in others]

    def has_come(self) -> bool:
        """Return whether another rank has sent one."""
        return not MPI.Is_finalized() and self._group.comm.Iprobe(MPI.ANY_SOURCE, _ABORT_TAG)


def _grace(seconds: float) -> float:
    return min(max(seconds, SHORTEST_GRACE_SECONDS), LONGEST_GRACE_SECONDS) if seconds else LONGEST_GRACE_SECONDS
