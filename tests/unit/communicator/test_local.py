"""One replica: the same calls, checks and results as with several, and nothing is sent."""

import numpy as np
import pytest

import mpistrat
from mpistrat.communicator.local import LocalCommunicator
from mpistrat.errors import InvalidArgumentError
from mpistrat.reduction import ReduceOp
from tests.gpu import verbs_rank


def test_every_verb_gives_what_numpy_makes_of_the_arrays_of_one_rank(monkeypatch):
    monkeypatch.setattr(verbs_rank, "SHAPES", verbs_rank.SMALL_SHAPES)
    strategy = mpistrat.OneDeviceStrategy()
    assert strategy.run(verbs_rank._try_all, (strategy,)) > 200


def test_a_result_shares_no_memory_and_calls_are_counted():
    ops, array = LocalCommunicator(), np.arange(6).reshape(2, 3)[:, ::-1]
    results = [*(ops.all_reduce(op, array) for op in ReduceOp), ops.all_gather(array, axis=-1), ops.broadcast(array)]
    results += [*ops.gather(array), *ops.all_to_all([array]), ops.reduce_scatter(ReduceOp.SUM, array, axis=1)]
    works = [ops.start_reduce_scatter("sum", array), ops.start_all_gather(array), ops.start_all_reduce("sum", array)]
    assert all(work.done() for work in works)
    for result in (*results, *(work.wait() for work in works)):
        assert np.array_equal(result, array)
        assert not np.shares_memory(result, array)
    ops.barrier()
    assert ops.num_collectives == 14
    ops.close()


def test_a_result_goes_where_it_is_told():
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


@pytest.mark.parametrize("verb", ["all_reduce", "all_gather", "gather", "broadcast", "all_to_all", "reduce_scatter", "barrier"])
def test_options_that_are_none_are_refused(verb):
    ops = LocalCommunicator()
    given = {"all_reduce": ("sum", np.ones(1)), "reduce_scatter": ("sum", np.ones(1)), "barrier": ()}.get(verb, (np.ones(1),))
    with pytest.raises(InvalidArgumentError, match="options must be CommunicationOptions or None; got 7"):
        getattr(ops, verb)(*given, options=7)


def test_there_is_no_plan():
    ops = LocalCommunicator()
    assert (ops.rank, ops.size, ops.world.shape) == (0, 1, "1x1")
    assert ops.choose(1000, np.dtype(np.float32)) is None
    assert str(ops.explain(np.ones(1000, np.float32))) == "one replica: nothing is sent"
