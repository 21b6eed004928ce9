"""The worked examples of tf.distribute: reductions and results, packing and its options, input and the end of data."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

import mpistrat
from mpistrat.context.values import DistributedValues, PerReplica
from mpistrat.errors import AgreementError, OutOfRangeError
from mpistrat.experimental import CommunicationImplementation, CommunicationOptions
from tests.launches import needs_ranks, on_ranks

pytestmark = on_ranks(1, 3)

# one shape of each number of ranks for what does not depend on it: several nodes, of unequal size where that is possible
MIXED = {1: "1x1", 2: "2x1", 3: "2+1", 4: "3+1"}


@pytest.fixture
def mixed(comm, monkeypatch):
    """Give a strategy of all ranks in one shape."""
    monkeypatch.setenv("MPISTRAT_VIRTUAL_NODES", MIXED.get(comm.size, f"{comm.size}x1"))
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    yield strategy
    strategy.close()


def local(strategy, value):
    """Return the component of this replica."""
    [component] = strategy.experimental_local_results(value)
    return component


def component_of(replica, *components):
    """Return the component of a replica; the last one stands for all that follow."""
    return components[min(replica, len(components) - 1)]


def check_packs(timeline, sizes_bytes, num_ranks):
    """Check the packs of the call that was recorded: each is copied together, or sent straight from its one array."""
    names = ["", *(event.name for event in timeline.events)]
    packs = [name == "copy in" or (name.endswith("all_reduce") and before != "copy in") for before, name in pairwise(names)]
    buffers = [event.nbytes for event, is_pack in zip(timeline.events, packs, strict=True) if is_pack]
    assert len(buffers) == len(sizes_bytes), (buffers, sizes_bytes)
    # a buffer may be longer by what makes its elements, of at most 4 bytes here, divide by the ranks
    assert all(0 <= buffer - size < 4 * num_ranks for buffer, size in zip(buffers, sizes_bytes, strict=True)), buffers


# -- reductions, results and values of a strategy --


@needs_ranks(2)
def test_the_mean_of_rows_is_not_the_mean_of_means(comm, strategy):
    rows = strategy.run(lambda: component_of(comm.rank, np.array([1, 2, 3]), np.array([4]), np.array([], int)))
    assert strategy.reduce("sum", rows, axis=0) == 10
    assert strategy.reduce("mean", rows, axis=0) == 2.5
    means = strategy.run(lambda: component_of(comm.rank, 2.0, 4.0, 3.0))
    assert strategy.reduce("mean", means, axis=None) == 3


@pytest.mark.parametrize("spelling", ["mean", "Mean", "MEAN", mpistrat.ReduceOp.MEAN])
def test_components_are_combined_elementwise_without_an_axis(comm, strategy, spelling):
    pairs = strategy.run(lambda: np.array([comm.rank, 1.0]))
    assert strategy.reduce(spelling, pairs, axis=None).tolist() == [(comm.size - 1) / 2, 1]


@needs_ranks(2)
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_components_of_different_shapes_are_not_combined(comm, strategy, op):
    value = PerReplica(component_of(comm.rank, np.array([1, 2, 3]), np.array([4])))
    with pytest.raises(AgreementError, match=r"(?s)ranks made different calls.*int64 \(3,\).*int64 \(1,\)"):
        strategy.reduce(op, value, axis=None)
    assert comm.allreduce(1) == comm.size, "every rank raised, none is stuck"


def test_axes_may_be_negative(comm, strategy):
    value = strategy.run(lambda: np.full((comm.rank + 1, 2), 3.0))
    rows = comm.size * (comm.size + 1) // 2
    assert strategy.reduce("sum", value, axis=-2).tolist() == [3.0 * rows] * 2
    assert strategy.reduce("mean", value, axis=[-1, 0]) == 3


def test_run_hands_out_components_and_groups_results(comm, strategy):
    value = strategy.run(lambda: comm.rank)

    def step(nest, factor):
        assert mpistrat.get_replica_context().replica_id_in_sync_group == comm.rank
        assert nest["a"][0] == comm.rank, "the component, at any depth"
        return {"twice": factor * nest["a"][0], "none": None, "pair": (comm.rank, "text")}

    result = strategy.run(step, args=({"a": [value]},), kwargs={"factor": 2})
    assert isinstance(result["twice"], DistributedValues) == (comm.size > 1), "one replica: the bare value"
    assert local(strategy, result) == {"twice": 2 * comm.rank, "none": None, "pair": (comm.rank, "text")}
    assert strategy.reduce("sum", result["twice"], axis=None) == comm.size * (comm.size - 1)


def test_values_come_from_a_function_of_the_replica(comm, strategy):
    seen = []

    def value_fn(context):
        seen.append((context.replica_id_in_sync_group, context.num_replicas_in_sync))
        return np.array([context.replica_id_in_sync_group, 1.0])

    value = strategy.experimental_distribute_values_from_function(value_fn)
    assert seen == [(comm.rank, comm.size)], "once for each replica here, with its global number"
    assert strategy.reduce("sum", value, axis=None).tolist() == [sum(range(comm.size)), comm.size]


# -- packing and communication options --

PACKS = {25: [[40], [30], [20, 10]], 0: [[40, 30, 20, 10]], 1: [[40], [30], [20], [10]], 40: [[40, 30], [20, 10]]}


@pytest.mark.parametrize(("limit", "packs"), PACKS.items())
def test_packs_begin_with_the_last_arrays_and_results_come_in_order(comm, strategy, limit, packs):
    arrays = [np.full(count, count + comm.rank, np.uint8) for count in (10, 20, 30, 40)]
    timeline = strategy.extended.communicator.timeline
    timeline.enabled = True
    options = CommunicationOptions(bytes_per_pack=limit, algorithm="flat")
    totals = local(strategy, strategy.run(lambda: mpistrat.get_replica_context().all_reduce("sum", arrays, options=options)))
    check_packs(timeline, [sum(pack) for pack in packs], comm.size)
    for count, total in zip((10, 20, 30, 40), totals, strict=True):
        assert total.tolist() == [(count * comm.size + sum(range(comm.size))) % 256] * count


@pytest.mark.parametrize(("num_packs", "elements"), [(1, [10]), (3, [3, 3, 4]), (0, [6, 4])])
def test_num_packs_cuts_all_elements_evenly(comm, num_packs, elements):
    strategy = mpistrat.MultiWorkerMirroredStrategy(num_packs=num_packs)
    timeline = strategy.extended.communicator.timeline
    timeline.enabled = True
    arrays = [np.arange(4, dtype=np.float32), np.ones((3, 2), np.float32)]
    options = CommunicationOptions(algorithm="flat")
    totals = local(strategy, strategy.run(lambda: mpistrat.get_replica_context().all_reduce("sum", arrays, options=options)))
    check_packs(timeline, [4 * count for count in elements], comm.size)
    assert [total.tolist() for total in totals] == [(comm.size * array).tolist() for array in arrays]
    strategy.close()


def test_options_of_a_call_win_over_those_of_the_strategy(comm):
    strategy = mpistrat.MultiWorkerMirroredStrategy(
        communication_options=CommunicationOptions(bytes_per_pack=25, algorithm="flat")
    )
    timeline = strategy.extended.communicator.timeline
    timeline.enabled = True
    arrays = [np.zeros(count, np.uint8) for count in (10, 20, 30, 40)]
    for options, sent in ((None, [40, 30, 30]), (CommunicationOptions(bytes_per_pack=50), [70, 30])):
        timeline.events.clear()
        strategy.run(lambda options=options: mpistrat.get_replica_context().all_reduce("sum", arrays, options=options))
        check_packs(timeline, sent, comm.size)
    strategy.close()


@pytest.mark.parametrize("implementation", ["ring", "Auto", CommunicationImplementation.RING])
def test_an_implementation_may_be_spelt_as_text(comm, mixed, implementation):
    options = CommunicationOptions(implementation=implementation, timeout_seconds=60)
    total = mixed.run(lambda: mpistrat.get_replica_context().all_reduce("sum", np.ones(3), options=options))
    assert local(mixed, total).tolist() == [comm.size] * 3


# -- input --


class Batches:
    """Batches that can be iterated again and again."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


TABLE = [
    (6, 4, 2, [[[0, 1], [2, 3]], [[4], [5]]]),
    (4, 4, 5, [[[0], [1], [2], [3], []]]),
    (8, 4, 3, [[[0, 1], [2], [3]], [[4, 5], [6], [7]]]),
]


@pytest.mark.parametrize("kind", ["arrays", "batches"])
@pytest.mark.parametrize(("rows", "batch", "replicas", "steps"), TABLE)
def test_global_batches_are_split_over_the_replicas(comm, strategy, kind, rows, batch, replicas, steps):
    given = np.arange(rows)
    pieces = [given[first : first + batch] for first in range(0, rows, batch)]
    dataset = mpistrat.ArrayDataset(given, batch) if kind == "arrays" else Batches(pieces)
    distributed = strategy.experimental_distribute_dataset(dataset)
    found = [local(strategy, step) for step in distributed]
    if comm.size == replicas:
        assert [share.tolist() for share in found] == [step[comm.rank] for step in steps]
    wanted = [np.array_split(piece, comm.size)[comm.rank].tolist() for piece in pieces]
    assert [share.tolist() for share in found] == wanted
    assert all(share.dtype == given.dtype for share in found), "an empty one too"
    assert [local(strategy, step).tolist() for step in distributed] == wanted, "a second epoch"


def test_a_loss_is_divided_by_the_global_batch(comm, strategy):
    losses = np.array([3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0])
    dataset = strategy.experimental_distribute_dataset(mpistrat.ArrayDataset(losses, batch_size=4))

    def step(share, rows):
        return mpistrat.get_replica_context().all_reduce("sum", share.sum() / rows)

    found = [
        float(local(strategy, strategy.run(step, args=(share, rows)))) for share, rows in zip(dataset, (4, 3), strict=True)
    ]
    np.testing.assert_allclose(found, [9 / 4, 16 / 3], rtol=1e-15)
    means = [strategy.reduce("mean", share, axis=0) for share in dataset]
    np.testing.assert_allclose([float(mean) for mean in means], [9 / 4, 16 / 3], rtol=1e-15)


def test_exhausted_replicas_see_empty_batches_until_all_are_done(comm, strategy):
    def dataset_fn(context):
        number = context.input_pipeline_id
        return Batches([{"x": np.full((2, 3), number, np.float32)}] * (number + 1))  # replica r has r + 1 batches

    distributed = strategy.distribute_datasets_from_function(dataset_fn)
    for _ in range(2):
        found = [local(strategy, step)["x"] for step in distributed]
        assert len(found) == comm.size, "all stop together"
        assert [len(batch) for batch in found] == [2] * (comm.rank + 1) + [0] * (comm.size - comm.rank - 1)
        assert all((batch.shape[1:], batch.dtype) == ((3,), np.float32) for batch in found)
    counts = [
        strategy.reduce("sum", strategy.run(lambda batch: len(batch["x"]), args=(step,)), axis=None) for step in distributed
    ]
    assert [int(count) for count in counts] == [2 * (comm.size - step) for step in range(comm.size)]


@needs_ranks(2)
def test_a_replica_without_any_data_sees_empty_batches(comm, mixed):
    distributed = mixed.distribute_datasets_from_function(
        lambda context: Batches([np.ones((2, 5), np.int16)] * (0 if context.input_pipeline_id == 0 else 2))
    )
    found = [local(mixed, step) for step in distributed]
    wanted = 0 if comm.rank == 0 else 2
    assert [(batch.shape, batch.dtype) for batch in found] == [((wanted, 5), np.int16)] * 2


def test_an_iterator_ends_as_an_iterator(comm, mixed):
    distributed = mixed.experimental_distribute_dataset(mpistrat.ArrayDataset(np.arange(3.0), batch_size=2))
    iterator = iter(distributed)
    assert float(mixed.reduce("sum", next(iterator), axis=0)) == 1
    assert float(mixed.reduce("sum", iterator.get_next(), axis=0)) == 2
    with pytest.raises(OutOfRangeError, match="end"):
        iterator.get_next()
    with pytest.raises(StopIteration):
        next(iterator)
    iterator = iter(distributed)
    found = [iterator.get_next_as_optional() for _ in range(3)]
    assert [optional.has_value() for optional in found] == [True, True, False]
    assert float(mixed.reduce("sum", found[0].get_value(), axis=0)) == 1


def test_one_pipeline_for_each_replica(comm, mixed):
    seen = []
    mixed.distribute_datasets_from_function(lambda context: seen.append(context) or Batches([np.zeros(1)]))
    [context] = seen
    assert context == mpistrat.InputContext(comm.size, comm.rank, comm.size)
    for spelling in ("num_input_pipelines", "input_pipeline_id", "num_replicas_in_sync"):
        assert str(getattr(context, spelling)) in str(context)
    each, rest = divmod(10, comm.size)
    if rest:
        with pytest.raises(ValueError, match=f"10 is not divisible by {comm.size} replicas"):
            context.get_per_replica_batch_size(10)
    else:
        assert context.get_per_replica_batch_size(10) == each


@needs_ranks(2)
def test_fewer_files_than_replicas_are_refused_by_the_policy_file(comm, mixed, tmp_path):
    path = tmp_path / "rows.npy"
    np.save(path, np.arange(8).reshape(4, 2))
    options = mpistrat.InputOptions(auto_shard_policy=mpistrat.AutoShardPolicy.FILE)
    with pytest.raises(ValueError, match=r"(?i)file"):
        list(mixed.experimental_distribute_dataset(mpistrat.FileDataset([str(path)], np.load, batch_size=2), options))
    assert comm.allreduce(1) == comm.size
