"""Groups: on communicators of their own, by the numbers that all ranks know them by."""

import pytest
from mpi4py import MPI

from mpistrat.groups.group import Group
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.topology.world import World
from tests.launches import up_to_ranks


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


def test_they_say_who_they_are(comm):
    hierarchy = Hierarchy(comm, World.from_shape(f"1x{comm.size}"))
    ranks = f"{comm.size} rank" + "s" * (comm.size > 1)
    assert repr(hierarchy.intra) == f"Group(intra node0, rank={comm.rank}({comm.size}))"
    assert repr(hierarchy).startswith(f"Hierarchy(World(1x{comm.size}, {ranks} on 1 node), Place(rank={comm.rank}(")
    hierarchy.close()


def test_all_ranks_know_them_by_one_number_whatever_some_have_made_before(comm):
    for _ in range(comm.rank):
        Hierarchy(MPI.COMM_SELF, World.from_shape("1x1")).close()
    made = [Hierarchy(comm, World.from_shape(f"1x{comm.size}")) for _ in range(2)]
    numbers = [hierarchy.number for hierarchy in made]
    assert comm.allgather(numbers) == [numbers] * comm.size
    assert numbers[0] != numbers[1]
    for hierarchy in made:
        hierarchy.close()


def test_they_know_which_ranks_of_the_job_they_are(comm):
    half = comm.Split(comm.rank % 2, comm.rank)
    hierarchy = Hierarchy(half, World.from_shape(f"1x{half.size}"))
    assert hierarchy.job_ranks == tuple(range(comm.rank % 2, comm.size, 2))
    assert (hierarchy.members == "") == (comm.size == 1)
    hierarchy.close()
    half.Free()


def test_a_picture_of_another_size_is_refused(comm):
    with pytest.raises(AssertionError, match=rf"cannot describe a communicator of {comm.size} ranks"):
        Hierarchy(comm, World.from_shape(f"1x{comm.size + 1}"))
    with pytest.raises(AssertionError, match=rf"group odd has {comm.size} members, {comm.size + 1} ranks were named"):
        Group(comm, "odd", tuple(range(comm.size + 1)))
