"""The fixtures themselves: right ranks, right shapes."""

import os

import numpy as np
import pytest

from mpistrat.algorithms.choose import choose
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.reduction import ReduceOp
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


@pytest.mark.parametrize("count", [3, 100_003])
def test_the_operations_reduce(ops, world, count):
    expected = ops.size * np.arange(count) + ops.size * (ops.size - 1) // 2
    for candidate in choose(world, count, 8).considered:
        options = CommunicationOptions(algorithm=candidate.plan.algorithm)
        (total,) = ops.all_reduce(ReduceOp.SUM, [np.arange(count) + ops.rank], options)
        assert np.array_equal(total, expected), candidate.plan.algorithm


def test_the_strategy_spans_all_ranks(comm, strategy):
    assert strategy.num_replicas_in_sync == comm.size
