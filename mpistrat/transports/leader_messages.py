"""LeaderMessages: small arrays exchanged between the leaders of all nodes, by MPI's persistent requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpistrat.arrays import Array
from mpistrat.groups.group import Group, PresentCall
from mpistrat.groups.left_memory import leave_to_peers

__all__ = ["LeaderMessages"]


class LeaderMessages:
    """Persistent requests, which start faster than new ones.

    Parameters
    ----------
    group : Group
        The leaders.
    call : PresentCall
        The call whose tag they carry.
    arrays : sequence of ndarray
        One for each leader, all of one size: this rank's own is sent, the others are received.

    Attributes
    ----------
    digest : int
        Of that call.
    tests : list of callable
        Each returns whether a request has completed.
    """

    def __init__(self, group: Group, call: PresentCall, arrays: Sequence[Array]) -> None:
        from mpi4py import MPI

        tag = call.tag(0)
        peers = [rank for rank in range(group.size) if rank != group.rank]
        self.digest, self._arrays = call.digest, arrays
        self._requests = [group.comm.Recv_init(_message(arrays[peer]), peer, tag) for peer in peers]
        self._requests += [group.comm.Send_init(_message(arrays[group.rank]), peer, tag) for peer in peers]
        self._start_all, self._is_finalized = MPI.Prequest.Startall, MPI.Is_finalized
        self.tests = [request.Test for request in self._requests]

    def start(self) -> None:
        """Start all requests."""
        self._start_all(self._requests)

    def give_up(self) -> None:
        """Keep the requests and arrays alive forever: a late peer may still write to them."""
        leave_to_peers(self)

    def __del__(self) -> None:
        if not self._is_finalized():
            for request in self._requests:
                request.Free()


def _message(array: Array) -> list[Any]:
    from mpi4py import MPI

    return [array, array.nbytes, MPI.BYTE]
