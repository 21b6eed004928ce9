"""Golden vectors of tf.distribute."""

from __future__ import annotations

import numpy as np
import pytest

import mpistrat
from mpistrat.errors import InvalidArgumentError
from mpistrat.inputs.sources import ArrayDataset


@pytest.mark.parametrize(
    ("rows", "num_replicas", "steps"),
    [
        (6, 2, [[[0, 1], [2, 3]], [[4], [5]]]),
        (4, 5, [[[0], [1], [2], [3], []]]),
        (8, 3, [[[0, 1], [2], [3]], [[4, 5], [6], [7]]]),  # TensorFlow's guide has an older table: 2, 2, 0
    ],
)
def test_re_batching(rows, num_replicas, steps):
    dataset = ArrayDataset(np.arange(rows), batch_size=4)
    shares = [dataset.batches(0, replica, num_replicas) for replica in range(num_replicas)]
    handed_out = list(zip(*shares, strict=True))
    assert [[share.tolist() for share in step] for step in handed_out] == steps
    assert all(share.dtype == np.arange(1).dtype for step in handed_out for share in step), "an empty one too"


def test_no_mean_of_an_integer_variable():
    with pytest.raises(ValueError, match="mean"):
        mpistrat.Variable(1, aggregation=mpistrat.VariableAggregation.MEAN)


def test_operations_of_variable_aggregations():
    aggregation = mpistrat.VariableAggregation
    for name in ("SUM", "MEAN"):
        assert mpistrat.ReduceOp.from_variable_aggregation(aggregation[name]) is mpistrat.ReduceOp[name]
    for refused in (aggregation.NONE, aggregation.ONLY_FIRST_REPLICA, "SUM"):
        with pytest.raises(ValueError, match=r"only VariableAggregation.SUM and MEAN have a reduce_op; got .+"):
            mpistrat.ReduceOp.from_variable_aggregation(refused)


@pytest.mark.parametrize(("rows", "axis", "expected"), [([1, 2, 3, 4], 0, 2.5), ([2, 4], 0, 3), (np.ones((3, 2)), [0, 1], 1)])
def test_one_replica_holds_all_rows(rows, axis, expected):
    for strategy in (mpistrat.get_strategy(), mpistrat.OneDeviceStrategy()):
        assert strategy.reduce("mean", np.array(rows), axis=axis) == expected
        with pytest.raises(InvalidArgumentError, match="scalar"):
            strategy.gather(np.float64(1), axis=0)
