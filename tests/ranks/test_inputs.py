"""Distributed datasets: what the ranks get, seen together."""

import numpy as np

import mpistrat
from mpistrat.inputs.shard import shard_bounds


def test_every_row_is_seen_once_in_every_epoch(comm, strategy):
    data = np.random.default_rng(5).normal(size=(29, 3)).astype(np.float32)
    dataset = mpistrat.ArrayDataset({"x": data, "row": np.arange(29)}, batch_size=8, shuffle=True, seed=1)
    batches = strategy.experimental_distribute_dataset(dataset)
    orders = []
    for epoch in range(2):
        seen = []
        for global_batch, batch in zip(dataset.batches(epoch), batches, strict=True):
            gathered = strategy.gather(batch, axis=0) if comm.size > 1 else batch
            np.testing.assert_array_equal(gathered["row"], global_batch["row"])
            np.testing.assert_array_equal(gathered["x"], data[gathered["row"]])
            seen += gathered["row"].tolist()
        assert sorted(seen) == list(range(29))
        orders.append(seen)
    assert orders[0] != orders[1]


def test_the_step_gets_this_replicas_share(comm, strategy):
    batches = strategy.experimental_distribute_dataset(mpistrat.ArrayDataset(np.arange(10), batch_size=4))
    shares = [strategy.experimental_local_results(strategy.run(lambda batch: batch, args=(batch,)))[0] for batch in batches]
    expected = []
    for first, rows in ((0, 4), (4, 4), (8, 2)):
        start, stop = shard_bounds(rows, comm.rank, comm.size)
        expected.append(list(range(first + start, first + stop)))
    assert [share.tolist() for share in shares] == expected


def test_all_ranks_take_the_same_number_of_steps(comm, strategy):
    dataset = mpistrat.ArrayDataset(np.arange(2 * comm.size + 1), batch_size=2)
    batches = strategy.experimental_distribute_dataset(dataset)

    def step(batch):
        return mpistrat.get_replica_context().all_reduce("sum", np.asarray(batch.sum()))

    totals = [int(strategy.experimental_local_results(strategy.run(step, args=(batch,)))[0]) for batch in batches]
    assert len(totals) == len(batches) == comm.size + 1
    assert sum(totals) == sum(range(2 * comm.size + 1))
