"""MPI's own all-reduce: the same results, the same bits on all ranks, and the user's choice of collectives."""

import numpy as np
import pytest
from mpi4py import MPI

from mpistrat.reduction import ReduceOp, combine
from mpistrat.steps import drive
from mpistrat.testing.transport_cases import DTYPES, inputs, operations, poison
from mpistrat.transports import mpi_world
from mpistrat.transports.mpi_world import WorldTransport
from tests.launches import up_to_ranks


@pytest.fixture
def transport(hierarchy):
    transport = WorldTransport(hierarchy)
    yield transport
    transport.close()


def reduced(transport: WorldTransport, mine: np.ndarray, op: ReduceOp, in_place: bool) -> np.ndarray:
    target = mine.copy()
    if in_place:
        drive(transport.all_reduce(target, op).run(), lambda: "all_reduce", 30.0)
        return target
    poison(target)
    drive(transport.bind(op, mine.dtype, mine.shape).steps(mine, target), lambda: "between", 30.0)
    return target


@up_to_ranks(8)
def test_arrays_are_combined_in_place_and_between_arrays(transport, comm):
    cases = [(dtype, op) for dtype in DTYPES for op in operations(dtype)]
    for seed, (dtype, op) in enumerate(cases):
        given = inputs(dtype, op, 67, comm.size, seed)
        total = combine(op).reduce(given, axis=0, dtype=given.dtype)
        assert (reduced(transport, given[comm.rank].copy(), op, seed % 2 == 0) == total).all(), (dtype, op)


def test_the_ranks_stand_in_the_order_of_their_nodes(transport, world, comm):
    ordered = tuple(rank for node in world.nodes for rank in node.ranks)
    assert transport.group.ranks == ordered
    assert tuple(transport.group.comm.allgather(comm.rank)) == ordered


def test_one_node_needs_no_communicators_and_close_frees_the_others(hierarchy, world):
    transport = WorldTransport(hierarchy)
    own = list(transport._own)
    assert bool(own) == (world.num_nodes > 1)
    transport.close()
    assert all(comm == MPI.COMM_NULL for comm in own)
    assert (transport.group is hierarchy.world_group) == (world.num_nodes == 1)


def test_collectives_that_one_rank_has_chosen_stay_as_they_are(hierarchy, comm, monkeypatch):
    if comm.rank == comm.size - 1:
        monkeypatch.setenv("OMPI_MCA_coll_han_priority", "35")
    transport = WorldTransport(hierarchy)
    assert not mpi_world._may_advise(hierarchy)
    assert reduced(transport, np.ones(3), ReduceOp.SUM, in_place=True).tolist() == [comm.size] * 3
    transport.close()
