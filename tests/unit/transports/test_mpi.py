"""MPI's nonblocking collectives: what becomes of memory that MPI still works on."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpistrat.groups import group
from mpistrat.settings import MAX_MESSAGE_BYTES
from mpistrat.transports.mpi import MpiTransport, until_complete


def test_memory_is_kept_where_the_second_of_several_requests_cannot_be_started(monkeypatch):
    kept: list[object] = []
    monkeypatch.setattr(group, "_kept", kept)
    request, memory = object(), object()

    def requests():
        yield request
        raise OSError("no second one")

    with pytest.raises(OSError, match="no second one"):
        list(until_complete(requests(), memory))
    assert kept == [([request], memory)]


def test_what_peers_write_to_is_kept_where_a_message_to_them_cannot_be_started(monkeypatch):
    kept: list[Any] = []
    monkeypatch.setattr(group, "_kept", kept)

    def refuse(*arguments):
        raise OSError("no more messages")

    comm = SimpleNamespace(Irecv=lambda message, *_: message[0], Isend=refuse)
    call = SimpleNamespace(tag=lambda channel: 1)
    ranks: Any = SimpleNamespace(comm=comm, call=call, rank=0, size=2, settings={MAX_MESSAGE_BYTES: 1 << 20})
    received = np.zeros(3)
    with pytest.raises(OSError, match="no more messages"):
        list(MpiTransport(ranks).exchange([received, received], [received, received]))
    [(requests, _)] = kept
    assert [np.shares_memory(request, received) for request in requests] == [True]
