"""The verbs beside all_reduce, on every node shape, against what one process makes of all arrays."""

from itertools import product

import ml_dtypes
import numpy as np
import pytest

from mpistrat.communicator.options import CommunicationOptions
from mpistrat.errors import InvalidArgumentError
from mpistrat.reduction import ReduceOp
from tests.gpu import verbs_rank
from tests.launches import needs_ranks, up_to_ranks
from tests.ranks.test_all_reduce import same_bits

SUM, MEAN = ReduceOp.SUM, ReduceOp.MEAN


@up_to_ranks(8)
def test_every_verb_gives_what_numpy_makes_of_all_arrays(strategy, monkeypatch):
    monkeypatch.setattr(verbs_rank, "SHAPES", verbs_rank.SMALL_SHAPES)
    monkeypatch.setattr(verbs_rank, "DTYPES", ("float32", "int16", "complex64", ml_dtypes.bfloat16))
    assert verbs_rank.check(strategy)["compared"] > 200


def test_the_number_of_an_axis_may_be_of_any_type(mixed):
    mixed.is_strict = False
    mine = np.arange(12.0).reshape(3, 4) * (mixed.rank + 1)
    wanted = np.array_split(np.arange(12.0).reshape(3, 4) * sum(range(mixed.size + 1)), mixed.size, 1)[mixed.rank]
    for axis in (True, 1, np.int64(1), True, np.array(1)):
        for turn in range(3):
            mixed.timeline.enabled = turn == 2 and mixed.rank == 0  # this rank alone looks at the call closely
            assert same_bits(mixed.reduce_scatter(SUM, mine, axis), wanted), axis
    mixed.timeline.enabled = False
    with pytest.raises(TypeError, match=r"axis must be an int; got 1\.0"):
        mixed.reduce_scatter(SUM, mine, 1.0)


def test_the_number_of_a_root_may_be_of_any_type(mixed):
    last = mixed.size - 1
    for root in (last, np.int64(last), np.array(last)):
        assert mixed.broadcast(np.full(3, mixed.rank), root).tolist() == [last] * 3
        assert (mixed.gather(np.full(3, mixed.rank), root) is None) == (mixed.rank != last)


def test_calls_are_counted(mixed):
    mixed.is_strict = False
    before = mixed.num_collectives
    array = np.ones(3, np.float32)
    for _ in range(3):
        mixed.all_reduce(SUM, [array])
        mixed.all_reduce(SUM, [array], out=[np.empty_like(array)])
    mixed.barrier()
    mixed.broadcast(array)
    mixed.agree("this")
    assert mixed.num_collectives == before + 9


ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


@up_to_ranks(8)
def test_a_wire_dtype_rounds_between_nodes_and_nowhere_else(ops, world):
    given = np.random.default_rng(3).normal(size=(world.size, 30_001)).astype(np.float32)
    node_sums = np.array([given[list(node.ranks)].astype(np.float64).sum(0) for node in world.nodes])
    for wire, op in product(ROUNDOFF, (SUM, MEAN)):
        options = CommunicationOptions(algorithm="hierarchical", wire_dtype=wire)
        divisor = world.size if op is MEAN else 1
        results = ops.all_reduce(op, [given[ops.rank], given[ops.rank, :7], given[ops.rank].astype(np.float64)], options)
        exact = node_sums.sum(0) / divisor
        error = np.abs(results[0] - exact)
        bound = ROUNDOFF[wire] * (np.abs(node_sums).sum(0) + np.abs(node_sums.sum(0))) / divisor * 1.01 + 1e-5
        assert (error <= bound).all()
        assert (error.max() > 1e-4) == (world.num_nodes > 1), "nothing was cast, or what need not be"
        assert results[0].dtype == np.float32
        assert results[0][:7].tobytes() == results[1].tobytes()
        assert np.abs(results[2] - exact).max() < 1e-12, "float64 is sent as it is"
        same_everywhere = ops.all_gather(results[0][None])
        assert (same_everywhere == same_everywhere[0]).all()
        assert ops.all_reduce(ReduceOp.MAX, [given[ops.rank]], options)[0].tobytes() == given.max(0).tobytes()


@pytest.mark.parametrize("chunk_bytes", ["0", "2KiB"])
def test_error_feedback_makes_up_for_what_casts_have_lost(make_ops, world, chunk_bytes):
    ops = make_ops(world, CHUNK_BYTES=chunk_bytes)
    count, calls = 3001, 8  # several chunks, which take the slots in turn
    given = np.random.default_rng(3).normal(size=(world.size, count)).astype(np.float32)
    exact = given.astype(np.float64).sum(0)
    scale = np.abs(given).sum(0) * 1.01 + 1e-3
    errors = {}
    for feedback in (False, True):
        options = CommunicationOptions(algorithm="hierarchical", wire_dtype="bfloat16", error_feedback=feedback)
        total = np.zeros(count)
        for _ in range(calls):
            [result] = ops.all_reduce(SUM, [given[ops.rank]], options)
            total += result
        errors[feedback] = np.abs(total - calls * exact) / scale
        same_everywhere = ops.all_gather(result[None])
        assert (same_everywhere == same_everywhere[0]).all()
    # each replica holds back one rounding of what it sends, and one of the results that it owns
    assert errors[True].max() <= 3 * ROUNDOFF["bfloat16"]
    if world.num_nodes > 1:
        assert errors[True].max() < errors[False].max() / 2, "casts lose the same in every call unless it is made up for"


@pytest.mark.parametrize("feedback", [False, True])
def test_what_float16_cannot_hold_is_infinite_on_all_replicas_and_in_that_call_alone(ops, world, feedback):
    given = np.zeros((world.size, 5), np.float32)
    given[:] = [30_000, -30_000, 1, 0, 0]
    given[:, 3] = 40_000 * (-1.0) ** np.arange(world.size)
    given[0, 4], given[-1, 4] = 1e5, given[-1, 4] - 1e5  # infinite of both signs where they are on two nodes
    options = CommunicationOptions(algorithm="hierarchical", wire_dtype="float16", error_feedback=feedback)
    narrow = np.float16 if world.num_nodes > 1 else np.float32
    with np.errstate(over="ignore", invalid="ignore"):
        sums = [given[list(node.ranks)].sum(0).astype(narrow).astype(np.float32) for node in world.nodes]
        total = sum(sums[1:], sums[0]).astype(narrow).astype(np.float32)
    for op, wanted in ((SUM, total), (MEAN, total / world.size)):
        [found] = ops.all_reduce(op, [given[ops.rank]], options)
        assert np.array_equal(found, wanted, equal_nan=True), (found, wanted)
    [after] = ops.all_reduce(SUM, [np.ones(5, np.float32)], options)
    assert (after == world.size).all()


def test_options_of_one_call_leave_the_next_alone(ops, world):
    scales = 10.0 ** (np.arange(world.size)[:, None] % 4)
    given = (np.random.default_rng(3).normal(size=(world.size, 2000)) * scales).astype(np.float32)
    kinds = ({}, {"wire_dtype": "bfloat16"}, {"wire_dtype": "float16"}, {"deterministic": True})
    found = []
    for _ in range(2):
        for others in kinds:
            [total] = ops.all_reduce(SUM, [given[ops.rank]], CommunicationOptions(algorithm="hierarchical", **others))
            found.append(total.tobytes())
    assert found[:4] == found[4:]
    assert found[3] == sum(given[1:], given[0]).tobytes(), "in the order of the replicas"
    assert len(set(found[:3])) == (3 if world.num_nodes > 1 else 1)


def test_16_bit_floats_may_be_sent_as_they_are(mixed):
    options = CommunicationOptions(algorithm="hierarchical", wire_dtype="bfloat16")
    [total] = mixed.all_reduce(SUM, [np.full(100, mixed.rank + 1, ml_dtypes.bfloat16)], options)
    assert total.dtype == ml_dtypes.bfloat16
    assert (total == mixed.size * (mixed.size + 1) // 2).all()


@needs_ranks(2)
def test_a_flat_all_reduce_has_nothing_to_cast(comm, make_ops):
    ops = make_ops(f"{comm.size}x1")
    told = "wire_dtype='float16' needs a step between nodes, which algorithm 'flat' does"
    with pytest.raises(InvalidArgumentError, match=told):
        ops.all_reduce(SUM, [np.ones(3)], CommunicationOptions(algorithm="flat", wire_dtype="float16"))
