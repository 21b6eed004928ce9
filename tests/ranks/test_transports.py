"""Every transport passes the conformance kit on the groups it serves, the kit catches others; and memory that peers read."""

import time
from copy import copy
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat
from mpistrat.device.cuda import address
from mpistrat.errors import TransportError
from mpistrat.execution.select import TRANSPORTS
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.launch import process
from mpistrat.reduction import HALF_DTYPES, ReduceOp
from mpistrat.settings import INTER_TRANSPORT, Snapshot
from mpistrat.testing import transport_suite
from mpistrat.testing.transport_suite import DTYPES, check_transport, operations
from mpistrat.topology.world import World
from mpistrat.transports import cma, mpi, shared_memory
from mpistrat.transports.base import Operation, Part
from mpistrat.transports.cma import READ, WRITE, CrossMemoryAttach, IoVectors
from mpistrat.transports.mpi import MpiTransport, mpi_op
from mpistrat.transports.ring import MpiRingTransport
from mpistrat.transports.shared_memory import SharedMemoryTransport
from tests.launches import needs_ranks, up_to_ranks
from tests.ranks.test_all_reduce import expected, rows, same_bits


@up_to_ranks(4)
@pytest.mark.parametrize("name", TRANSPORTS)
def test_transports_pass_the_kit(group, name):
    assert check_transport(TRANSPORTS[name], group, between_nodes=name in INTER_TRANSPORT.choices) > 300


@up_to_ranks(8)
def test_shared_memory_passes_the_kit_on_every_node(hierarchy):
    skip_known(hierarchy.world)
    assert check_transport(SharedMemoryTransport, hierarchy.intra) > 300


@up_to_ranks(8)
def test_rings_pass_the_kit_on_every_rail(hierarchy):
    skip_known(hierarchy.world)
    for rail in hierarchy.rails.values():
        assert check_transport(MpiRingTransport, rail, between_nodes=True) > 300


def skip_known(world):
    """Skip groups that another test has."""
    if world.num_nodes in (1, world.size):
        pytest.skip("the group of all ranks has been through the kit")


# planted transports, each wrong in one way, caught by two and by three ranks


def caught(planted, group, message, between_nodes=False):
    with pytest.raises(AssertionError, match=message):
        check_transport(planted, group, between_nodes)


class ReducesTwice(SharedMemoryTransport):
    def reduce_scatter(self, buffer, bounds, op):
        once = super().reduce_scatter(buffer, bounds, op)
        return Operation(lambda: chain(once.run(), once.run()), once.parts)


class ReducesTooLittle(SharedMemoryTransport):
    def all_reduce(self, buffer, op, channel=0):
        operation = super().all_reduce(buffer, op, channel)
        return Operation(operation.run, [Part(part.start, part.stop, part.addends[:1]) for part in operation.parts])


class DoesNotFence(SharedMemoryTransport):
    def fence(self, mark):
        return iter(())


class DoesNotWait(SharedMemoryTransport):
    def __init__(self, group):
        super().__init__(group)
        self.window.wait = lambda word, least, ranks: iter(())
        self.window.others = []  # of a rank that has not come it finds no call


class ForgetsAPart(SharedMemoryTransport):
    def all_gather(self, buffer, bounds):
        operation = super().all_gather(buffer, bounds)
        return Operation(operation.run, operation.parts[:-1])


class SumsInAnOrderOfItsOwn(SharedMemoryTransport):
    def all_reduce(self, buffer, op, channel=0):
        operation = super().all_reduce(buffer, op, channel)
        addends = operation.parts[0].addends
        rotated = addends[self.group.rank :] + addends[: self.group.rank]
        return Operation(operation.run, [Part(0, buffer.size, rotated)])


class WritesTooMuch(MpiTransport):
    def all_gather(self, buffer, bounds):
        operation = super().all_gather(buffer, bounds)

        def run():
            address = buffer.__array_interface__["data"][0] + buffer.nbytes
            MPI.buffer.fromaddress(address, 1)[0] = 0
            return operation.run()

        return Operation(run, operation.parts)


class MixesChannels(MpiRingTransport):
    def all_reduce(self, buffer, op, channel=0):
        return super().all_reduce(buffer, op)


class ClaimsChannels(MpiTransport):
    has_channels = True


class LosesNan(MpiTransport):
    def all_reduce(self, buffer, op, channel=0):
        plain = {ReduceOp.MIN: MPI.MIN, ReduceOp.MAX: MPI.MAX} if buffer.dtype.kind == "f" else {}
        with patch.object(mpi, "mpi_op", lambda op, dtype: plain.get(op) or mpi_op(op, dtype)):
            return super().all_reduce(buffer, op)


class WorksOnce(MpiTransport):
    def all_reduce(self, buffer, op, channel=0):
        operation = super().all_reduce(buffer, op, channel)
        runs = iter([operation.run])
        return Operation(lambda: next(runs, lambda: iter(()))(), operation.parts)


class ForgetsTheCall(MpiRingTransport):
    def __init__(self, group):
        super().__init__(group)
        self.group = copy(group)
        self.group.call = SimpleNamespace(tag=lambda channel: channel)


class ReadsTheTagWhenBound(MpiRingTransport):
    def __init__(self, group):
        super().__init__(group)
        self.call = group.call

    def _bind(self, buffer, bounds, op, halves, channel=0):
        tag, self.group = self.call.tag(channel), copy(self.group)  # each ring has one of its own
        self.group.call = SimpleNamespace(tag=lambda channel: tag)
        return super()._bind(buffer, bounds, op, halves, channel)


class DoesNotCompare(SharedMemoryTransport):
    def __init__(self, group):
        super().__init__(group)
        self.window.others = []


class LeavesTheSumElsewhere(MpiTransport):
    def all_reduce(self, buffer, op, channel=0):
        elsewhere = np.empty_like(buffer)
        operation = super().all_reduce(elsewhere, op, channel)

        def run():
            elsewhere[...] = buffer
            yield from operation.run()

        return Operation(run, [Part(0, buffer.size, (elsewhere,))])


@needs_ranks(2)
@up_to_ranks(3)
def test_a_sum_that_is_not_in_the_buffer_is_caught_between_nodes(group):
    assert check_transport(LeavesTheSumElsewhere, group) > 300
    message = r"mpi: all_reduce\(67 x bool, MIN\), in the buffer itself, on rank \d of \d .*: element \d+ is "
    caught(LeavesTheSumElsewhere, group, message, between_nodes=True)


class SendsTooMuch(MpiTransport):
    def _split(self, buffer):
        return [buffer] if buffer.size else []


class AnswersNothing(MpiTransport):
    @classmethod
    def probe(cls, group):
        return None


SIZE, TOO_SOON = r"\(67 x bool, ", r"shared_memory: .* on rank \d of \d \(world\): element .* are wrong$"
OTHER_CALL = r"'calls_are_told_apart': .*all_reduce\(67 x int32, SUM\) on rank \d .*compares_calls is set, but ranks in diff"
PLANTED = {
    ReducesTwice: r"'every_dtype_and_operation': shared_memory: reduce.*\(67 x int8, (SUM|MEAN), .*\) on rank \d of \d ",
    ReducesTooLittle: rf"all_reduce{SIZE}MIN\) on rank \d of \d \(world\): element \d+ is True, expected False; \d+ of 67",
    ForgetsAPart: r"all_gather\(.*the parts do not cover each promised element once",
    WritesTooMuch: rf"all_gather{SIZE}SUM, bounds .*\) on rank \d .*: memory outside the buffer was written",
    MixesChannels: r"'channels_are_apart': mpi_ring: all_reduce\(\d+ x int32, SUM\) on rank .*: element \d+ is ",
    ClaimsChannels: r"'channels_are_apart': mpi: all_reduce\(\d+ x int32, SUM\) on rank .*: element \d+ is ",
    LosesNan: r"'nan_wins': mpi: all_reduce\(\d x float32, M(IN|AX)\) on rank \d .*: element \d is .*, expected nan",
    WorksOnce: r"'every_size_and_division': mpi: all_reduce\(67 x int32, SUM\)",
    SendsTooMuch: r"'messages_may_be_small': mpi: all_reduce\(67 x complex128, PROD\) on .* a message has 1072 bytes, and ",
    AnswersNothing: r"'the_group_is_served': mpi: probe on rank 0 .* returned None; an empty text was expected",
    **dict.fromkeys([ForgetsTheCall, ReadsTheTagWhenBound, DoesNotCompare], OTHER_CALL),
    **dict.fromkeys([DoesNotFence, DoesNotWait], TOO_SOON),
}


@needs_ranks(2)
@up_to_ranks(3)
@pytest.mark.parametrize("planted", PLANTED)
def test_a_wrong_transport_is_caught_on_every_rank(group, planted):
    caught(planted, group, PLANTED[planted])


@needs_ranks(2)
@up_to_ranks(2)
@pytest.mark.parametrize("spelled", [lambda array, _, kind: [array, kind], lambda *parts: parts])
def test_messages_are_measured_however_they_are_spelled(group, monkeypatch, spelled):
    monkeypatch.setattr(mpi, "as_message", lambda array: spelled(array, array.size, mpi.mpi_datatype(array.dtype)))
    assert check_transport(MpiTransport, group) > 300
    caught(SendsTooMuch, group, PLANTED[SendsTooMuch])
    assert transport_suite._message_bytes([np.zeros(9), ([1, 2], [4, 6]), MPI.DOUBLE]) == 24  # the last are displacements


@needs_ranks(3)
@up_to_ranks(3)
def test_different_bits_are_caught(group):
    caught(SumsInAnOrderOfItsOwn, group, r"'all_ranks_get_equal_bits': .* ranks got different bits")


class CannotBeMade(MpiTransport):
    def __init__(self, group):
        super().__init__(group)
        raise_on_rank_1(group)


class CannotBeDisposed(MpiTransport):
    def dispose(self):
        raise_on_rank_1(self.group)


class CannotBind(MpiTransport):
    def reduce_scatter(self, buffer, bounds, op):
        raise_on_rank_1(self.group)
        return super().reduce_scatter(buffer, bounds, op)


def raise_on_rank_1(group):
    if group.rank == 1:
        raise ValueError("planted")


@needs_ranks(2)
@up_to_ranks(3)
@pytest.mark.parametrize(
    ("planted", "where"),
    [
        (CannotBeMade, "'it_is_made': transport: a call"),
        (CannotBeDisposed, "'it_is_disposed': mpi: a call"),
        (CannotBind, r"'every_dtype_and_operation': mpi: reduce_scatter\(67 x bool, MIN, bounds .*\)"),
    ],
)
def test_what_one_rank_raises_is_told_to_all_that_wait_for_it(group, planted, where, monkeypatch):
    monkeypatch.setattr(transport_suite, "STUCK_SECONDS", 0.5)
    caught(planted, group, rf"^rule {where} on rank 1 of \d \(world\): Traceback[^$]*ValueError: planted\n$")


class Blocking(MpiTransport):
    """Combines in a call of MPI that returns when all ranks have come."""

    def all_reduce(self, buffer, op, channel=0):
        def run():
            self.group.comm.Allreduce(MPI.IN_PLACE, buffer, mpi_op(op, buffer.dtype))
            return iter(())

        return Operation(run, [Part(0, buffer.size, (buffer,))])


@needs_ranks(2)
@up_to_ranks(3)
def test_a_verb_that_blocks_is_caught(group, monkeypatch):
    monkeypatch.setattr(transport_suite, "BLOCKED_SECONDS", 0.05)
    caught(Blocking, group, r"'run_does_not_block': mpi: .*run\(\) blocked until rank 1 had entered it")


@needs_ranks(2)
def test_shared_memory_declines_ranks_of_several_machines(group, monkeypatch):
    apart = SimpleNamespace(Get_rank=lambda: 0, bcast=lambda rank: group.rank, Free=lambda: None)
    alone = SimpleNamespace(Split_type=lambda *_: apart, Get_rank=lambda: group.rank, allgather=group.comm.allgather)
    monkeypatch.setattr(group, "comm", alone)
    with pytest.raises(TransportError, match="the ranks of world do not share memory"):
        SharedMemoryTransport(group)


@pytest.mark.parametrize("lacks", ["space", "a folder on one rank"])
def test_shared_memory_that_a_rank_lacks_is_refused_on_every_rank(group, monkeypatch, lacks):
    transport = SharedMemoryTransport(group)
    needed, free = r"\S+ \w*B of shared memory are needed", r"\S+ \w*B are free in /dev/shm"
    if lacks != "space" and group.rank == 0:
        monkeypatch.setattr("os.statvfs", lambda _: Path("/nowhere").stat())  # a container without /dev/shm
        free += r", which cannot be used \(No such file.*\)"
    with pytest.raises(TransportError, match=rf"world: {needed}, {free}; remove .*enlarge it .*MPISTRAT_INTRA_TRANSPORT=mpi"):
        transport.allocate(2**50 if lacks == "space" else 64)
    monkeypatch.undo()
    transport.allocate(64)
    transport.close()


def test_memory_of_somebody_else_is_refused(group):
    transport = SharedMemoryTransport(group)
    transport.allocate(4096)
    with pytest.raises(AssertionError, match="the buffer does not lie in the arena"):
        transport.all_reduce(np.zeros(8), ReduceOp.SUM)
    with pytest.raises(AssertionError, match="allocate was called twice"):
        transport.allocate(4096)
    transport.close()


def test_operations_of_many_transports_do_not_use_up_mpi(group):
    # mpi4py allows 32 user-defined operations per process
    for _ in range(40):
        transport = MpiTransport(group)
        for dtype in (np.float32, np.float64, np.int8):
            buffer = np.array([group.rank, np.nan if np.dtype(dtype).kind == "f" else 3], dtype)
            for op in (ReduceOp.MIN, ReduceOp.SUM):
                transport.all_reduce(buffer, op)
    assert mpi_op(ReduceOp.MIN, np.dtype(np.float32)) == mpi_op(ReduceOp.MIN, np.dtype(np.float32))


def whole(array):
    return IoVectors(address(array), array.nbytes)


@pytest.fixture
def attached(group):
    attached = CrossMemoryAttach(group)
    if attached.refusal:
        pytest.skip(f"peers cannot be read: {attached.refusal}")
    return attached


def test_every_rank_reads_and_writes_every_rank_and_is_told_whose_memory_is_not_there(attached, group):
    mine = np.arange(100_000) + group.rank * 10**6
    addresses = group.comm.allgather(address(mine))
    for rank in range(group.size):
        seen = np.zeros(1000, mine.dtype)
        attached.copy(READ, rank, IoVectors(addresses[rank] + 5000 * mine.itemsize, seen.nbytes), whole(seen))
        assert (seen == np.arange(5000, 6000) + rank * 10**6).all()
        attached.copy(READ, rank, IoVectors(addresses[rank], 0), whole(np.empty(0, mine.dtype)))
    group.comm.Barrier()
    mine = np.zeros(100 * group.size)
    addresses = group.comm.allgather(address(mine))
    group.comm.Barrier()
    for rank in range(group.size):
        values = np.full(50, group.rank + 1.0)
        attached.copy(WRITE, rank, IoVectors(addresses[rank] + 100 * group.rank * mine.itemsize, values.nbytes), whole(values))
    group.comm.Barrier()
    assert (mine.reshape(-1, 2, 50) == np.arange(1, group.size + 1)[:, None, None] * [[[1], [0]]]).all()
    peer = (group.rank + 1) % group.size
    message = rf"rank {group.rank}: reading 24 bytes of rank {peer} failed \(Bad address\): "
    message += "an array is not in ordinary memory; set MPISTRAT_PEER_MEMORY=0"
    with pytest.raises(TransportError, match=message):
        attached.copy(READ, peer, IoVectors(4096, 24), whole(np.empty(3)))


def test_many_ranges_are_read_in_few_calls(attached, group):
    # more than one call of the kernel takes
    mine = np.arange(6000) + group.rank * 10**6
    addresses = group.comm.allgather(address(mine))
    places = np.arange(0, 6000, 2)
    for rank in range(group.size):
        seen = np.zeros(3000, mine.dtype)
        sizes = np.full(3000, mine.itemsize)
        remote, into = IoVectors(addresses[rank] + places * 8, sizes), IoVectors(address(seen) + np.arange(3000) * 8, sizes)
        attached.copy(READ, rank, remote, into)
        assert (seen == places + rank * 10**6).all()
    group.comm.Barrier()


@needs_ranks(2)
def test_a_kernel_that_refuses_is_quoted_and_one_rank_that_may_not_means_that_none_does(group, monkeypatch):
    def copy(self, direction, rank, remote, array):
        return "Operation not permitted" if group.rank == 1 and rank == 0 else ""

    monkeypatch.setattr(CrossMemoryAttach, "_copy", copy)
    refusal = CrossMemoryAttach(group).refusal
    assert "rank 0: Operation not permitted" in refusal
    assert refusal == group.comm.bcast(refusal)
    group.settings = Snapshot({"MPISTRAT_PEER_MEMORY": "0" if group.rank == 1 else "1"})
    refusal = CrossMemoryAttach(group).refusal
    assert refusal == "it is switched off by MPISTRAT_PEER_MEMORY"


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
    ops = mpistrat.Communicator(Hierarchy(comm, World.from_shape(f"1x{comm.size}")))
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
        options = mpistrat.experimental.CommunicationOptions(algorithm="hierarchical", **packs)
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
