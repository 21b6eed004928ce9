"""Every rank sends an array to each of its peers, in messages that do not block: what several verbs are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat import settings
from mpistrat.arrays import Array
from mpistrat.groups.group import Group
from mpistrat.transports.steps import WAITING, Steps, leave_to_peers

__all__ = ["Pairwise"]


class Pairwise:
    """One array to, and one from, each peer; bound once and run any number of times, on all ranks together.

    Parameters
    ----------
    group : Group
        The ranks.
    sends, landings : sequence of ndarray
        What goes to and what comes from each rank, C-contiguous; the place of this rank is not looked at. Peers expect as many
        bytes as are sent to them.
    channel : int
        Exchanges on different channels may be under way together.
    """

    def __init__(self, group: Group, sends: Sequence[Array], landings: Sequence[Array], channel: int = 0) -> None:
        self._comm, self._call, self._channel = group.comm, group.call, channel
        limit = settings.MAX_MESSAGE_BYTES.read()
        # each rank begins with the next one, so that not all send to one rank at first
        peers = [(group.rank + distance) % group.size for distance in range(1, group.size)]
        self._sends = [(piece, peer) for peer in peers for piece in _pieces(sends[peer], limit)]
        self._landings = [(piece, peer) for peer in reversed(peers) for piece in _pieces(landings[peer], limit)]

    def run(self) -> Steps:
        """Return the steps of one exchange. A collective call."""
        comm, tag = self._comm, self._call.tag(self._channel)
        requests = [comm.Irecv(piece, peer, tag) for piece, peer in self._landings]
        requests += [comm.Isend(piece, peer, tag) for piece, peer in self._sends]
        try:
            for request in requests:
                while not request.Test():
                    yield WAITING
        except BaseException:
            leave_to_peers(requests)
            raise


def _pieces(array: Array, limit_bytes: int) -> list[list[Any]]:
    """Return messages that tile the array, each at most as long as a message may be."""
    from mpi4py import MPI

    flat = array.reshape(-1).view(np.uint8)
    starts = range(0, flat.size, limit_bytes)
    return [[flat[start : start + limit_bytes], min(limit_bytes, flat.size - start), MPI.BYTE] for start in starts]
