"""Sums over the parts of a global batch: the same bits on any ranks, and what is refused."""

import ml_dtypes
import numpy as np
import pytest

import mpistrat
from mpistrat.errors import AgreementError, InvalidArgumentError, UnsupportedDtypeError
from mpistrat.strategy.virtual_replicas import sum_of_parts
from tests.launches import on_ranks, up_to_ranks

NUM_PARTS = 11  # no power of two, and more than rows are in the last batch
ROWS = np.random.default_rng(0).normal(size=(25, 4)) * 10.0 ** np.arange(-1, 3)
DTYPES = (np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int64, np.complex64)


def of_part(part):
    """Return sums of a part of the rows; the leaves of a dtype are apart."""
    sums = {str(np.dtype(dtype)): part.sum(0).astype(dtype) for dtype in DTYPES}
    return {"rows": len(part), "sums": sums, "outer": part.T @ part, "none": part[0:0], "mean": [part.sum(dtype=np.float32)]}


def folded(leaves):
    """Return the sum of some leaves, halves first."""
    if len(leaves) == 1:
        return leaves[0]
    middle = len(leaves) // 2
    return folded(leaves[:middle]) + folded(leaves[middle:])


def expected(batch):
    """Return what one process makes of a global batch, as a list."""
    parts = [mpistrat.structures.flatten(of_part(part))[0] for part in np.array_split(batch, NUM_PARTS)]
    found = []
    for leaves in zip(*map(list, parts), strict=True):
        arrays = [np.asarray(leaf) for leaf in leaves]
        is_half = arrays[0].dtype in mpistrat.reduction.HALF_DTYPES
        found.append(folded([each.astype(np.float32) if is_half else each for each in arrays]).astype(arrays[0].dtype))
    return found


@up_to_ranks(8)
def test_sums_have_the_bits_of_one_process(strategy):
    dataset, options = mpistrat.ArrayDataset(ROWS, 16), mpistrat.InputOptions(virtual_replicas=NUM_PARTS)

    def step(batch):
        return mpistrat.get_replica_context().sum_of_parts(of_part, batch, NUM_PARTS)

    for number, batch in enumerate(strategy.experimental_distribute_dataset(dataset, options)):
        leaves = mpistrat.structures.flatten(strategy.local(strategy.run(step, args=(batch,))))[0]
        for found, wanted in zip(leaves, expected(ROWS[16 * number :][:16]), strict=True):
            assert (found.dtype, found.shape, found.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes())


@on_ranks(3)
def test_datasets_of_every_kind_deal_out_whole_parts(comm, strategy):
    batches = [ROWS[:16], ROWS[16:]]
    for dataset in (
        mpistrat.MapDataset(list(ROWS), 16),
        mpistrat.FileDataset(["one", "two"], lambda name: ROWS[:9] if name == "one" else ROWS[9:], 16),
        batches,
        iter(batches),
    ):
        options = mpistrat.InputOptions(virtual_replicas=NUM_PARTS, auto_shard_policy=mpistrat.AutoShardPolicy.DATA)
        found = [strategy.local(each) for each in strategy.experimental_distribute_dataset(dataset, options)]
        assert [comm.allgather(len(each)) for each in found] == [[8, 5, 3], [4, 4, 1]], dataset
        assert [np.concatenate(comm.allgather(each)).tolist() for each in found] == [batch.tolist() for batch in batches]


@on_ranks(2)
def test_sums_on_gpus_have_the_bits_of_the_host(make_pair):
    pair, batch = make_pair(), ROWS[:8].astype(np.float32)
    mine = pair.up(batch[4 * pair.rank :][:4])
    found = sum_of_parts(pair.gpu, lambda part: {"sum": part[0] + part[1], "rows": len(part)}, mine, 4, None)
    assert pair.download(found["sum"]).tobytes() == folded([one + other for one, other in np.split(batch, 4)]).tobytes()
    assert found["rows"] == 8


@on_ranks(2)
@pytest.mark.parametrize("strict", [False, True])
def test_ranks_that_disagree_are_told_and_the_job_goes_on(comm, strategy, strict):
    strategy.extended.communicator.is_strict = strict

    def run(fn=of_part, num_parts=4, rows=2, options=None):
        return strategy.run(lambda: mpistrat.get_replica_context().sum_of_parts(fn, ROWS[:rows], num_parts, options))

    for refused, error, text in (
        ({"num_parts": 4 + 2 * comm.rank}, AgreementError, r"virtual_replicas=4.*virtual_replicas=6"),
        ({"fn": lambda part: {"a" if comm.rank else "b": part}}, AgreementError, "'a'.*'b'|'b'.*'a'"),
        ({"fn": lambda part: np.ones(1 + comm.rank)}, AgreementError, r"float64\[1\].*float64\[2\]"),
        ({"num_parts": 1}, InvalidArgumentError, "virtual_replicas must be at least 2, one for each rank, .*; got 1"),
        ({"num_parts": 4.5}, TypeError, "virtual_replicas must be an int"),
        ({"rows": 3 - comm.rank * 2}, InvalidArgumentError, "ranks have 3, 1 rows of a batch, and .* are 2, 2: 4 rows in 4"),
        ({"fn": lambda part: np.ones(1), "options": 7}, InvalidArgumentError, "options must be CommunicationOptions"),
        ({"fn": lambda part: part > 0}, UnsupportedDtypeError, "the result has dtype bool|SUM is not defined for the result"),
    ):
        with pytest.raises(error, match=f"(?s){text}"):
            run(**refused)
    sizes = iter([1, 2])
    with pytest.raises(InvalidArgumentError, match=r"alike arrays for all parts; got .*float64\[1\], then .*float64\[2\]"):
        run(lambda part: np.ones(next(sizes)))
    assert run(lambda part: {}) == {}
    assert strategy.local(run(len)) == 4


@on_ranks(2)
def test_parts_need_data_that_ranks_share_and_what_raises_on_one_is_told_to_the_other(strategy, comm):
    options = mpistrat.InputOptions(virtual_replicas=4)
    files = mpistrat.FileDataset(["one", "two"], lambda name: ROWS, 4)
    told = "auto_shard_policy=AUTO each rank reads other data: use AutoShardPolicy.DATA"
    with pytest.raises(InvalidArgumentError, match=told):
        strategy.experimental_distribute_dataset(files, options)
    few = mpistrat.InputOptions(virtual_replicas=1)
    with pytest.raises(InvalidArgumentError, match="virtual_replicas must be at least 2"):
        strategy.experimental_distribute_dataset(mpistrat.ArrayDataset(ROWS, 4), few)
    with pytest.raises(InvalidArgumentError, match="virtual_replicas must be at least 1; got 0"):
        mpistrat.InputOptions(virtual_replicas=0)

    def only_on_rank_0(part):
        if comm.rank == 1:
            raise ValueError("a bad row")
        return part.sum()

    with pytest.raises(ValueError if comm.rank == 1 else AgreementError, match="a bad row"):
        strategy.run(lambda: mpistrat.get_replica_context().sum_of_parts(only_on_rank_0, ROWS[:2], 4))
    comm.Barrier()
