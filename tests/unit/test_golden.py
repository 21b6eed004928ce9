"""Golden vectors of tf.distribute for which one process is enough; tests/ranks/test_golden.py has those that need replicas."""

from __future__ import annotations

import numpy as np
import pytest

import mpistrat
from mpistrat.cluster.hostlist import expand_hosts, expand_tasks
from mpistrat.cluster.roles import id_in_cluster, is_chief, worker_count
from mpistrat.cluster.spec import ClusterSpec
from mpistrat.errors import InvalidArgumentError
from mpistrat.experimental import CommunicationImplementation, CommunicationOptions, ValueContext
from mpistrat.inputs.sources import ArrayDataset
from mpistrat.packing.layout import pack_by_bytes, split_evenly

RING, AUTO = CommunicationImplementation.RING, CommunicationImplementation.AUTO


@pytest.mark.parametrize(
    ("sizes", "limit", "packs"),
    [
        ([10, 20, 30, 40], 25, [[10, 20], [30], [40]]),
        ([40, 30, 20, 10], 25, [[40], [30], [20, 10]]),
        ([25, 25], 25, [[25, 25]]),
        ([10, 20, 30, 40], 0, [[10, 20, 30, 40]]),
        ([40, 30, 20, 10], 0, [[40, 30, 20, 10]]),
    ],
    ids=["in order", "reversed first", "equality", "limit 0", "limit 0 reversed"],
)
def test_packing(sizes, limit, packs):
    assert [[sizes[index] for index in pack] for pack in pack_by_bytes(sizes, limit)] == packs


def test_num_packs():
    assert split_evenly(10, 3) == [3, 3, 4]


def test_options_merge():
    merged = CommunicationOptions(5, None, RING).merge(CommunicationOptions(0, 9, AUTO))
    assert (merged.bytes_per_pack, merged.timeout_seconds, merged.implementation) == (5, 9, RING)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"bytes_per_pack": -1}, "bytes_per_pack must be .*got -1"),
        ({"implementation": "foo"}, "implementation must be one of AUTO, RING, NCCL; got 'foo'"),
    ],
)
def test_options_errors(keywords, message):
    with pytest.raises(ValueError, match=message):
        CommunicationOptions(**keywords)


def test_per_replica_batch():
    context = mpistrat.InputContext(num_replicas_in_sync=4)
    assert context.get_per_replica_batch_size(16) == 4
    with pytest.raises(ValueError, match="10 is not divisible by 4 replicas"):
        context.get_per_replica_batch_size(10)


def test_context_defaults():
    context = mpistrat.InputContext()
    assert (context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync) == (1, 0, 1)
    value = ValueContext()
    assert (value.replica_id_in_sync_group, value.num_replicas_in_sync) == (0, 1)


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


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n[009-011]", "n009 n010 n011"),
        ("a[1-2,5],b3", "a1 a2 a5 b3"),
        ("foo003,foo0[10-20]", " ".join(["foo003", *(f"foo0{number}" for number in range(10, 21))])),
        ("b04-[09-10]", "b04-09 b04-10"),
        ("rack[0-1]n[1-2]", "rack0n1 rack0n2 rack1n1 rack1n2"),
        ("nodeA,nodeB[001,003],nodeC", "nodeA nodeB001 nodeB003 nodeC"),
    ],
)
def test_host_lists(text, hosts):
    assert expand_hosts(text) == hosts.split()


def test_tasks_per_node():
    assert expand_tasks("3(x2),2,1") == [3, 3, 2, 1]


def test_id_in_cluster():
    cluster = ClusterSpec({"chief": ["c:1"], "worker": ["w0:1", "w1:1"]})
    assert [id_in_cluster(cluster, *task) for task in (("chief", 0), ("worker", 0), ("worker", 1))] == [0, 1, 2]
    assert worker_count(cluster, "worker") == 3


def test_is_chief():
    without = ClusterSpec({"worker": ["w0:1", "w1:1", "w2:1"]})
    assert [is_chief(without, "worker", index) for index in range(3)] == [True, False, False]
    with_one = ClusterSpec({"chief": ["c:1"], "worker": ["w0:1", "w1:1"]})
    assert is_chief(with_one, "chief", 0)
    assert not is_chief(with_one, "worker", 0)


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


def test_scopes_nest_in_themselves_only():
    first, second = mpistrat.OneDeviceStrategy(), mpistrat.OneDeviceStrategy()
    with first.scope(), first.scope():
        assert mpistrat.get_strategy() is first
        with pytest.raises(RuntimeError, match="two strategies cannot be mixed"), second.scope():
            pass
    assert not mpistrat.has_strategy()


def test_merge_call_in_cross_replica_context():
    strategy = mpistrat.OneDeviceStrategy()
    context = strategy.run(mpistrat.get_replica_context)
    with strategy.scope(), pytest.raises(RuntimeError, match=r"(?s)merge_call must be called in the replica context.*correct:"):
        context.merge_call(lambda strategy: None)


@pytest.mark.parametrize(("rows", "axis", "expected"), [([1, 2, 3, 4], 0, 2.5), ([2, 4], 0, 3), (np.ones((3, 2)), [0, 1], 1)])
def test_one_replica_holds_all_rows(rows, axis, expected):
    for strategy in (mpistrat.get_strategy(), mpistrat.OneDeviceStrategy()):
        assert strategy.reduce("mean", np.array(rows), axis=axis) == expected
        with pytest.raises(InvalidArgumentError, match="scalar"):
            strategy.gather(np.float64(1), axis=0)


@pytest.mark.parametrize(("axis", "expected"), [(0, [2, 1]), (1, [1, 4])])
def test_shards_are_at_most_as_many_as_rows(axis, expected):
    partitioner = mpistrat.experimental.partitioners.FixedShardsPartitioner(4)
    assert partitioner((2, 10), np.float32, axis=axis) == expected
