"""Every transport passes the conformance kit on the groups it serves, and the kit catches transports that do not."""

from copy import copy
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
from mpi4py import MPI

from mpistrat.errors import TransportError
from mpistrat.execution.select import TRANSPORTS
from mpistrat.reduction import ReduceOp
from mpistrat.settings import INTER_TRANSPORT
from mpistrat.testing import transport_suite
from mpistrat.testing.transport_suite import check_transport
from mpistrat.transports import mpi
from mpistrat.transports.base import Operation, Part
from mpistrat.transports.mpi import MpiTransport, mpi_op
from mpistrat.transports.ring import MpiRingTransport
from mpistrat.transports.shared_memory import SharedMemoryTransport
from tests.launches import needs_ranks, up_to_ranks


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
    def _fold(self, *arguments):
        once = super()._fold(*arguments)

        def run():
            yield from once()
            yield from once()

        return run


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
        self.window.compare = lambda entered: None  # of a rank that has not come it finds no call


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
        self.window.compared = []


@needs_ranks(2)
@up_to_ranks(3)
@pytest.mark.parametrize("planted", [ForgetsTheCall, ReadsTheTagWhenBound, DoesNotCompare])
def test_values_of_another_call_are_caught(group, planted):
    message = r"'calls_are_told_apart': .*all_reduce\(67 x int32, SUM\) on rank \d .*compares_calls is set, but ranks in diff"
    caught(planted, group, message)


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


class AnswersNothing(MpiTransport):
    @classmethod
    def probe(cls, group):
        return None


SIZE = r"\(67 x bool, "
PLANTED = {
    ReducesTwice: r"'every_dtype_and_operation': shared_memory: reduce.*\(67 x int8, (SUM|MEAN), .*\) on rank \d of \d ",
    ReducesTooLittle: rf"all_reduce{SIZE}MIN\) on rank \d of \d \(world\): element \d+ is True, expected False; \d+ of 67",
    ForgetsAPart: r"all_gather\(.*the parts do not cover each promised element once",
    WritesTooMuch: rf"all_gather{SIZE}SUM, bounds .*\) on rank \d .*: memory outside the buffer was written",
    MixesChannels: r"'channels_are_apart': mpi_ring: all_reduce\(\d+ x int32, SUM\) on rank .*: element \d+ is ",
    LosesNan: r"'nan_wins': mpi: all_reduce\(\d x float32, M(IN|AX)\) on rank \d .*: element \d is .*, expected nan",
    WorksOnce: r"'every_size_and_division': mpi: all_reduce\(67 x int32, SUM\)",
    AnswersNothing: r"'the_group_is_served': mpi: probe on rank 0 .* returned None; an empty text was expected",
}


@needs_ranks(2)
@up_to_ranks(3)
@pytest.mark.parametrize("planted", PLANTED)
def test_a_wrong_transport_is_caught_on_every_rank(group, planted):
    caught(planted, group, PLANTED[planted])


@needs_ranks(2)
@up_to_ranks(3)
@pytest.mark.parametrize("planted", [DoesNotFence, DoesNotWait])
def test_memory_written_too_soon_is_caught(group, planted):
    caught(planted, group, r"shared_memory: .* on rank \d of \d \(world\): element .* are wrong$")


@needs_ranks(3)
@up_to_ranks(3)
def test_different_bits_are_caught(group):
    caught(SumsInAnOrderOfItsOwn, group, r"'all_ranks_get_equal_bits': .* ranks got different bits")


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
