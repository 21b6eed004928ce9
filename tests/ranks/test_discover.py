"""Discovering the world: real nodes by shared memory, virtual nodes by their shape, errors on every rank."""

import pytest
from mpi4py import MPI

from mpistrat.errors import TopologyError
from mpistrat.topology.discover import discover
from mpistrat.topology.world import World
from tests.launches import up_to_ranks


@up_to_ranks(8)
def test_a_virtual_shape_is_taken_as_it_is(comm, shape, world):
    assert discover(comm, shape) == world


def test_the_variable_of_rank_0_counts_for_all(comm, shape, world, monkeypatch):
    monkeypatch.setenv("MPISTRAT_VIRTUAL_NODES", shape if comm.rank == 0 else "7x7")
    assert discover(comm) == world


def test_an_argument_wins_over_the_variable(comm, monkeypatch):
    monkeypatch.setenv("MPISTRAT_VIRTUAL_NODES", "7x7")
    assert discover(comm, f"1x{comm.size}") == World.from_shape(f"1x{comm.size}")


def test_real_nodes_are_the_ranks_that_share_memory(comm, monkeypatch):
    monkeypatch.delenv("MPISTRAT_VIRTUAL_NODES", raising=False)
    world = discover(comm)
    node = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
    mine = world.nodes[world.place(comm.rank).node_index]
    assert mine.ranks == tuple(node.allgather(comm.rank))
    assert mine.name == MPI.Get_processor_name()
    node.Free()
    assert comm.allgather(world) == [world] * comm.size


def test_a_wrong_shape_is_an_error_on_every_rank(comm):
    for wrong, message in (
        ("2y2", r"node shape '2y2' is malformed; accepted are NODESxRANKS \(2x4\)"),
        ("7x7", r"node shape '7x7' describes 49 ranks, but there are \d+; accepted are"),
        ("1+0", "has a node without ranks or no nodes"),
    ):
        with pytest.raises(TopologyError, match=message):
            discover(comm, wrong)
    assert comm.allreduce(1) == comm.size


def test_a_virtual_node_cannot_span_machines(comm, monkeypatch):
    if comm.size == 1:
        assert discover(comm, "1x1").num_nodes == 1
        return
    # each rank on a machine of its own
    monkeypatch.setattr(
        "mpistrat.topology.discover.real_nodes", lambda comm: ([*range(comm.size)], [*map(str, range(comm.size))])
    )
    with pytest.raises(TopologyError, match=r"virtual node 0 of shape '1x\d' would hold ranks 0, 1.* several machines \(0, 1"):
        discover(comm, f"1x{comm.size}")
    assert discover(comm, f"{comm.size}x1").num_nodes == comm.size
