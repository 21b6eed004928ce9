"""Pairwise exchange: every rank sends an array to each of its peers, in nonblocking messages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from mpistrat.arrays import Array, as_bytes
from mpistrat.groups.group import Group
from mpistrat.settings import MAX_MESSAGE_BYTES
from mpistrat.transports.mpi import until_complete
from mpistrat.transports.steps import Steps


class Pairwise:
    """Sends one array to each peer and receives one from each; bound once and run any number of times by all ranks.

    There is one C-contiguous array for each rank; this rank's own is ignored.
    """

    def __init__(self, group: Group, sends: Sequence[Array], receives: Sequence[Array], channel: int = 0) -> None:
        self._comm, self._call, self._channel = group.comm, group.call, channel
        limit = group.settings[MAX_MESSAGE_BYTES]
        # each rank begins with the next one, so that not all send to the same rank first
        peers = [(group.rank + distance) % group.size for distance in range(1, group.size)]
        self._sends = [(message, peer) for peer in peers for message in _messages(sends[peer], limit)]
        self._receives = [(message, peer) for peer in reversed(peers) for message in _messages(receives[peer], limit)]

    def run(self) -> Steps:
        """Return the steps of one exchange. A collective call."""
        comm, tag = self._comm, self._call.tag(self._channel)
        receives = (comm.Irecv(message, peer, tag) for message, peer in self._receives)
        sends = (comm.Isend(message, peer, tag) for message, peer in self._sends)
        yield from until_complete(chain(receives, sends), self)


def _messages(array: Array, limit_bytes: int) -> list[list[Any]]:
    """Return the messages that carry an array, each of at most `limit_bytes`."""
    from mpi4py import MPI

    flat = as_bytes(array)
    starts = range(0, flat.size, limit_bytes)
    return [[flat[start : start + limit_bytes], min(limit_bytes, flat.size - start), MPI.BYTE] for start in starts]
