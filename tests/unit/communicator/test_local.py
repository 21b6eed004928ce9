"""One replica: the same calls, checks and results as with several; and sparse arrays, whose rows are summed."""

import ml_dtypes
import numpy as np
import optree
import pytest

import mpistrat
from mpistrat.communicator.local import LocalCommunicator
from mpistrat.communicator.sparse import IndexedSlices, all_reduce_slices, gather_refused
from mpistrat.errors import InvalidArgumentError, UnsupportedDtypeError
from mpistrat.reduction import ReduceOp
from tests.gpu import verbs_rank


def test_every_verb_gives_what_numpy_makes_of_the_arrays_of_one_rank(monkeypatch):
    monkeypatch.setattr(verbs_rank, "SHAPES", verbs_rank.SMALL_SHAPES)
    strategy = mpistrat.OneDeviceStrategy()
    assert strategy.run(verbs_rank._try_all, (strategy,)) > 200


def test_a_result_shares_no_memory_or_goes_where_it_is_told_and_calls_are_counted():
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


SUM, MEAN = ReduceOp.SUM, ReduceOp.MEAN


def test_what_it_holds():
    slices = IndexedSlices([[1.0, 2.0], [3.0, 4.0]], [3, 0], dense_shape=(5, 2))
    assert slices.values.tolist() == [[1, 2], [3, 4]]
    assert (slices.indices.tolist(), slices.indices.dtype) == ([3, 0], np.int64)
    assert (slices.dense_shape, slices.shape, slices.dtype) == ((5, 2), (5, 2), np.float64)
    assert repr(slices) == "IndexedSlices(2 rows of float64 (2,), dense_shape=(5, 2))"
    assert repr(IndexedSlices(np.ones(1, np.int8), [7])) == "IndexedSlices(1 row of int8 (), dense_shape=None)"
    assert slices.to_dense().tolist() == [[3, 4], [0, 0], [0, 0], [1, 2], [0, 0]]
    ops = LocalCommunicator()
    assert (ops.rank, ops.size, ops.world.shape) == (0, 1, "1x1")
    assert str(ops.explain(np.ones(1000, np.float32))) == "one replica: nothing is sent"


def test_it_is_one_leaf_and_reads_as_the_dense_array_of_which_rows_named_twice_are_summed():
    slices = IndexedSlices(np.ones((2, 1), np.float32), [1, 1], (3, 1))
    assert optree.tree_leaves({"w": [slices]}) == [slices]
    assert (np.asarray(slices) == [[0], [2], [0]]).all()
    assert np.array(slices, np.float64).dtype == np.float64
    assert np.add(slices, 1).tolist() == [[1], [3], [1]]
    with pytest.raises(InvalidArgumentError, match=r"cannot be read as an array without a copy: call to_dense\(\)"):
        slices.__array__(copy=False)
    none = IndexedSlices(np.empty((0, 2), np.float32), [], (3, 2))
    assert (none.to_dense().tolist(), none.dtype) == ([[0, 0]] * 3, np.float32)
    assert IndexedSlices(np.empty((0, 2)), [], (0, 2)).to_dense().shape == (0, 2)
    half = IndexedSlices(np.full(4097, 1, np.float16), np.zeros(4097, int), (1,))
    assert half.to_dense().tolist() == [4096], "summed in float32, rounded once: 2048 + 1 is 2048 in float16"
    assert IndexedSlices(np.full(2, 200, np.uint8), [0, 0], (1,)).to_dense().tolist() == [144], "wraps around"
    assert IndexedSlices(np.array([True, True]), [0, 0], (2,)).to_dense().tolist() == [True, False]
    assert float(IndexedSlices(np.array([256, 1, 1], ml_dtypes.bfloat16), [0, 0, 0], (1,)).to_dense()[0]) == 258


@pytest.mark.parametrize(
    ("values", "indices", "dense_shape", "error", "message"),
    [
        (1.0, [0], None, InvalidArgumentError, "values of IndexedSlices must have at least one axis"),
        ([[1.0]], [0.5], None, UnsupportedDtypeError, "indices of IndexedSlices must be integers; got dtype float64"),
        ([[1.0]], [True], None, UnsupportedDtypeError, "must be integers; got dtype bool"),
        (["a"], [0], None, UnsupportedDtypeError, "values has dtype <U1"),
        ([[1.0]], [0, 1], None, InvalidArgumentError, r"shape \(1,\), one for each row of values \(1, 1\); got shape \(2,\)"),
        ([[1.0]], [[0]], None, InvalidArgumentError, r"got shape \(1, 1\)"),
        ([[1.0]], [-1], None, InvalidArgumentError, "must be at least 0, .*; got -1"),
        ([[1.0]], np.array([2**64 - 1], np.uint64), None, InvalidArgumentError, "less than 2.*63; got 18446744073709551615"),
        ([[1.0]], [4], (4, 1), InvalidArgumentError, r"index 4 is outside dense_shape \(4, 1\): 0 to 3 are accepted"),
        ([[1.0]], [0], (4, 2), InvalidArgumentError, r"dense_shape must be \(rows, 1\) for values of .*; got \(4, 2\)"),
        ([[1.0]], [0], (4,), InvalidArgumentError, r"dense_shape must be \(rows, 1\)"),
        ([1.0], [0], (-4,), InvalidArgumentError, r"dense_shape must be \(rows\) for values of shape \(1,\); got \(-4,\)"),
        ([1.0], [0], 4, InvalidArgumentError, "dense_shape must be a sequence of int, or None; got 4"),
        ([1.0], [0], (4.5,), InvalidArgumentError, "dense_shape must be a sequence of int"),
    ],
)
def test_parts_that_do_not_fit_are_refused(values, indices, dense_shape, error, message):
    with pytest.raises(error, match=message):
        IndexedSlices(values, indices, dense_shape)


def test_what_is_not_defined_says_what_to_do_instead():
    slices = IndexedSlices(np.ones((1, 2)), [0])
    with pytest.raises(InvalidArgumentError, match=r"IndexedSlices\(1 row of .* has no dense_shape, so .*: pass IndexedSlices"):
        slices.to_dense()
    for op in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PROD):
        message = rf"{op.name} of IndexedSlices\(.*Reduce slices.to_dense\(\) with {op.name}"
        with pytest.raises(NotImplementedError, match=message):
            all_reduce_slices(LocalCommunicator(), op, slices)
    with pytest.raises(UnsupportedDtypeError, match="MEAN is not defined for the rows of IndexedSlices of dtype bool"):
        all_reduce_slices(LocalCommunicator(), MEAN, IndexedSlices(np.ones(1, bool), [0]))
    error = gather_refused(slices)
    assert isinstance(error, NotImplementedError)
    assert "correct:    ctx.all_gather([slices.values, slices.indices], axis=0)" in str(error)
