"""Ranks that join by NCCL, as many as no machine of the tests has: what one of them sees."""

import ctypes
import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from mpistrat.transports import nccl
from mpistrat.transports.nccl import NcclTransport
from tests.gpu.stand_in import StandInDevice


class _Alike:
    """NCCL's communicator of ranks that all hold the same; it adds one rank after the other."""

    def __init__(self, device, size):
        self._device, self._size, self.aborted = device, size, False

    def abort(self):
        self.aborted = True

    def allReduce(self, send, receive, count, kind, *more):  # noqa: N802 - NCCL's names
        self._put(more, lambda: np.copyto(_at(receive, count, kind), sum([_at(send, count, kind)] * self._size)))

    reduce = reduceScatter = allReduce  # noqa: N815

    def broadcast(self, send, receive, *_):
        assert send == receive

    def allGather(self, send, receive, count, kind, *more):  # noqa: N802
        self._put(more, lambda: np.copyto(_at(receive, self._size, kind), _at(send, 1, kind)))

    def _put(self, more, work):
        self._device.streams[more[-1]].put(work)


def _at(address, count, kind):
    return np.frombuffer((ctypes.c_char * (count * kind.itemsize)).from_address(address), kind)


@pytest.mark.parametrize("size", [2, 257])  # the cube of 257 is no float32
def test_the_first_sums_are_exact_for_any_number_of_ranks(size):
    device = StandInDevice()
    comm = SimpleNamespace(allgather=lambda mine: [mine] * size, bcast=lambda mine: mine, Get_rank=lambda: 0)
    group = SimpleNamespace(name="world", rank=0, size=size, ranks=tuple(range(size)), comm=comm)
    joined = _Alike(device, size)
    library = SimpleNamespace(
        NCCL_FLOAT32=np.dtype(np.float32),
        NCCL_INT64=np.dtype(np.int64),
        NCCL_SUM=0,
        get_version=lambda: 23007,
        get_unique_id=lambda: b"",
        NcclCommunicator=lambda *_, joined=joined: joined,
    )
    transport = NcclTransport(group, device, library)
    assert not joined.aborted
    kept = weakref.ref(joined)
    library.NcclCommunicator = None
    del joined, transport
    gc.collect()
    assert kept() is not None, "collected without its peers"
    nccl._undisposed.remove(kept())
    device.close()
