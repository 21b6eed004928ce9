"""One replica: the same calls, checks and results as with several, and nothing is sent."""

from __future__ import annotations

import numpy as np
import pytest

from mpistrat.communicator.local import LocalCommunicator
from mpistrat.errors import InvalidArgumentError
from mpistrat.reduction import ReduceOp


@pytest.mark.parametrize("op", ReduceOp)
def test_the_combination_of_one_component_is_a_copy(op: ReduceOp) -> None:
    arrays = [np.arange(6).reshape(2, 3)[:, ::-1], np.array(2.5), np.empty((0, 3))]
    results = LocalCommunicator().all_reduce(op, arrays)
    for result, array in zip(results, arrays, strict=True):
        assert np.array_equal(result, array)
        assert result.dtype == array.dtype
        assert not np.shares_memory(result, array)


def test_a_result_goes_where_it_is_told() -> None:
    all_reduce = LocalCommunicator().all_reduce
    array, target = np.arange(3.0)[::-1], np.full(3, np.nan)
    assert all_reduce(ReduceOp.MEAN, [array], out=[target])[0] is target
    assert target.tolist() == [2, 1, 0]
    assert all_reduce(ReduceOp.SUM, [target], out=[target])[0].tolist() == [2, 1, 0]
    one, two = np.full(2, 1.0), np.full(2, 2.0)  # over other arrays of the batch
    all_reduce(ReduceOp.SUM, [one, two], out=[two, one])
    assert [one.tolist(), two.tolist()] == [[2, 2], [1, 1]]
    with pytest.raises(InvalidArgumentError, match="one array for each of the 2 that are passed; got 1"):
        all_reduce(ReduceOp.SUM, [one, two], out=[np.ones(2)])
    with pytest.raises(InvalidArgumentError, match="out holds an array twice"):
        all_reduce(ReduceOp.SUM, [one, two], out=[np.ones(2)] * 2)


def test_gathering_and_broadcasting_copy() -> None:
    array = np.arange(6).reshape(2, 3)
    for result in (LocalCommunicator().all_gather(array, axis=-1), LocalCommunicator().broadcast(array)):
        assert np.array_equal(result, array)
        assert not np.shares_memory(result, array)
    ops = LocalCommunicator()
    [gathered], [sent] = ops.gather(array), ops.all_to_all([array])
    for result in (gathered, sent, ops.reduce_scatter(ReduceOp.SUM, array, axis=1)):
        assert np.array_equal(result, array)
        assert not np.shares_memory(result, array)
    for work in (ops.start_reduce_scatter("sum", np.ones(3)), ops.start_all_gather(np.ones(3))):
        assert (work.done(), work.wait().tolist()) == (True, [1, 1, 1])
    work = ops.start_all_reduce(ReduceOp.SUM, [np.ones(3)])
    assert (work.done(), work.wait()[0].tolist()) == (True, [1, 1, 1])
    ops.barrier()
    assert ops.num_collectives == 7
    ops.close()


def test_there_is_no_plan() -> None:
    ops = LocalCommunicator()
    assert (ops.rank, ops.size, ops.world.shape) == (0, 1, "1x1")
    assert ops.choose(1000, np.dtype(np.float32)) is None
    assert str(ops.explain(np.ones(1000, np.float32))) == "one replica: nothing is sent"
