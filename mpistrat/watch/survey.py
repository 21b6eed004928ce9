"""Survey: collect the states of all ranks, from files on this host, and by messages from one rank of each other host."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mpistrat.text import ranks_by
from mpistrat.watch.record import Key
from mpistrat.watch.states import Neighbours, RankState, decode

if TYPE_CHECKING:
    from mpi4py import MPI

Message = dict[str, Any]
"""A message: a JSON object."""

_TAG = 1
# messages to one rank that it has not received yet
_MOST_UNTAKEN = 4
_ON_ITS_WAY_SECONDS = 1.0
# seconds after which more ranks of a host that does not answer are asked: one first, then two, four, …
_NEXT_SECONDS = 0.3


class Survey:
    """One round of questions.

    It is made by whoever wants to know, begun and taken further by the watching thread, and `done` then.
    """

    _numbers = iter(range(1, 2**62))

    def __init__(self, wanted: Collection[Key], seconds: float) -> None:
        self.done = threading.Event()
        self.keys, self._seconds = {*wanted}, seconds
        self._found: dict[int, RankState] = {}
        self._asked = 0

    def begin(self, size: int, neighbours: Neighbours, messages: HostMessages | None) -> None:
        """Look at the ranks of this host."""
        self._size, self._messages, self.number = size, messages, next(self._numbers)
        found, self.keys = neighbours.states(self.keys, messages.own if messages else range(size))
        self._add(found)
        self._silent = list(messages.others) if messages else []
        self._ask_at = time.monotonic()
        self._ends = self._ask_at + self._seconds
        self._question: Message = {"ask": self.number, "wanted": sorted(self.keys)}

    def is_done(self) -> bool:
        """Return whether all hosts have answered or the time is up; ask more ranks until then."""
        now = time.monotonic()
        self._silent = [ranks for ranks in self._silent if not self._found.keys() & ranks]
        if self._silent and self._messages is not None and now >= self._ask_at:
            first, self._asked = self._asked, 2 * self._asked + 1
            self._ask_at = now + _NEXT_SECONDS
            for ranks in self._silent:
                self._messages.send(self._question, ranks[first : self._asked])
        return not self._silent or now > self._ends

    def take(self, answer: Message) -> None:
        """Add the answer of another host."""
        if answer["answer"] == self.number:
            self._add(decode(answer["states"]))

    def states(self) -> list[RankState]:
        """Return the state of each rank, in rank order."""
        return [self._found.get(rank) or RankState(rank) for rank in range(self._size)]

    def _add(self, states: Sequence[RankState]) -> None:
        self._found |= {state.rank: state for state in states if state.rank < self._size}


class HostMessages:
    """Messages between the watching threads of several hosts.

    `comm` has all ranks of the job, and is used for these messages only; `places` is for each rank the identity of its record
    folder: ranks that share one need no messages. Nothing here waits. A stopped rank receives no messages, so the number of
    unreceived ones to each rank is limited.
    """

    def __init__(self, comm: MPI.Intracomm, places: Sequence[str]) -> None:
        self.comm, self.rank, self.size = comm, comm.Get_rank(), comm.Get_size()
        nodes = ranks_by(enumerate(places))
        self.place = [*nodes].index(places[self.rank])  # of this host, in the order of their lowest ranks
        self.own = nodes.pop(places[self.rank])  # the ranks of this host
        self.others = list(nodes.values())  # those of each other host
        self._untaken: dict[int, list[tuple[MPI.Request, bytes]]] = {}
        self._arriving: list[tuple[MPI.Request, bytearray, int]] = []
        self._sent = -math.inf

    def send(self, message: Message, ranks: Iterable[int]) -> None:
        """Send a message to some ranks, except to those that do not receive."""
        from mpi4py import MPI

        data = json.dumps(message).encode()
        for rank in ranks:
            left = [(request, kept) for request, kept in self._untaken.get(rank, []) if not request.Test()]
            if len(left) < _MOST_UNTAKEN:
                self._sent = time.monotonic()
                left.append((self.comm.Isend([data, MPI.BYTE], rank, _TAG), data))
            self._untaken[rank] = left

    def is_sending(self) -> bool:
        """Return whether a recent message is still being sent: a long one needs progress at both ends."""
        if time.monotonic() > self._sent + _ON_ITS_WAY_SECONDS:
            return False
        return any(not request.Test() for kept in self._untaken.values() for request, _ in kept)

    def received(self) -> Iterator[tuple[int, Message]]:
        """Yield the messages that have arrived, with their senders."""
        from mpi4py import MPI

        status = MPI.Status()
        while (message := self.comm.Improbe(MPI.ANY_SOURCE, _TAG, status)) is not None:
            data = bytearray(status.Get_count(MPI.BYTE))
            self._arriving.append((message.Irecv([data, MPI.BYTE]), data, status.Get_source()))
        arriving, self._arriving = self._arriving, []
        for request, data, source in arriving:
            if request.Test():
                yield source, json.loads(bytes(data))
            else:
                self._arriving.append((request, data, source))
