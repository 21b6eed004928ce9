"""Cross-memory attach: every rank of a node reads every other one's, or none does, and says why."""

from types import SimpleNamespace

import numpy as np
import pytest

from mpistrat.device.abstract import address
from mpistrat.errors import UnavailableError
from mpistrat.launch import process
from mpistrat.settings import Snapshot
from mpistrat.transports import cma
from mpistrat.transports.cma import CrossMemoryAttach, IoVectors
from tests.launches import needs_ranks


def whole(array):
    return IoVectors(address(array), array.nbytes)


@pytest.fixture
def attached(group):
    attached = CrossMemoryAttach(group)
    if attached.refusal:
        pytest.skip(f"peers cannot be read: {attached.refusal}")
    return attached


def test_every_rank_reads_every_rank(attached, group):
    mine = np.arange(100_000) + group.rank * 10**6
    addresses = group.comm.allgather(address(mine))
    for rank in range(group.size):
        seen = np.zeros(1000, mine.dtype)
        attached.read(rank, IoVectors(addresses[rank] + 5000 * mine.itemsize, seen.nbytes), whole(seen))
        assert (seen == np.arange(5000, 6000) + rank * 10**6).all()
        attached.read(rank, IoVectors(addresses[rank], 0), whole(np.empty(0, mine.dtype)))
    group.comm.Barrier()


def test_every_rank_writes_to_every_rank(attached, group):
    mine = np.zeros(100 * group.size)
    addresses = group.comm.allgather(address(mine))
    group.comm.Barrier()
    for rank in range(group.size):
        values = np.full(50, group.rank + 1.0)
        attached.write(rank, IoVectors(addresses[rank] + 100 * group.rank * mine.itemsize, values.nbytes), whole(values))
    group.comm.Barrier()
    assert (
        mine.reshape(-1, 50) == [[rank + 1] * 50 if half == 0 else [0] * 50 for rank in range(group.size) for half in (0, 1)]
    ).all()


def test_many_ranges_are_read_in_few_calls(attached, group):
    # more than one call of the kernel takes
    mine = np.arange(6000) + group.rank * 10**6
    addresses = group.comm.allgather(address(mine))
    places = np.arange(0, 6000, 2)
    for rank in range(group.size):
        seen = np.zeros(3000, mine.dtype)
        sizes = np.full(3000, mine.itemsize)
        remote, into = IoVectors(addresses[rank] + places * 8, sizes), IoVectors(address(seen) + np.arange(3000) * 8, sizes)
        attached.read(rank, remote, into)
        assert (seen == places + rank * 10**6).all()
    group.comm.Barrier()


def test_memory_that_is_not_there_is_an_error_that_says_whose(attached, group):
    peer = (group.rank + 1) % group.size
    message = (
        rf"rank {group.rank}: reading 24 bytes of rank {peer} failed \(Bad address\); the rank has ended, "
        r"or its array is not in ordinary memory: MPISTRAT_PEER_MEMORY=0 goes through shared memory instead"
    )
    with pytest.raises(UnavailableError, match=message):
        attached.read(peer, IoVectors(4096, 24), whole(np.empty(3)))


@needs_ranks(2)
def test_one_rank_that_may_not_means_that_none_does(group):
    group.settings = Snapshot({"MPISTRAT_PEER_MEMORY": "0" if group.rank == 1 else "1"})
    refusal = CrossMemoryAttach(group).refusal
    assert refusal == "it is switched off by MPISTRAT_PEER_MEMORY, or the C library has no process_vm_readv"


@needs_ranks(2)
def test_a_kernel_that_refuses_is_quoted_on_every_rank(group, monkeypatch):
    def copy(self, direction, rank, remote, array):
        return "Operation not permitted" if group.rank == 1 and rank == 0 else ""

    monkeypatch.setattr(CrossMemoryAttach, "_copy", copy)
    refusal = CrossMemoryAttach(group).refusal
    assert "rank 0: Operation not permitted" in refusal
    assert refusal == group.comm.bcast(refusal)


@needs_ranks(2)
def test_only_descendants_of_the_launcher_are_admitted(group, monkeypatch):
    admitted = []
    library = SimpleNamespace(prctl=lambda option, pid, *_: admitted.append((option, pid.value)))
    cma._admit_ranks(library)
    [(option, launcher)] = admitted
    assert option == 0x59616D61
    assert launcher in {each.pid for each in process.ancestors()} - {1}
    assert len(set(group.comm.allgather(launcher))) == 1, "all ranks of a node have one launcher"
    monkeypatch.setattr(process, "_launcher", None)
    cma._admit_ranks(library)
    assert len(admitted) == 1, "without one nobody is admitted"
