"""IndexedSlices over real collectives: any number of rows on each rank, and errors on all of them."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

from mpistrat.communicator.options import CommunicationOptions
from mpistrat.communicator.sparse import IndexedSlices, all_reduce_slices, broadcast_slices
from mpistrat.errors import AgreementError, UnsupportedDtypeError
from mpistrat.reduction import ReduceOp
from tests.launches import needs_ranks, on_ranks
from tests.ranks.test_properties import check_examples

pytestmark = on_ranks(1, 3)

SUM, MEAN = ReduceOp.SUM, ReduceOp.MEAN


def made(rank, num_rows, num_indices, width=2, dtype=np.float64):
    """Return slices with small integers in them, some indices more than once."""
    random = np.random.default_rng(1000 * rank + num_rows)
    values = random.integers(-4, 4, (num_rows, width)).astype(dtype)
    return IndexedSlices(values, random.integers(0, num_indices, num_rows), (num_indices, width))


def test_all_ranks_have_the_same_bits_of_sums_and_broadcasts(comm, ops):
    random = np.random.default_rng(ops.rank)
    slices = IndexedSlices(random.normal(size=(50, 3)).astype(np.float32), random.integers(0, 9, 50), (9, 3))
    result = all_reduce_slices(ops, MEAN, slices)
    again = all_reduce_slices(ops, MEAN, slices, CommunicationOptions(algorithm="flat", bytes_per_pack=1))
    assert len({*comm.allgather(result.values.tobytes()), *comm.allgather(again.values.tobytes())}) == 1
    for dtype, whole in ((np.float16, 2048), (ml_dtypes.bfloat16, 256)):
        values = np.array([whole if ops.rank == 0 else 1, 1], dtype)
        result = all_reduce_slices(ops, SUM, IndexedSlices(values, [4, 4], (5,)))
        assert result.values == np.float32(whole + 2 * ops.size - 1).astype(dtype)
    [mean] = all_reduce_slices(ops, MEAN, IndexedSlices(np.full(1, 60_000, np.float16), [0])).values
    assert mean == 60_000, "the sum is beyond the largest float16"
    [mean] = all_reduce_slices(ops, MEAN, IndexedSlices(np.full(1, -100, np.int8), [0])).values
    assert mean == -100, "integers are summed in 64 bits"
    root = ops.size - 1
    copy = broadcast_slices(ops, made(ops.rank, ops.rank, 9), root)
    assert (copy.to_dense() == made(root, root, 9).to_dense()).all()
    assert len(copy.indices) == root


@needs_ranks(2)
@pytest.mark.parametrize("strict", ["0", "1"])
def test_what_differs_is_told_to_all(comm, make_ops, strict):
    ops = make_ops(STRICT=strict)
    first = comm.rank == 0
    variants = [
        (IndexedSlices(np.ones((1, 2)), [0], (4 if first else 5, 2)), r"rank 0: .*dense_shape=\(4, 2\)"),
        (IndexedSlices(np.ones((1, 2)), [0], (4, 2) if first else None), "dense_shape=None"),
        (IndexedSlices(np.ones((1, 2)), [0], None if first else (4, 2)), r"rank 0: .*dense_shape=None"),
        (IndexedSlices(np.ones((1, 2 if first else 3)), [0]), r"rank 0: .*rows of shape \(2,\)"),
        (IndexedSlices(np.ones((1, 2), "f4" if first else "f8"), [0]), "rank 0: .*float32 rows"),
    ]
    for slices, message in variants:
        with pytest.raises(AgreementError, match=message):
            all_reduce_slices(ops, SUM, slices)
    # one rank cannot make the call: nobody waits for it
    bad = IndexedSlices(np.ones(1, bool if first else float), [0])
    error, message = (UnsupportedDtypeError, "MEAN is not defined for") if first else (AgreementError, "which failed: Unsupp")
    with pytest.raises(error, match=message):
        all_reduce_slices(ops, MEAN, bad)
    with pytest.raises(NotImplementedError, match=r"MAX of IndexedSlices\(.*is not supported"):
        all_reduce_slices(ops, ReduceOp.MAX, IndexedSlices([1.0], [0]))
    assert all_reduce_slices(ops, SUM, IndexedSlices([1.0], [0])).values.tolist() == [comm.size]


def test_any_lengths_and_dtypes(mixed, comm):
    def check(lengths, dtype, op):
        parts = [made(rank, lengths[rank], 5, dtype=dtype) for rank in range(mixed.size)]
        result = all_reduce_slices(mixed, op, parts[mixed.rank])
        wide = np.complex128 if dtype is np.complex128 else np.int64
        total = np.zeros((5, 2), wide)
        for part in parts:
            np.add.at(total, part.indices, part.values.astype(wide))
        if op is MEAN:
            exact = total / mixed.size if np.dtype(dtype).kind not in "i" else np.trunc(total / mixed.size)
            total = exact.astype(np.float32) if np.dtype(dtype).itemsize == 2 else exact
        expected = total.astype(dtype)
        assert (result.to_dense() == expected).all()
        assert result.dtype == dtype
        assert result.indices.tolist() == sorted({int(index) for part in parts for index in part.indices})

    lengths = st.lists(st.integers(0, 12), min_size=8, max_size=8)
    dtypes = st.sampled_from([np.float16, np.float32, np.int8, np.int64, np.complex128, ml_dtypes.bfloat16])
    check_examples(comm, "", check, lengths, dtypes, st.sampled_from([SUM, MEAN]), most=25)
