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
    array, target = np.arange(3.0)[::-1], np.full(3, np.nan)
    results = LocalCommunicator().all_reduce(ReduceOp.MEAN, [array], out=[target])
    assert results[0] is target
    assert target.tolist() == [2, 1, 0]
    in_place = np.arange(3.0)
    assert LocalCommunicator().all_reduce(ReduceOp.SUM, [in_place], out=[in_place])[0].tolist() == [0, 1, 2]


def test_results_may_be_written_over_other_arrays_of_the_batch() -> None:
    one, two = np.full(2, 1.0), np.full(2, 2.0)
    LocalCommunicator().all_reduce(ReduceOp.SUM, [one, two], out=[two, one])
    assert [one.tolist(), two.tolist()] == [[2, 2], [1, 1]]


def test_places_must_be_as_many_as_arrays() -> None:
    with pytest.raises(InvalidArgumentError, match="one array for each of the 2 that are passed; got 1"):
        LocalCommunicator().all_reduce(ReduceOp.SUM, [np.ones(3), np.ones(3)], out=[np.ones(3)])
    with pytest.raises(InvalidArgumentError, match="out holds an array twice"):
        LocalCommunicator().all_reduce(ReduceOp.SUM, [np.ones(3), np.ones(3)], out=[np.ones(3)] * 2)


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
    ops.barrier()
    assert ops.num_collectives == 4
    ops.close()


def test_what_is_started_has_ended() -> None:
    work = LocalCommunicator().start_all_reduce(ReduceOp.SUM, [np.ones(3)])
    assert work.done()
    assert work.wait()[0].tolist() == [1, 1, 1]


def test_there_is_no_plan() -> None:
    ops = LocalCommunicator()
    assert (ops.rank, ops.size, ops.world.shape) == (0, 1, "1x1")
    assert ops.choose(1000, np.dtype(np.float32)) is None
    assert str(ops.explain(np.ones(1000, np.float32))) == "one replica: nothing is sent"
