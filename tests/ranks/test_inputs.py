"""Distributed datasets: what the ranks get, seen together."""

from itertools import islice

import numpy as np
import pytest

import mpistrat
from mpistrat.errors import AgreementError, InvalidArgumentError
from mpistrat.inputs.input_options import AutoShardPolicy, InputOptions, InputReplicationMode
from mpistrat.inputs.sources import ArrayDataset, FileDataset
from tests.launches import needs_ranks, on_ranks
from tests.ranks.conftest import MIXED

pytestmark = on_ranks(1, 3)

OFF, AUTO, FILE, DATA, HINT = AutoShardPolicy


@pytest.fixture
def lax(comm, make_strategy):
    """Give a strategy that spans all ranks and compares calls only where it must."""
    return make_strategy(STRICT="0", VIRTUAL_NODES=MIXED.get(comm.size, f"1x{comm.size}"))


@pytest.fixture(params=["lax", "strict"])
def either(request, lax):
    """Give this strategy as it is, and comparing calls before each collective."""
    lax.extended.communicator.is_strict = request.param == "strict"
    return lax


def local(strategy, element):
    return strategy.experimental_local_results(element)[0]


@pytest.mark.parametrize("kind", [list, iter, ArrayDataset], ids=["list", "iter", "arrays"])
def test_no_element_is_without_rows_on_all_ranks(comm, either, kind):
    """The last rank has one row more: the others have no data then, and it has none in its first turns of that batch."""
    mine, size = [np.ones(comm.size)] * 2 + [np.ones(1)] * (comm.rank == comm.size - 1), max(comm.size - 1, 1)
    made = ArrayDataset(np.concatenate(mine), size) if kind is ArrayDataset else kind(mine)
    dataset = either.experimental_distribute_dataset(made, InputOptions(auto_shard_policy=OFF))
    rows = np.array([len(local(either, element)) for element in dataset])
    counts = np.array(comm.allgather(rows))
    assert counts.sum(axis=0).all()
    assert counts.sum(axis=1).tolist() == [2 * comm.size] * (comm.size - 1) + [2 * comm.size + 1]
    if kind is not iter:  # the position is that behind what was left out
        list(islice(dataset, 2))
        dataset.load_state_dict(dataset.state_dict())
        assert [len(local(either, element)) for element in dataset] == rows[2:].tolist()


@pytest.mark.parametrize("kinds", [[list], [iter], [list, iter]])  # an iterator has no length to tell
def test_ranks_that_are_out_of_data_see_empty_batches(comm, either, kinds):
    """Rank r has r batches: rank 0 never sees an element of its own."""
    contexts, kind = [], kinds[comm.rank % len(kinds)]

    def make(context):
        contexts.append(context)
        return kind([{"x": np.full((2, 3), 7, np.float32), "n": np.full(2, step)} for step in range(context.input_pipeline_id)])

    dataset = either.distribute_datasets_from_function(make)
    assert contexts == [mpistrat.InputContext(comm.size, comm.rank, comm.size)]

    def step(batch):
        rows = mpistrat.get_replica_context().all_reduce("sum", np.asarray(len(batch["n"])))
        return batch["x"].shape, batch["x"].dtype.name, batch["n"].dtype.name, int(rows)

    iterator = iter(dataset)
    if comm.rank == 0:
        with pytest.raises(InvalidArgumentError, match="has not received their spec"):
            _ = iterator.element_spec
    seen = [local(either, either.run(step, args=(batch,))) for batch in iterator]
    rows = [2 if number < comm.rank else 0 for number in range(comm.size - 1)]
    totals = [2 * (comm.size - 1 - number) for number in range(comm.size - 1)]
    assert seen == [((mine, 3), "float32", "int64", total) for mine, total in zip(rows, totals, strict=True)]
    if comm.size > 1:
        spec = mpistrat.ArraySpec
        assert iterator.element_spec == {"x": spec((None, 3), np.dtype("f4")), "n": spec((None,), np.dtype(int))}
    assert not iterator.get_next_as_optional().has_value()


@needs_ranks(2)
@pytest.mark.parametrize("buffer_size", [0, 1])
@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("step", [2, 0], ids=["in the epoch", "before it"])
def test_an_iterable_that_fails_on_one_rank_ends_the_iteration_on_all(comm, either, culprit, buffer_size, step):
    class Failing:
        def __iter__(self):
            whole = [np.arange(8)] * 4
            return self.fail() if comm.rank == culprit and step == 0 else map(self.checked, whole, range(4))

        def checked(self, batch, number):
            return self.fail() if comm.rank == culprit and number == step else batch

        def fail(self):
            raise OSError(f"the disk of rank {comm.rank} is gone")

    options = InputOptions(experimental_per_replica_buffer_size=buffer_size)
    taken = []
    is_mine = comm.rank == culprit
    message = "" if is_mine else f"rank {culprit}: the next element.*OSError: "
    with pytest.raises(OSError if is_mine else AgreementError, match=rf"(?s){message}the disk of rank {culprit} is gone"):
        taken.extend(either.experimental_distribute_dataset(Failing(), options))
    assert len(taken) == step
    either.extended.communicator.barrier()


@needs_ranks(2)
def test_what_makes_no_dataset_or_another_one_on_one_rank_raises_on_all(comm, either):
    def make(context):
        if context.input_pipeline_id == 1:
            raise FileNotFoundError("part-1")
        return [np.zeros(2)]

    with pytest.raises(FileNotFoundError if comm.rank == 1 else AgreementError, match="part-1"):
        either.distribute_datasets_from_function(make)
    source = ArrayDataset(np.arange(4), 2) if comm.rank else None
    with pytest.raises(AgreementError if comm.rank else TypeError, match="a dataset is a mpistrat.ArrayDataset"):
        either.experimental_distribute_dataset(source)
    last = comm.rank == comm.size - 1
    for dataset, options in (
        ([np.arange(4)] * (1 + last), None),
        (FileDataset([f"{last:d}"], np.load, 4), InputOptions(auto_shard_policy=DATA)),
        (ArrayDataset(np.arange(8), 4), InputOptions(auto_shard_policy=OFF if last else DATA)),
    ):
        with pytest.raises(AgreementError, match=r"ranks made different calls(?s:.*)experimental_distribute_dataset\("):
            either.experimental_distribute_dataset(dataset, options)


@needs_ranks(2)
def test_in_strict_mode_a_rank_that_stops_early_is_noticed(comm, lax):
    lax.extended.communicator.is_strict = True
    iterator = iter(lax.experimental_distribute_dataset(ArrayDataset(np.arange(8), 4)))
    next(iterator)
    with pytest.raises(AgreementError, match="the next element of a DistributedIterator .number 1 of epoch 0"):
        lax.extended.communicator.barrier() if comm.rank == 0 else next(iterator)


def test_a_mirrored_strategy_takes_one_pipeline_for_each_replica(comm, make_strategy):
    strategy = make_strategy(mpistrat.MirroredStrategy, VIRTUAL_NODES=f"1x{comm.size}")
    options = InputOptions(False, InputReplicationMode.PER_REPLICA, True)
    dataset = strategy.distribute_datasets_from_function(lambda context: [np.full(2, context.input_pipeline_id)], options)
    assert [local(strategy, batch).tolist() for batch in dataset] == [[comm.rank] * 2]
    with pytest.raises(NotImplementedError, match=r"only; got MirroredStrategy\.experimental_distribute_dataset"):
        strategy.experimental_distribute_dataset(ArrayDataset(np.arange(2), 2), options)
