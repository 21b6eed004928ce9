"""Cross-memory attach: every rank of a node reads every other one's, or none does, and says why."""

import time
from types import SimpleNamespace

import numpy as np
import pytest

from mpistrat.communicator.communicator import Communicator
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.device.abstract import address
from mpistrat.errors import UnavailableError
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.launch import process
from mpistrat.reduction import HALF_DTYPES, ReduceOp
from mpistrat.settings import Snapshot
from mpistrat.testing.transport_suite import DTYPES, operations
from mpistrat.topology.world import World
from mpistrat.transports import cma, shared_memory
from mpistrat.transports.cma import CrossMemoryAttach, IoVectors
from tests.launches import needs_ranks, up_to_ranks
from tests.ranks.test_all_reduce import expected, rows, same_bits


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
    assert (mine.reshape(-1, 2, 50) == np.arange(1, group.size + 1)[:, None, None] * [[[1], [0]]]).all()


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
    message = rf"rank {group.rank}: reading 24 bytes of rank {peer} failed \(Bad address\); the rank has ended, "
    message += "or its array is not in ordinary memory: MPISTRAT_PEER_MEMORY=0 goes through shared memory instead"
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


@pytest.fixture
def exchanged(comm, monkeypatch):
    """Give a communicator of one node that combines small arrays by CMA too, in blocks of a KiB, and how many each time."""
    monkeypatch.setattr(shared_memory, "RECEIVE_BYTES", (comm.size - 1) << 10)
    counts, run = [], shared_memory.Exchange.run
    monkeypatch.setattr(shared_memory.Exchange, "run", lambda self: counts.append(len(self.arrays.sources)) or run(self))
    ops = Communicator(Hierarchy(comm, World.from_shape(f"1x{comm.size}")))
    if not ops._executor.intra.combines_arrays:
        pytest.skip(f"peers cannot be read: {ops._executor.intra.window.cma.refusal}")
    ops._executor.world.small.is_available = False
    yield ops, counts
    ops.close()


def drawn_shape(rng):
    """Return a shape: of a number, of nothing, or of less or more than a block."""
    few, some, many = (int(rng.integers(*bounds)) for bounds in ((1, 50), (1, 60), (300, 3000)))
    return [(), (0,), (3, 0), (few,), (7, some), (many,)][rng.integers(6)]


def laid_out(rng, arrays):
    """Return copies of arrays, and where their results go: new arrays, others, the same, or memory that overlaps with them."""
    layouts = [np.ascontiguousarray, np.asfortranarray, lambda array: np.repeat(array[..., None], 2, -1)[..., 0]]
    copies = [layouts[rng.integers(3)](array.copy()).reshape(array.shape) for array in arrays]
    way = rng.integers(4)
    if way == 0:
        return copies, None
    if way == 1:
        return copies, [np.empty(array.shape, array.dtype) for array in arrays]
    if way == 2:
        copies = [array.copy() for array in arrays]
        return copies, copies
    lines = [np.concatenate([array.reshape(-1), array.reshape(-1)[:1]]) for array in arrays]
    ends = [(line[: array.size], line[line.size - array.size :]) for line, array in zip(lines, arrays, strict=True)]
    pairs = [[end.reshape(array.shape) for end in both] for both, array in zip(ends, arrays, strict=True)]
    return [source for source, _ in pairs], [target for _, target in pairs]


@needs_ranks(2)
@up_to_ranks(4)
def test_lists_are_combined_where_they_lie_as_numpy_combines_them(exchanged, comm):
    ops, counts = exchanged
    for seed in range(40):
        rng, own = np.random.default_rng((seed, comm.size)), np.random.default_rng((seed, comm.rank))
        op = list(ReduceOp)[seed % 5]
        dtypes = [dtype for dtype in (*DTYPES, *HALF_DTYPES) if op in operations(dtype)]
        dtypes = [dtypes[index] for index in rng.integers(0, len(dtypes), rng.integers(1, 4))]
        shapes = [drawn_shape(rng) for _ in range(rng.integers(1, 14))]
        of_ranks = [
            rows(dtypes[rng.integers(len(dtypes))], op, int(np.prod(shape)), comm.size, seed + index)
            for index, shape in enumerate(shapes)
        ]
        packs = {"num_packs": [None, 1, 3][rng.integers(3)], "bytes_per_pack": [0, 3000][rng.integers(2)]}
        options = CommunicationOptions(algorithm="hierarchical", **packs)
        # ranks may differ in where their arrays lie, and where results go; the second time, calls are known
        for _ in range(2):
            mine = [given[comm.rank].reshape(shape) for given, shape in zip(of_ranks, shapes, strict=True)]
            sources, out = laid_out(own, mine)
            results = ops.all_reduce(op, sources, options, out)
            assert out is None or all(result is target for result, target in zip(results, out, strict=True))
            for result, given, shape in zip(results, of_ranks, shapes, strict=True):
                assert same_bits(result, expected(op, given).reshape(shape)), (seed, op, given.dtype, shape)
            if seed % comm.size == comm.rank:
                time.sleep(0.0005)
            for array in (*sources, *results):
                array.fill(0)  # what a rank does with its arrays afterwards is its own affair
    assert len(counts) > 40
    assert max(counts) > 5
