"""Messages longer than MPI may be handed at once: every verb, with a limit of a few hundred bytes."""

import numpy as np
import pytest

from mpistrat.algorithms.planners import PLANNERS
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.reduction import ReduceOp
from mpistrat.transports import mpi, ring, small
from tests.launches import up_to_ranks

pytestmark = up_to_ranks(4)

SUM, MEAN = ReduceOp.SUM, ReduceOp.MEAN
LIMIT_BYTES = 300
COUNT = 1003


@pytest.fixture(params=["auto", "mpi"])
def limited(make_ops, request, world, monkeypatch):
    """Give collectives that were made under the limit, through shared memory and without."""
    monkeypatch.setattr("mpistrat.execution.executor.SMALL_RAIL_BYTES", LIMIT_BYTES)
    # messages that are bound, not those of calls whose arrays go straight to MPI
    monkeypatch.setattr(mpi, "as_message", checked(mpi.as_message))
    monkeypatch.setattr(ring, "as_message", checked(ring.as_message))
    monkeypatch.setattr(small, "byte_message", checked(small.byte_message))
    return make_ops(world, MAX_MESSAGE_BYTES=str(LIMIT_BYTES), CHUNK_BYTES="1000", INTRA_TRANSPORT=request.param)


def checked(make):
    def message(*arguments):
        assert arguments[-1].nbytes <= LIMIT_BYTES, "MPI would be handed more than it may"
        return make(*arguments)

    return message


def total(ops, seed=0):
    return sum(given(rank, seed) for rank in range(ops.size))


def given(rank, seed=0):
    return np.random.default_rng([rank, seed]).integers(-9, 9, COUNT).astype(np.float32)


def test_what_combines_and_what_moves_is_cut(limited):
    ops, mine = limited, given(limited.rank)
    options = [CommunicationOptions(algorithm=name) for name in PLANNERS]
    options += [CommunicationOptions(deterministic=True), CommunicationOptions(wire_dtype="bfloat16")]
    for wanted in options:
        for arrays in ([mine], [mine, mine[:7], mine.astype(np.float16)]):
            for _ in range(2):  # the second time around what was bound is run again
                results = ops.all_reduce(SUM, arrays, wanted)
                np.testing.assert_array_equal(results[0], total(ops), err_msg=str(wanted))
        np.testing.assert_array_equal(ops.start_all_reduce(SUM, [mine], wanted).wait()[0], total(ops))
    np.testing.assert_array_equal(ops.all_reduce(MEAN, [mine, mine])[1], total(ops) / np.float32(ops.size))
    batch = [mine[:60], mine[:30]]  # a small one, longer than a message all the same
    for _ in range(3):
        np.testing.assert_array_equal(ops.all_reduce(SUM, batch)[0], total(ops)[:60])
    np.testing.assert_array_equal(ops.reduce_scatter(SUM, mine), np.array_split(total(ops), ops.size)[ops.rank])
    ops, mine = limited, given(limited.rank)
    gathered = np.concatenate([given(rank)[: COUNT - rank] for rank in range(ops.size)])
    np.testing.assert_array_equal(ops.all_gather(mine[: COUNT - ops.rank]), gathered)
    for rank, array in enumerate(ops.gather(mine, ops.size - 1) or []):
        np.testing.assert_array_equal(array, given(rank))
    arrived = ops.all_to_all([mine[: COUNT - peer] for peer in range(ops.size)])
    for rank, array in enumerate(arrived):
        np.testing.assert_array_equal(array, given(rank)[: COUNT - ops.rank])
    np.testing.assert_array_equal(ops.broadcast(mine, ops.size - 1), given(ops.size - 1))
