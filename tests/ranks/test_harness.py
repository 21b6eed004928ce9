"""The fixtures themselves: right ranks, right shapes."""

import os

from mpistrat.topology.world import World
from tests.launches import needs_ranks


def test_a_communicator_reaches_every_rank(comm):
    assert comm.allgather(comm.rank) == list(range(comm.size))


def test_every_shape_has_all_ranks(comm, shape, world):
    assert world == World.from_shape(shape)
    assert world.size == comm.size


def test_strict_mode_is_on():
    assert os.environ["MPISTRAT_STRICT"] == "1"


@needs_ranks(4)
def test_a_test_may_need_ranks(comm):
    assert comm.size >= 4
