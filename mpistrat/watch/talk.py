"""Talk: messages between the watching threads of several hosts.

File law: nothing here waits. A stopped rank receives no messages, so the number of unreceived ones to each rank is limited.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Message", "Talk"]

Message = dict[str, Any]
"""A message: a JSON object."""

_TAG = 1
# messages to one rank that it has not received yet
_MOST_UNTAKEN = 4
_ON_ITS_WAY_SECONDS = 1.0


class Talk:
    """Sends and receives messages.

    Parameters
    ----------
    comm : Intracomm
        All ranks of the job; used for these messages only.
    places : sequence of str
        For each rank the identity of its record folder: ranks that share one need no messages.

    Attributes
    ----------
    own : list of int
        The ranks of this host.
    place : int
        The index of this host, in the order of their lowest ranks.
    others : list of list of int
        The ranks of each other host.
    backup_rank : int
        The rank, of another host if there is one, that regularly gets the state of this one, to report it if this host no
        longer answers.
    """

    def __init__(self, comm: MPI.Intracomm, places: Sequence[str]) -> None:
        self.comm, self.rank, self.size = comm, comm.Get_rank(), comm.Get_size()
        nodes: dict[str, list[int]] = {}
        for rank, place in enumerate(places):
            nodes.setdefault(place, []).append(rank)
        hosts = list(nodes.values())
        self.own = nodes.pop(places[self.rank])
        self.place = hosts.index(self.own)
        following = hosts[(self.place + 1) % len(hosts)]
        self.backup_rank = following[self.own.index(self.rank) % len(following)]
        self.others = list(nodes.values())
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
