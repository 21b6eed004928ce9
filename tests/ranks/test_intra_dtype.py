"""intra_dtype="native": 16-bit floats on GPUs are combined in their own dtype inside nodes. The stand-in's streams dawdle."""

from itertools import cycle, product

import numpy as np
import pytest

from mpistrat.arrays import part_bounds
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.errors import AgreementError
from mpistrat.reduction import HALF_DTYPES, ReduceOp, combine
from mpistrat.topology.world import World
from tests.launches import needs_ranks, up_to_ranks

pytestmark = [up_to_ranks(4), needs_ranks(2)]

SUM, MEAN, PROD = ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.PROD
OPS = (SUM, MEAN, PROD)
NATIVE = CommunicationOptions(intra_dtype="native")
ROUNDING = dict(zip(HALF_DTYPES, (2.0**-11, 2.0**-8), strict=True))


@pytest.fixture
def node(make_pair):
    """Give collectives on one node, joined by NCCL."""
    return make_pair()


def given(dtype, shape, rank):
    """Return values that are not added, nor multiplied, without rounding, and no product of which is out of range."""
    return np.random.default_rng(rank).uniform(0.5, 2, shape).astype(dtype)


def check(op, found, arrays):
    """Check a result against NumPy's of the arrays of all ranks: each operation may round once."""
    wide = np.stack(arrays).astype(np.float64)
    expected = combine(op).reduce(wide, axis=0) / (len(arrays) if op is MEAN else 1)
    bound = len(arrays) * ROUNDING[found.dtype] * expected * (1 + 2.0**-6)  # all values are positive
    assert found.shape == expected.shape
    assert (np.abs(found.astype(np.float64) - expected) <= bound).all()


def reduce_and_check(pair, op, shapes, dtype, options=NATIVE):
    """All-reduce arrays of these shapes out of place and in place, and return what the last ones were."""
    arrays = [pair.up(given(dtype, shape, 10 * pair.rank + index)) for index, shape in enumerate(shapes)]
    for out in (None, arrays):
        results = [pair.device.get(array) for array in pair.gpu.all_reduce(op, arrays, options, out=out)]
        for index, (result, shape) in enumerate(zip(results, shapes, strict=True)):
            check(op, result, [given(dtype, shape, 10 * rank + index) for rank in range(pair.size)])
            assert len(set(pair.comm.allgather(result.tobytes()))) == 1
    return results


def test_nccl_works_on_the_arrays_themselves_or_packed_and_without_the_option_gets_twice_the_bytes(node):
    for dtype, op in product(HALF_DTYPES, OPS):
        reduce_and_check(node, op, [(1003,)], dtype)
        nbytes, calls = node.library.nbytes, node.library.calls.copy()
        reduce_and_check(node, op, [(1003,)], dtype)
        assert node.library.calls - calls == {"allReduce": 2}
        assert node.library.nbytes - nbytes == 2 * 1003 * dtype.itemsize
        assert [pack.dtype for pack in node.gpu.explain(node.up(given(dtype, 7, 0)), NATIVE).packs] == [dtype.name]
    assert node.gpu.memory_report().device_bytes == 0, "an array was packed"
    for dtype in HALF_DTYPES:
        nbytes = node.library.nbytes
        reduce_and_check(node, SUM, [(1003,)], dtype, CommunicationOptions())
        assert node.library.nbytes - nbytes >= 2 * 1003 * 4
    for op, dtype in product(OPS, HALF_DTYPES):
        nbytes = node.library.nbytes
        reduce_and_check(node, op, [(5, 3), (), (0,), (700,)], dtype)
        # a bucket is padded to as many elements as there are shards
        assert 2 * 716 * 2 <= node.library.nbytes - nbytes < 2 * (716 + node.size) * 2


def test_it_is_nccl_that_rounds_also_a_part_of_the_sum_for_each_rank(node):
    """256 + 1 is no bfloat16, and float32 would make it 256 + size - 1."""
    array = np.array([256.0 if node.rank == 0 else 1.0], HALF_DTYPES[1])
    found = [node.device.get(node.gpu.all_reduce(SUM, node.up(array), options))[0] for options in (NATIVE, None)]
    assert found[1] == np.array(256 + node.size - 1, array.dtype)
    if node.size == 2:
        assert found[0] == 256
    for dtype, op, rows in product(HALF_DTYPES, OPS, (4 * node.size, 4 * node.size + 1)):
        nbytes = node.library.nbytes
        found = node.device.get(node.gpu.reduce_scatter(op, node.up(given(dtype, (rows, 3), node.rank)), options=NATIVE))
        assert node.library.nbytes - nbytes == rows * 3 * 2
        first, stop = part_bounds(rows, node.size)[node.rank : node.rank + 2]
        check(op, found, [given(dtype, (rows, 3), rank)[first:stop] for rank in range(node.size)])


@pytest.mark.ranks(nodes=["1+1", "2+1", "3+1", "2x2"])
@pytest.mark.parametrize("between", ["nccl", "mpi"])
def test_every_algorithm_between_nodes(make_pair, shape, between):
    intra = "cuda_ipc" if (shape, between) == ("2x2", "mpi") else "nccl"
    world, ops = World.from_shape(shape), cycle(OPS)
    pair = make_pair(world, INTRA_TRANSPORT=intra, INTER_TRANSPORT="nccl" if between == "nccl" else "auto", CHUNK_BYTES="4096")
    for algorithm, dtype in product(("flat", "hierarchical"), HALF_DTYPES):
        options = CommunicationOptions(algorithm=algorithm, intra_dtype="native")
        reduce_and_check(pair, next(ops), [(3000,), (3, 3)], dtype, options)
        [pack] = pair.gpu.explain([pair.up(given(dtype, 3000, 0))], options).packs
        assert pack.dtype == ("float32" if between == "mpi" and algorithm == "flat" else dtype.name)
    reduce_and_check(pair, SUM, [(7,)], HALF_DTYPES[0])


def test_sums_of_nodes_are_added_in_float32(comm, make_pair):
    """Between nodes a sum is rounded once."""
    if comm.size < 4:
        pytest.skip("several nodes of several ranks, or more than two nodes, are four ranks")
    pair = make_pair("2+1+1")
    array = np.array([[128.0, 128.0, 1.0, 1.0][pair.rank]], HALF_DTYPES[1])
    options = CommunicationOptions(algorithm="hierarchical", intra_dtype="native")
    assert pair.device.get(pair.gpu.all_reduce(SUM, pair.up(array), options))[0] == 258


def test_ranks_with_another_option_are_told(comm, make_pair):
    pair = make_pair()
    array = pair.up(given(HALF_DTYPES[0], 10, 0))
    with pytest.raises(AgreementError, match=r"all_reduce\(SUM, .*intra_dtype=native"):
        pair.gpu.all_reduce(SUM, array, NATIVE if pair.rank == 1 else None)
    comm.Barrier()


@pytest.mark.parametrize("transport", ["nccl", "cuda_ipc", "staged"])
def test_what_it_does_not_concern_is_as_without_it(make_pair, transport):
    pair = make_pair(INTRA_TRANSPORT=transport)
    for dtype in HALF_DTYPES:
        array = given(dtype, 300, pair.rank)
        # cuda_ipc sums in registers, in float32
        ops = [ReduceOp.MIN, ReduceOp.MAX] + ([SUM] if transport != "nccl" else [])
        for op in ops:
            pair.compare(op, [array], NATIVE)
        without, native = pair.host.all_reduce(SUM, [array] * 2), pair.host.all_reduce(SUM, [array] * 2, NATIVE)
        np.testing.assert_array_equal(without, native)
