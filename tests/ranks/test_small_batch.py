"""Small batches: from the second call on they take a shorter way through MPI, with the results of the longer one."""

from __future__ import annotations

import numpy as np
import pytest

from mpistrat.cross_device.hierarchical import HierarchicalCollectives
from mpistrat.cross_device.options import CommunicationOptions
from mpistrat.cross_device.small_batch import SMALL_BATCH_BYTES, SmallBatch
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.reduction import HALF_DTYPES, ReduceOp
from mpistrat.testing.transport_cases import DTYPES, operations
from tests.launches import needs_ranks

SHAPES = [(3,), (), (2, 2), (0,), (5, 1)]


@pytest.fixture
def ops(comm, world, monkeypatch):
    monkeypatch.setenv("MPISTRAT_STRICT", "0")
    operations = HierarchicalCollectives(Hierarchy(comm, world))
    yield operations
    operations.close()


@pytest.fixture
def short_ways(monkeypatch):
    """Count the calls that take the short way."""
    taken = []
    run = SmallBatch.run

    def counted(self, arrays):
        taken.append(len(arrays))
        return run(self, arrays)

    monkeypatch.setattr(SmallBatch, "run", counted)
    return taken


def batch(dtype: np.dtype, rank: int) -> list[np.ndarray]:
    return [np.asarray((np.arange(np.prod(shape)) + rank + 1) % 5).reshape(shape).astype(dtype) for shape in SHAPES]


@pytest.mark.parametrize("op", ReduceOp)
def test_the_short_way_gives_the_bits_of_the_long_one(ops, short_ways, op):
    for dtype in (*DTYPES, *HALF_DTYPES):
        if op not in operations(dtype):
            continue
        for arrays in (batch(dtype, ops.rank), [batch(dtype, ops.rank)[0]]):
            first = ops.all_reduce(op, arrays)
            del short_ways[:]
            again = ops.all_reduce(op, arrays)
            is_direct = len(arrays) == 1 and op is not ReduceOp.MEAN and dtype not in HALF_DTYPES
            assert short_ways == ([] if is_direct else [len(arrays)]), (op, dtype)
            for one, other, array in zip(first, again, arrays, strict=True):
                assert (other.dtype, other.shape) == (array.dtype, array.shape)
                assert one.tobytes() == other.tobytes(), (op, dtype)
                assert other.flags.writeable
                assert not np.shares_memory(other, array)


def test_results_of_two_calls_are_apart_and_arrays_need_not_be_contiguous(ops, short_ways):
    arrays = [np.arange(8.0).reshape(2, 4).T + ops.rank, np.ones(7)[::2]]
    results = [ops.all_reduce(ReduceOp.SUM, arrays) for _ in range(3)]
    assert short_ways == [2, 2]
    offset = sum(range(ops.size))
    for total, count in results:
        assert total.tolist() == (np.arange(8.0).reshape(2, 4).T * ops.size + offset).tolist()
        assert count.tolist() == [ops.size] * 4
        total.fill(np.nan)


@needs_ranks(2)
def test_a_rank_may_go_the_long_way(ops):
    arrays = [np.full(3, ops.rank), np.full(2, 2 * ops.rank)]
    for turn in range(4):
        ops.timeline.enabled = ops.rank == 1 and turn > 1
        total, double = ops.all_reduce(ReduceOp.SUM, arrays)
        assert total.tolist() == [sum(range(ops.size))] * 3
        assert double.tolist() == [2 * sum(range(ops.size))] * 2


def test_what_is_no_small_batch_goes_the_long_way(ops, short_ways, monkeypatch):
    small, large = np.ones(2), np.ones(SMALL_BATCH_BYTES // 8)
    calls = [
        ([small, small.astype(np.float32)], None, None),
        ([small, large], None, None),
        ([small, small], CommunicationOptions(deterministic=True), None),
        ([small, small], None, [np.empty(2), np.empty(2)]),
    ]
    for arrays, options, out in calls:
        for _ in range(3):
            for result in ops.all_reduce(ReduceOp.SUM, arrays, options, out):
                assert (result == ops.size).all()
    ops.num_packs = 2
    for _ in range(3):
        assert all((result == ops.size).all() for result in ops.all_reduce(ReduceOp.SUM, [small, small]))
    assert short_ways == []
