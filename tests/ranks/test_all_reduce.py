"""Communicator: every dtype, operation and algorithm on every node shape, against sums made in one place."""

import time
from itertools import product

import ml_dtypes
import numpy as np
import pytest

import mpistrat
from mpistrat.algorithms.planners import PLANNERS
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.reduction import HALF_DTYPES, ReduceOp
from mpistrat.testing.transport_suite import DTYPES, operations
from tests.launches import needs_ranks, up_to_ranks
from tests.reference import of_verb, random_values, unaligned

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SUM, MEAN, MAX = ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.MAX


def by_name(algorithm, **others):
    return CommunicationOptions(algorithm=algorithm, **others)


def rows(dtype, op, count, size, seed):
    """Return one row of values for each rank; every order of combining them gives the same."""
    rngs = [np.random.default_rng((seed, rank)) for rank in range(size)]
    return np.array([random_values(rng, np.dtype(dtype), (count,), op.name, True) for rng in rngs])


def expected(op, given):
    """Return the combination of all rows."""
    total, bound = of_verb("all_reduce", given, None, 0, op.name)
    assert bound is None
    return total


def same_bits(found, wanted):
    # a sum of zeros may be -0
    return (found.dtype, found.shape) == (wanted.dtype, wanted.shape) and np.array_equal(found, wanted, equal_nan=True)


@up_to_ranks(8)
def test_every_dtype_operation_and_algorithm(ops, world):
    for algorithm in PLANNERS:
        for op in ReduceOp:
            dtypes = [dtype for dtype in (*DTYPES, *HALF_DTYPES) if op in operations(dtype)]
            given = [rows(dtype, op, 5 + seed, world.size, seed) for seed, dtype in enumerate(dtypes)]
            arrays = [values[ops.rank].copy() for values in given]
            results = ops.all_reduce(op, arrays, by_name(algorithm))
            for dtype, values, array, result in zip(dtypes, given, arrays, results, strict=True):
                assert same_bits(result, expected(op, values)), (algorithm, op, dtype)
                assert same_bits(array, values[ops.rank]), "an input was changed"
                assert not np.shares_memory(result, array)


@up_to_ranks(8)
def test_large_buffers_by_rule(ops, world):
    # beyond SMALL_RAIL_BYTES on every rail, and several chunks
    base = np.arange(300_001, dtype=np.float32) % 1013
    for algorithm in PLANNERS:
        [result] = ops.all_reduce(SUM, [base * (ops.rank + 1)], by_name(algorithm))
        assert same_bits(result, base * sum(range(world.size + 1))), algorithm


@pytest.mark.parametrize("reads", ["0", "1"])
def test_one_node_works_between_the_arrays_of_the_caller(comm, make_ops, reads):
    for chunk_bytes in ("0", "256KiB"):
        ops = make_ops(PEER_MEMORY=reads, CHUNK_BYTES=chunk_bytes)
        for count in (1, 0, 1000, 300_001, 1_000_003, 1000):
            given = rows(np.dtype(np.float64), MEAN, count, comm.size, count)
            wanted = expected(MEAN, given)
            for turn in range(3):
                array = given[comm.rank].copy()
                if turn == comm.rank:
                    time.sleep(0.001)
                options = by_name("hierarchical")
                [result] = ops.all_reduce(MEAN, [array], options, out=[array] if turn == 2 else None)
                assert same_bits(result, wanted), (chunk_bytes, count)
                # what a rank does with its arrays afterwards is its own affair
                array.fill(np.nan)
                result.fill(np.nan)


@pytest.mark.parametrize("reads", ["0", "1"])
def test_one_node_works_between_lists_of_arrays(comm, make_ops, reads):
    ops = make_ops(PEER_MEMORY=reads)
    for dtype, counts in product((np.float64, BFLOAT16), ([5, 0, 1000, 1, 70_001], [900_001, 0, 800_000])):
        sources = [(np.arange(count) % 7 + comm.rank).astype(dtype) for count in counts]
        for out in (None, sources):
            results = ops.all_reduce(MEAN, sources, by_name("hierarchical"), out=out)
            for result, count in zip(results, counts, strict=True):
                assert (result == (np.arange(count) % 7 + (comm.size - 1) / 2).astype(dtype)).all(), (dtype, counts)


@up_to_ranks(3)
@needs_ranks(2)
def test_an_overflow_is_infinity_even_if_numpy_raises(ops):
    with np.errstate(all="raise"):
        for dtype, count in product(map(np.dtype, ("float32", "float16", BFLOAT16, "complex64")), (1, 1 << 12, 1 << 19)):
            largest = np.array(3e38 if dtype.kind == "c" else ml_dtypes.finfo(dtype).max, dtype)
            array = np.zeros(count, dtype)
            array[0] = largest  # in the part of one rank
            for op in ("sum", "mean", "prod"):
                fits = op == "mean" and dtype == np.float16  # is summed in float32
                for _ in range(2):  # the first call, and the fast path
                    found = ops.all_reduce(op, array)
                    assert found[0] == largest if fits else not np.isfinite(found[0]), (dtype, count, op, found[0])
                    assert not found[1:].any()
            assert np.isinf(ops.all_reduce("sum", [array[:1], array[:1]])).all()
            part = ops.reduce_scatter("sum", array)
            assert ops.rank or np.isinf(part[0])


_UNLIKE = {
    "datatypes of MPI": lambda values, odd: values.astype("LQ"[odd]),
    "layouts": lambda values, odd: np.repeat(values, 1 + odd)[:: 1 + odd],
    "classes": lambda values, odd: values.view(np.memmap) if odd else values,
    "alignment": lambda values, odd: unaligned(values) if odd else values,
}


@pytest.mark.parametrize("transport", ["auto", "mpi"])
@pytest.mark.parametrize("setting", ["STRICT=0", "STRICT=1", "TIMEOUT_SECONDS=60"])
def test_ranks_make_the_same_call_whatever_their_arrays_are_like(comm, monkeypatch, transport, setting):
    """What is known of a call on one rank, and not on another, changes nothing that they send."""
    monkeypatch.setenv("MPISTRAT_INTRA_TRANSPORT", transport)
    monkeypatch.setenv(*f"MPISTRAT_{setting}".split("="))
    with mpistrat.Communicator(comm) as ops:
        for make in _UNLIKE.values():
            for count in (1, 70, 40_000):
                ops.all_reduce("sum", np.arange(count, dtype=np.uint64))
                for turn in range(4):
                    source = make(np.arange(count, dtype=np.uint64), (ops.rank + turn) % 2)
                    for out in (np.empty(count, "L"), np.empty(count, "Q"), None):
                        found = ops.all_reduce("sum", source, None, out)
                        assert np.array_equal(found, np.arange(count) * ops.size)


@pytest.mark.filterwarnings("ignore:Setting the (shape|dtype):DeprecationWarning")  # NumPy's own, since 2.5
@up_to_ranks(4)
def test_arrays_that_were_changed_in_place_are_looked_at(make_ops, world):
    ops = make_ops(world, STRICT="0")
    source, target = np.ones(6, np.float32), np.empty(6, np.float32)

    def is_right():
        target.fill(0)
        [result] = ops.all_reduce(SUM, [source], out=[target])
        return result is target and result.tolist() == (ops.size * source).tolist()

    assert [is_right() for _ in range(3)] == [True] * 3
    target.flags.writeable = False
    with pytest.raises(mpistrat.errors.InvalidArgumentError, match="writable=False"):
        ops.all_reduce(SUM, [source], out=[target])
    target.flags.writeable = True
    source.shape = 2, 3
    with pytest.raises(mpistrat.errors.InvalidArgumentError, match=r"of shape \(2, 3\); got float32 \(6,\)"):
        ops.all_reduce(SUM, [source], out=[target])
    target.shape = 2, 3
    assert is_right()
    source.dtype = target.dtype = np.int32
    source[:] = 7
    assert is_right()
    source[:] = 5
    assert is_right(), "new contents of the same arrays"


FORMS = [
    lambda ops, source, target: ops.all_reduce(SUM, source, out=target),
    lambda ops, source, target: ops.all_reduce(SUM, target, out=target),
    lambda ops, source, target: ops.all_reduce(SUM, [np.stack([source, source], 1)[:, 0]], out=[target])[0],
    lambda ops, source, target: np.copyto(target, ops.all_reduce(SUM, source)) or target,
    lambda ops, source, target: ops.all_reduce(SUM, source, CommunicationOptions(timeout_seconds=ops.seconds), target),
]


@up_to_ranks(3)
@needs_ranks(2)
@pytest.mark.parametrize("strict", ["0", "1"])
@pytest.mark.parametrize("seconds", [None, 100.0])
def test_ranks_may_make_one_call_in_different_forms(make_ops, world, strict, seconds):
    ops = make_ops(world, CommunicationOptions(timeout_seconds=seconds), STRICT=strict)
    ops.seconds = seconds
    for count in (3, 20_000, 200_000, 600_000):
        for turn in range(8):
            source, target = np.full(count, 1.0 + turn), np.full(count, 1.0 + turn)
            assert FORMS[(ops.rank + turn) % len(FORMS)](ops, source, target) is target, (count, turn)
            assert (target == ops.size * (1 + turn)).all(), (count, turn)
        ops.timeline.enabled = ops.rank == 0
        assert (ops.all_reduce(SUM, np.ones(count)) == ops.size).all()
        ops.timeline.enabled = False
