"""ReplicaContext: weighted means, handles, and the collective calls that TensorFlow does not have."""

import ml_dtypes
import numpy as np
import pytest

import mpistrat
from mpistrat.communicator.sparse import IndexedSlices
from mpistrat.errors import InvalidArgumentError, UnsupportedDtypeError
from tests.unit.replicas import IN_REPLICA, in_run


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, np.complex64])
def test_the_weighted_mean_counts_each_replica_as_it_weighs(dtype):
    def fn(context, rank):
        total = context.all_reduce("mean", {"a": np.full(2, rank, dtype), "b": np.asarray(2 * rank, dtype)}, weight=rank + 1)
        assert context.strategy.extended.communicator.num_collectives == 1
        return total

    for result in in_run(fn, num_replicas=3):  # (0 * 1 + 1 * 2 + 2 * 3) / 6
        assert result["a"].dtype == result["b"].dtype == dtype
        np.testing.assert_array_equal(result["a"], np.full(2, 4 / 3).astype(dtype))
        np.testing.assert_array_equal(result["b"], np.asarray(8 / 3).astype(dtype))


def test_a_replica_without_weight_contributes_nothing_even_if_it_has_nothing():
    results = in_run(lambda context, rank: context.all_reduce("mean", np.nan if rank else 3.0, weight=0 if rank else 5))
    assert results == [3, 3]
    assert np.isnan(in_run(lambda context, rank: context.all_reduce("mean", np.ones(2), weight=0))).all()


def weighted(value, weight, op="mean"):
    return lambda context: context.all_reduce(op, value, weight=weight)


def reducing(op, value, error, message):
    """Return a row of `REFUSED` for each call that reduces."""
    return [
        (lambda context: context.all_reduce(op, value), error, message),
        (lambda context: context.start_all_reduce(op, value), error, message),
    ]


OPTIONS, WEIGHT = "options must be CommunicationOptions or None; got 'RING'", "weight must be one finite number"
REFUSED = [
    (lambda c: c.all_reduce("mean", [np.ones(2)], out=np.ones(2)), InvalidArgumentError, "out must have the structure of"),
    (lambda c: c.all_reduce("mean", [1.0], out=[2.0]), InvalidArgumentError, r"out\[0\] must be an array to .*; got float"),
    (lambda c: c.all_reduce("mean", np.ones(2), out=np.ones(3)), InvalidArgumentError, "out must be a writable, C-contiguous"),
    (lambda c: c.all_reduce("mean", [1.0], out=[1.0], weight=1), InvalidArgumentError, "out= is for reductions without"),
    (weighted(1.0, 1, "sum"), InvalidArgumentError, "weight= is for MEAN, got SUM: use MEAN"),
    (weighted(1.0, -1), InvalidArgumentError, f"{WEIGHT} that is not negative; got -1"),
    *((weighted(1.0, weight), InvalidArgumentError, WEIGHT) for weight in (np.nan, np.inf, [1, 2], 1j)),
    (weighted(np.ones(1, "f4"), 1e39), InvalidArgumentError, "weight 1e.39 is out of the range of float32, the dtype"),
    (weighted(np.ones(1, "f2"), 1e-50), InvalidArgumentError, "weight 1e-50 .* values of dtype float16 are weighted"),
    (weighted(1.0, "2"), UnsupportedDtypeError, "weight has dtype <U1"),
    (weighted(1, 2), UnsupportedDtypeError, "the weighted mean is not supported for dtype int64"),
    (weighted(True, 2), UnsupportedDtypeError, "the weighted mean is not supported for dtype bool"),
    *(
        (weighted(np.ones(1, ">f8"), each), UnsupportedDtypeError, r"value has non-native byte order \(>f8\)")
        for each in (2, 0)
    ),
    (weighted(IndexedSlices(np.ones((1, 1)), [0]), 2), NotImplementedError, "the weighted mean of IndexedSlices"),
    (lambda c: c.all_reduce("sum", 1.0, "RING"), InvalidArgumentError, OPTIONS),
    (lambda c: c.start_all_reduce("sum", 1.0, "RING"), InvalidArgumentError, OPTIONS),
    (lambda c: c.all_gather(np.ones(1), 0, "RING"), InvalidArgumentError, OPTIONS),
    (lambda c: c.broadcast(1.0, 0, "RING"), InvalidArgumentError, OPTIONS),
    (lambda c: c.reduce_scatter("sum", np.ones(1), 0, "RING"), InvalidArgumentError, OPTIONS),
    (lambda c: c.all_to_all([1.0], "RING"), InvalidArgumentError, OPTIONS),
    *reducing("median", 1.0, InvalidArgumentError, "unknown reduce_op 'median'"),
    *reducing(None, 1.0, TypeError, "reduce_op must be a ReduceOp or a str"),
    *reducing("sum", {"a": "text"}, UnsupportedDtypeError, r"value\['a'\] has dtype <U4"),
    *reducing("sum", object(), UnsupportedDtypeError, "value has dtype object, .* a value of type object"),
    *reducing("sum", {"b": [np.array([object()])]}, UnsupportedDtypeError, r"value\['b'\]\[0\] has dtype object"),
    *reducing("mean", [True], UnsupportedDtypeError, r"MEAN is not defined for value\[0\] of dtype bool"),
    (lambda c: c.broadcast(1.0, root=1), InvalidArgumentError, "root must be a replica, 0 to 0; got 1"),
    (lambda c: c.broadcast({"a": "text"}), UnsupportedDtypeError, r"value\['a'\] has dtype <U4"),
    (lambda c: c.reduce_scatter("sum", 1.0), InvalidArgumentError, "reduce_scatter needs arrays with at least one axis"),
    (lambda c: c.reduce_scatter("sum", np.ones(1), axis=1), InvalidArgumentError, "axis 1 is out of range"),
    (lambda c: c.reduce_scatter("median", np.ones(1)), InvalidArgumentError, "unknown reduce_op"),
    (lambda c: c.reduce_scatter(1, np.ones(1)), TypeError, "reduce_op must be"),
    (lambda c: c.all_to_all([np.ones(1)] * 2), InvalidArgumentError, "one array for each of the 1 replicas; got 2"),
    (lambda c: c.all_to_all(["text"]), UnsupportedDtypeError, r"values\[0\] has dtype <U4"),
    (lambda c: c.all_gather(1.0, 0), InvalidArgumentError, "all_gather needs arrays with at least one axis; got a scalar"),
    (lambda c: c.all_gather(np.ones(1), 1), InvalidArgumentError, "axis 1 is out of range"),
    (lambda c: c.all_gather(object(), 0), UnsupportedDtypeError, "value has dtype object"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_what_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        mpistrat.OneDeviceStrategy().run(lambda: call(mpistrat.get_replica_context()))


CALLS = {**IN_REPLICA, "merge_call": lambda context: context.merge_call(print), "update": lambda c: c.update(None, print)}


@pytest.mark.parametrize("method", CALLS)
def test_a_replica_calls_in_its_own_context_only(method):
    strategy = mpistrat.OneDeviceStrategy()
    context = strategy.run(mpistrat.get_replica_context)
    message = (
        rf"ReplicaContext.{method} must be called in the replica context .*, but this is outside all scopes(.|\n)*"
        r"incorrect: (.|\n)*correct: "
    )
    with pytest.raises(RuntimeError, match=message):
        CALLS[method](context)
    with strategy.scope(), pytest.raises(RuntimeError, match="cross-replica context of OneDeviceStrategy"):
        CALLS[method](context)
    with pytest.raises(RuntimeError, match="must be called in the replica context it belongs to"):
        mpistrat.OneDeviceStrategy().run(CALLS[method], (context,))


def test_a_replica_context_is_entered_and_left_in_order():
    strategy, other = mpistrat.OneDeviceStrategy(), mpistrat.OneDeviceStrategy()
    context = mpistrat.ReplicaContext(strategy, 0)
    with context as entered:
        assert entered is mpistrat.get_replica_context()
        assert entered.strategy is strategy
        with pytest.raises(RuntimeError, match="must be called outside strategy.run"):
            context.__enter__()
    with pytest.raises(RuntimeError, match="left out of order"):
        context.__exit__(None, None, None)
    with other.scope(), pytest.raises(RuntimeError, match="two strategies cannot be mixed"):
        context.__enter__()


def test_a_replica_id_is_one_of_the_replicas():
    strategy = mpistrat.OneDeviceStrategy()
    for replica_id in (0, np.array(0), np.int32(0), None):
        assert mpistrat.ReplicaContext(strategy, replica_id).replica_id_in_sync_group == 0
    for replica_id in (1, -1, "0", 0.0, np.array([0, 0])):
        with pytest.raises(InvalidArgumentError, match="must be None or an integer from 0 to 0; got"):
            mpistrat.ReplicaContext(strategy, replica_id)
