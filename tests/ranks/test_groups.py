"""Groups of ranks on communicators of their own, and the world that they follow from: real nodes, and virtual ones."""

import pytest
from mpi4py import MPI

from mpistrat.errors import TopologyError
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.groups.rendezvous import rendezvous
from mpistrat.topology.discover import discover
from mpistrat.topology.world import World
from tests.launches import needs_ranks, up_to_ranks
from tests.processes import until


@up_to_ranks(8)
def test_each_group_has_a_communicator_of_its_own(hierarchy, comm):
    """Nothing is sent on the one that was given."""
    communicators = [comm, *(group.comm for group in hierarchy.groups())]
    for index, one in enumerate(communicators):
        assert MPI.IDENT not in [MPI.Comm.Compare(one, other) for other in communicators[index + 1 :]]
    for group in hierarchy.groups():
        assert group.comm.allgather(comm.rank) == list(group.ranks)


def test_close_frees_every_communicator_and_may_be_done_often(comm, world):
    for _ in range(5):
        hierarchy = Hierarchy(comm, world)
        groups = hierarchy.groups()
        hierarchy.close()
        assert all(group.comm == MPI.COMM_NULL for group in groups)
    assert comm.allreduce(1) == comm.size


def test_all_ranks_know_them_by_one_number_and_they_know_which_ranks_of_the_job_they_are(comm):
    for _ in range(comm.rank):
        Hierarchy(MPI.COMM_SELF, World.from_shape("1x1")).close()
    made = [Hierarchy(comm, World.from_shape(f"1x{comm.size}")) for _ in range(2)]
    numbers = [hierarchy.number for hierarchy in made]
    assert comm.allgather(numbers) == [numbers] * comm.size
    assert numbers[0] != numbers[1]
    for hierarchy in made:
        hierarchy.close()
    half = comm.Split(comm.rank % 2, comm.rank)
    hierarchy = Hierarchy(half, World.from_shape(f"1x{half.size}"))
    assert hierarchy.job_ranks == tuple(range(comm.rank % 2, comm.size, 2))
    assert (hierarchy.members == "") == (comm.size == 1)
    hierarchy.close()
    half.Free()


def test_a_virtual_shape_is_taken_as_it_is_from_the_argument_or_the_variable_of_rank_0(comm, shape, world, monkeypatch):
    monkeypatch.setenv("MPISTRAT_VIRTUAL_NODES", shape if comm.rank == 0 else "7x7")
    assert discover(comm) == discover(comm, shape) == world
    assert discover(comm, f"1x{comm.size}") == World.from_shape(f"1x{comm.size}"), "an argument wins"


def test_real_nodes_are_the_ranks_that_share_memory_and_a_virtual_one_cannot_span_machines(comm, monkeypatch):
    monkeypatch.delenv("MPISTRAT_VIRTUAL_NODES", raising=False)
    world = discover(comm)
    node = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
    mine = world.place(comm.rank).node
    assert mine.ranks == tuple(node.allgather(comm.rank))
    assert mine.name == MPI.Get_processor_name()
    node.Free()
    assert comm.allgather(world) == [world] * comm.size
    if comm.size == 1:
        assert discover(comm, "1x1").num_nodes == 1
        return
    # each rank on a machine of its own
    apart = [*range(comm.size)], [*map(str, range(comm.size))]
    monkeypatch.setattr("mpistrat.topology.discover.real_nodes", lambda comm: apart)
    with pytest.raises(TopologyError, match=r"virtual node 0 of shape '1x\d' would hold ranks 0, 1.* several machines \(0, 1"):
        discover(comm, f"1x{comm.size}")
    assert discover(comm, f"{comm.size}x1").num_nodes == comm.size


def test_a_wrong_shape_is_an_error_on_every_rank(comm):
    for wrong, message in (
        ("2y2", r"node shape '2y2' is malformed; accepted are NODESxRANKS \(2x4\)"),
        ("7x7", r"node shape '7x7' describes 49 ranks, but there are \d+; accepted are"),
        ("1+0", "has a node without ranks or no nodes"),
    ):
        with pytest.raises(TopologyError, match=message):
            discover(comm, wrong)
    assert comm.allreduce(1) == comm.size


@needs_ranks(2)
def test_a_rank_that_fails_alone_in_a_rendezvous_waits_for_no_other(comm):
    try:
        with rendezvous("a rendezvous", comm=comm):
            if comm.rank == 1:
                raise KeyError("alone")
            has_left = comm.rank != 0 or until(lambda: comm.iprobe(source=1), 20)
    except KeyError:
        has_left = comm.isend(b"", 0) is not None
    if comm.rank == 0:
        comm.recv(source=1)
    assert has_left, "it waited, and its error was told to nobody"
