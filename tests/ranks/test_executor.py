"""The executor: which transports it takes, how it runs a plan in its slots, and what a slow rank does to it."""

import time
from types import SimpleNamespace
from typing import ClassVar
from unittest.mock import Mock

import numpy as np
import pytest

from mpistrat.algorithms.planners import PLANNERS
from mpistrat.communicator.communicator import Communicator
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.errors import TransportError
from mpistrat.execution import compile as compiled
from mpistrat.execution.executor import SMALL_RAIL_BYTES, Executor
from mpistrat.execution.select import TRANSPORTS
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.reduction import ReduceOp
from mpistrat.settings import INTER_TRANSPORT, Snapshot
from mpistrat.topology.world import World
from mpistrat.transports import window
from mpistrat.transports.base import Operation, Part
from mpistrat.transports.mpi import MpiTransport
from mpistrat.transports.ring import MpiRingTransport
from mpistrat.transports.shared_memory import SharedMemoryTransport
from tests.launches import needs_ranks, on_ranks, up_to_ranks


@pytest.fixture
def uneven(comm, make_ops):
    """Give collectives on two uneven nodes, for what does not depend on the shape."""
    return make_ops(f"{comm.size - 1}+1" if comm.size > 1 else "1x1", ALGORITHM="hierarchical")


@pytest.fixture
def one_node(comm):
    hierarchy = Hierarchy(comm, World.from_shape(f"1x{comm.size}"))
    yield hierarchy
    hierarchy.close()


@pytest.mark.ranks(nodes=["1x2", "2+1", "2x2:cyclic", "3+1+2+2"])
@pytest.mark.parametrize("lone_slot_bytes", [1, 1 << 30], ids=["one slot", "two slots"])
def test_slots_are_taken_again_and_again_whoever_is_slow(comm, make_ops, world, monkeypatch, lone_slot_bytes):
    """A chunk that is alone has one slot, as long ones have, or two; slots of one plan lie across those of another."""
    monkeypatch.setattr(compiled, "LONE_SLOT_BYTES", lone_slot_bytes)
    total, size = sum(range(world.size + 1)), world.size
    for algorithm, chunk_bytes in (*((each, "0") for each in PLANNERS), ("hierarchical", "700")):
        ops = make_ops(world, STRICT="0", CHUNK_BYTES=chunk_bytes)
        # several arrays, across chunk boundaries, with padding at the end
        for counts in ([5, 0, 1000, 1, 77], [20_000, 1], [5, 0, 1000, 1, 77]):
            for turn in range(size + 2):
                if comm.rank == turn:
                    time.sleep(0.002)
                sources = [np.arange(count, dtype=np.float32) * (comm.rank + 1) + turn for count in counts]
                found = ops.all_reduce(ReduceOp.SUM, sources, CommunicationOptions(algorithm=algorithm))
                for target, count in zip(found, counts, strict=True):
                    assert (target == np.arange(count) * total + turn * size).all(), (algorithm, chunk_bytes, counts)


@needs_ranks(2)
def test_large_arrays_of_several_sizes_share_slots(uneven):
    for mib in (16, 10, 24):
        assert (uneven.all_reduce(ReduceOp.SUM, [np.ones(mib << 18, np.float32)])[0] == uneven.size).all()
        assert uneven._executor.generation == 1


class OfSomebodyElse(MpiTransport):
    """A transport that says nothing of what it compares."""

    name = "mine"
    disposed: ClassVar[list[str]] = []

    def dispose(self):
        self.disposed.append(self.group.name)


class ServesNoRail0(OfSomebodyElse):
    def __init__(self, group):
        super().__init__(group)
        if group.name == "rail 0":
            raise TransportError("planted")


@pytest.fixture
def asked(monkeypatch, hierarchy):
    """Ask for a transport that ``auto`` does not take, between nodes; give the groups on which it is disposed of."""
    monkeypatch.setitem(TRANSPORTS, OfSomebodyElse.name, OfSomebodyElse)
    monkeypatch.setitem(hierarchy.settings._values, INTER_TRANSPORT.name, OfSomebodyElse.name)
    monkeypatch.setattr(OfSomebodyElse, "disposed", [])
    return OfSomebodyElse.disposed


@up_to_ranks(4)
def test_a_transport_that_is_asked_for_between_nodes_moves_all_parts_until_it_is_disposed_of(hierarchy, asked):
    executor = Executor(hierarchy)
    for count in (1, SMALL_RAIL_BYTES):
        part = np.zeros(count, np.float32)
        assert {executor._rail(shard, part, ReduceOp.SUM).name for shard in hierarchy.rails} <= {"mine"}
    executor.close()
    assert asked == [f"rail {shard}" for shard in hierarchy.rails]


@up_to_ranks(4)
def test_a_rail_that_is_not_served_is_told_on_all_ranks_which_keep_nothing(hierarchy, asked, monkeypatch):
    if hierarchy.world.num_nodes == 1:
        pytest.skip("there are no rails")
    monkeypatch.setitem(TRANSPORTS, OfSomebodyElse.name, ServesNoRail0)
    dispose = SharedMemoryTransport.dispose
    monkeypatch.setattr(SharedMemoryTransport, "dispose", lambda self: asked.append("inside") or dispose(self))
    told = "rail 0 has no usable transport .mine: planted.: MPISTRAT_INTER_TRANSPORT is mine, and accepted are auto, mpi_ring, "
    with pytest.raises(TransportError, match=told):
        Executor(hierarchy)
    inside = ["inside"] if hierarchy.intra.size > 1 else []
    assert asked == [*(f"rail {shard}" for shard in hierarchy.rails if shard), *inside]


class LeavesTheSumToItsReader(MpiTransport):
    name = "mine"

    def all_reduce(self, buffer, op, channel=0):
        operation = super().all_reduce(buffer, op, channel)
        return Operation(operation.run, [Part(0, buffer.size, (buffer, np.zeros_like(buffer)))])


@needs_ranks(3)
@up_to_ranks(4)
def test_a_sum_that_is_not_in_the_buffer_between_nodes_names_transport_and_verb(uneven, monkeypatch):
    for shard, rail in uneven.hierarchy.rails.items():
        monkeypatch.setitem(uneven._executor.rails, shard, LeavesTheSumToItsReader(rail))
    with pytest.raises(TransportError, match="transport mine: all_reduce left its result outside the buffer, .*hierarchical"):
        uneven.all_reduce(ReduceOp.SUM, [np.ones(1 << 18, np.float32)])


def test_without_a_name_rings_move_what_is_large(uneven):
    for count, name in ((1000, "mpi"), (1 << 18, "mpi_ring")):
        path = uneven.explain([np.ones(count, np.float32)]).packs[0].transport
        assert (f"{name} between nodes" in path.split(", ")) == (uneven.hierarchy.world.num_nodes > 1)
        assert ("shared_memory inside the node" in path) == (uneven.hierarchy.intra.size > 1)


@needs_ranks(2)
@pytest.mark.parametrize("between", [OfSomebodyElse, MpiRingTransport])
def test_calls_over_a_transport_that_does_not_compare_them_are_compared_later(comm, make_ops, monkeypatch, between):
    monkeypatch.setitem(TRANSPORTS, "mpi_ring", between)
    communicator, options = make_ops(f"{comm.size}x1", STRICT="0"), CommunicationOptions(algorithm="hierarchical")
    assert (communicator.all_reduce(ReduceOp.SUM, np.ones(1 << 16, np.float32), options) == comm.size).all()
    assert bool(communicator.hierarchy.call.unconfirmed) == (between is OfSomebodyElse)
    assert communicator._executor.scatters == (between is MpiRingTransport)


def test_a_transport_that_does_not_serve_is_refused_only_if_named(one_node, monkeypatch):
    monkeypatch.setattr(SharedMemoryTransport, "probe", classmethod(lambda cls, group: "there is no window"))
    executor = Executor(one_node)
    assert executor.intra.name == "mpi"
    executor.close()
    one_node.settings = Snapshot({"MPISTRAT_INTRA_TRANSPORT": "shared_memory"})
    message = r"intra node0 has no usable transport \(shared_memory: there is no window\): "
    message += "MPISTRAT_INTRA_TRANSPORT is shared_memory, and accepted are auto, shared_memory, mpi$"
    with pytest.raises(TransportError, match=message):
        Executor(one_node)


@needs_ranks(2)
def test_what_a_probe_finds_on_one_rank_alone_counts_on_all(comm, hierarchy, monkeypatch):
    errors = TransportError("planted: not here"), KeyError("planted: a mistake")
    of_last_node = comm.size - 1 in hierarchy.intra.ranks
    for probe in (Mock(return_value="planted: not here"), *(Mock(side_effect=error) for error in errors)):
        for transport in (SharedMemoryTransport, MpiRingTransport):
            monkeypatch.setattr(transport, "probe", probe if comm.rank == comm.size - 1 else lambda group: "")
        executor = Executor(hierarchy)
        assert executor.intra.name == ("mpi" if of_last_node or hierarchy.intra.size == 1 else "shared_memory")
        assert {rail.name for rail in executor.rails.values()} <= {"mpi"}
        executor.close()


class Little:
    """Says that the shared memory of node 0 has room for so many bytes of each rank; below 0: for no more files."""

    def __init__(self, monkeypatch, most_bytes, is_node_0):
        self.most_bytes, self.is_node_0 = most_bytes, is_node_0
        monkeypatch.setattr(window, "os", SimpleNamespace(statvfs=self.statvfs))

    def statvfs(self, path):
        free = self.most_bytes if self.is_node_0 and self.most_bytes >= 0 else 2**40
        has_inodes = self.most_bytes >= 0 or not self.is_node_0
        return SimpleNamespace(f_bavail=free, f_frsize=1, f_files=10, f_favail=10 if has_inodes else 1)


def all_verbs(communicator, count):
    rank, size = communicator.rank, communicator.size
    mine = np.arange(count, dtype=np.float32) + rank
    total = np.arange(count, dtype=np.float32) * size + sum(range(size))
    for _ in range(2):  # the second time by the fast path
        assert np.array_equal(communicator.all_reduce("sum", mine), total)
        assert all(np.array_equal(each, total) for each in communicator.all_reduce("sum", [mine, mine.copy()]))
        assert np.array_equal(communicator.reduce_scatter("sum", mine), np.array_split(total, size)[rank])
    assert np.array_equal(communicator.broadcast(mine), np.arange(count))
    assert communicator.all_gather(mine[:2]).shape == (2 * size,)


@on_ranks(4)
# no files, no bytes, barriers, some calls
@pytest.mark.parametrize(("room", "strict"), [(-1, "0"), (0, "0"), (2**22, "0"), (2**22, "1"), (2**24, "1")])
def test_a_node_without_shared_memory_goes_on_over_mpi(comm, make_ops, monkeypatch, said, room, strict):
    monkeypatch.setattr("mpistrat.logger._warned", set())
    world = World.from_shape("3+1")
    Little(monkeypatch, room * max(world.local_sizes), comm.rank in world.nodes[0].ranks)
    communicator = make_ops(world, STRICT=strict)
    for count in (10, 300_000, 3_000_000, 10):
        all_verbs(communicator, count)
    flaw = ", which has no inodes left" if room < 0 else ""
    warned = said.getvalue().count(f"are free in /dev/shm{flaw}; remove what ended jobs have left there")
    lacks = len(world.nodes[0].ranks) > 1
    assert warned <= (comm.rank == 0 and lacks)
    assert warned == (comm.rank == 0 and lacks) or room > 0


@needs_ranks(2)
def test_the_transport_that_is_taken_in_the_place_of_a_faster_one_is_told(comm, make_ops, monkeypatch, said):
    monkeypatch.setattr("mpistrat.logger._warned", set())
    monkeypatch.setattr(MpiRingTransport, "probe", classmethod(lambda *_: "this network has no rings"))
    assert make_ops(f"{comm.size}x1").all_reduce("sum", np.ones(300_000))[0] == comm.size
    assert said.getvalue().count("mpi_ring: this network has no rings. These ranks (world) go on over mpi") == (comm.rank == 0)


@needs_ranks(2)
@up_to_ranks(4)  # more have room for the arrays
@pytest.mark.parametrize("room", [0, 2**22])
def test_shared_memory_that_is_asked_for_is_missed_on_all_ranks(comm, monkeypatch, room):
    monkeypatch.setenv("MPISTRAT_INTRA_TRANSPORT", "shared_memory")
    world = World.from_shape({2: "1x2", 3: "2+1", 4: "2x2"}.get(comm.size, f"1x{comm.size}"))
    little = Little(monkeypatch, room * max(world.local_sizes), comm.rank in world.nodes[0].ranks)

    def call():
        communicator = Communicator(Hierarchy(comm, world))
        little.most_bytes = 0  # there was room for barriers
        communicator.all_reduce("sum", [np.ones(3_000_000), np.ones(2)])

    with pytest.raises(TransportError, match="are free in /dev/shm|another node has too little"):
        call()
