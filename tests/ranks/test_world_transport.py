"""All-reduces over all ranks, by windows and leaders or by MPI: right for every dtype and shape, never of another call."""

import time

import numpy as np
import pytest
from mpi4py import MPI

from mpistrat.errors import AgreementError, UnavailableError
from mpistrat.groups.agreement import CallsDifferError, digest_of
from mpistrat.reduction import ReduceOp, combine
from mpistrat.steps import drive
from mpistrat.testing.transport_suite import DTYPES, inputs, operations
from mpistrat.transports import mpi_world
from mpistrat.transports.small import RADICES, SmallAllReduce
from mpistrat.transports.window import NodeWindow
from tests.launches import needs_ranks, up_to_ranks

pytestmark = needs_ranks(2)


@pytest.fixture
def transport(hierarchy):
    window = NodeWindow(hierarchy.intra) if hierarchy.intra.size > 1 else None
    transport = mpi_world.WorldTransport(hierarchy, window)
    yield transport
    transport.close()
    if window is not None:
        window.dispose()


@pytest.fixture
def small(transport, world):
    assert transport.small.serves(8) == (world.num_nodes == 1 or world.num_nodes in RADICES)
    if not transport.small.serves(8):
        pytest.skip("so many nodes are joined by MPI")
    return transport.small


@up_to_ranks(8)
@pytest.mark.parametrize("way", ["by slots", "by MPI", "by MPI, with the digest"])
def test_every_dtype_operation_and_shape(transport, request, comm, way):
    small = request.getfixturevalue("small") if way == "by slots" else transport.small
    shapes = [(), (1,), (3,), (2, 3), (17, 5, 2)]
    cases = [(dtype, op) for dtype in DTYPES if dtype.kind != "V" for op in operations(dtype)]
    for seed, (dtype, op) in enumerate(cases):
        shape = shapes[seed % len(shapes)]
        given = inputs(dtype, op, int(np.prod(shape, dtype=int)), comm.size, seed)
        total = combine(op).reduce(given, axis=0, dtype=given.dtype).reshape(shape)
        mine = given[comm.rank].reshape(shape)
        if way == "by slots":
            bound = SmallAllReduce(small, op, dtype, shape)
        else:
            bound = mpi_world.MpiAllReduce(transport, op, dtype, shape, transport.window, carries_digest=way != "by MPI")
        small.call.digest = digest_of(str(seed))

        def by_steps(source, target, bound=bound, shape=shape, dtype=dtype):
            target = np.empty(shape, dtype) if target is None else target
            drive(bound.steps(source, target), lambda: "a sum", 30.0)
            return target

        for run in (bound.blocking(), by_steps, bound.blocking()):
            found = run(mine, None)
            assert isinstance(found, np.ndarray)
            assert found.shape == shape
            assert (found == total).all(), (dtype, op, shape)
            for source, target in ((mine, np.empty(shape, dtype)), (in_place := mine.copy(), in_place)):
                assert run(source, target) is target
                assert (target == total).all(), (dtype, op, shape)


def test_some_ranks_may_block_while_others_take_steps(small, comm):
    bound = SmallAllReduce(small, *_sum_of(100))
    blocking = bound.blocking()
    for turn in range(20):
        mine, target = np.full(100, comm.rank + turn), np.empty(100)
        if (turn + comm.rank) % 2:
            blocking(mine, target)
        else:
            drive(bound.steps(mine, target), lambda: "small", 30.0)
        assert (target == sum(range(comm.size)) + turn * comm.size).all()


@up_to_ranks(8)
def test_a_result_stays_as_it_is_while_peers_are_late(small, comm):
    count = small.most_bytes // 8
    run = SmallAllReduce(small, *_sum_of(count)).blocking()
    results = []
    for turn in range(6):
        time.sleep(0.01 * ((comm.rank + turn) % comm.size))
        results.append(run(np.full(count, turn * (comm.rank + 1.0)), None))
    ranks = sum(range(1, comm.size + 1))
    assert all((result == turn * ranks).all() for turn, result in enumerate(results))


@up_to_ranks(8)
def test_ranks_of_a_node_in_different_calls_are_told_before_anything_is_read(small, hierarchy):
    if all(len(node.ranks) == 1 for node in hierarchy.world.nodes):
        pytest.skip("no ranks share memory")
    if hierarchy.intra.size == 1:
        return  # and the ranks of other nodes find out among themselves
    run = SmallAllReduce(small, *_sum_of(5)).blocking()
    target = np.full(5, -1.0)
    small.call.digest = digest_of("odd" if hierarchy.intra.rank == 1 else "even")
    with pytest.raises(CallsDifferError) as caught:
        run(np.ones(5), target)
    assert len(set(caught.value.digests)) == 2
    assert (target == -1).all()


@up_to_ranks(8)
@pytest.mark.parametrize("dtype", ["float32", "float64", "longdouble", "complex64", "clongdouble", "int32", "uint64"])
@pytest.mark.parametrize("op", ["SUM", "MAX"])
def test_no_result_of_mpi_is_of_different_calls(transport, comm, dtype, op):
    if np.dtype(dtype).kind == "c" and op == "MAX":
        pytest.skip("complex numbers have no order")
    run = mpi_world.MpiAllReduce(transport, ReduceOp[op], np.dtype(dtype), (5,), None, carries_digest=True).blocking()
    call, source, wanted = transport.group.call, np.ones(5, dtype), comm.size if op == "SUM" else 1
    alike, apart = digest_of("all"), [{odd: digest_of("odd")} for odd in range(comm.size)]
    for digests in [*apart, {0: alike + 2, 1: alike - 2}, {}]:  # two that add up to what the others expect
        call.digest = digests.get(comm.rank, alike)
        target = np.zeros(5, dtype)
        if not digests:
            assert (run(source, target) == wanted).all()
            continue
        with pytest.raises(CallsDifferError):
            run(source, target)
        assert (target == 0).all()


@pytest.mark.ranks(nodes="8x1")
@pytest.mark.parametrize("size", [1, 10_000])
def test_between_many_nodes_calls_are_told_before_a_result(ops, size, comm):
    ops.is_strict = False
    for op in (ReduceOp.SUM, ReduceOp.MAX):
        for _ in range(3):
            ops.all_reduce(op, [np.ones(size, np.float32)])
    assert bool(ops.hierarchy.call.unconfirmed) == (size > 1000)
    told, odd = r"(?s)ranks 0-6: all_reduce\(SUM.*rank 7: all_reduce\(MAX", comm.rank == 7

    def differ():
        ops.all_reduce(ReduceOp.MAX if odd else ReduceOp.SUM, [np.ones(size, np.float32)])
        ops.confirm()  # of large ones

    with pytest.raises(AgreementError, match=told):
        differ()


def test_what_is_too_long_or_empty_goes_by_mpi(transport):
    assert not transport.small.serves(transport.small.most_bytes + 1)
    assert not transport.small.serves(0)


@up_to_ranks(3)
@pytest.mark.parametrize("count", [1, 5000, 300_000])
@pytest.mark.parametrize("warm", [False, True])
def test_another_length_is_told_on_every_rank(ops, monkeypatch, count, warm, comm):
    ops.is_strict = False
    sizes = (count, count + 1)
    for size in sizes if warm else ():
        for _ in range(3):
            ops.all_reduce(_sum_of(1)[0], [np.ones(size)])
    odd = comm.rank == comm.size - 1
    if ops.world.num_nodes > 1 and (ops.world.nodes[-1].ranks == (comm.size - 1,) or ops.world.num_nodes not in RADICES):
        pytest.skip("between nodes the watcher tells, which tests/disagreements sees")
    if ops.world.num_nodes > 1 and warm:
        pytest.skip("ranks of other nodes are told by the watcher")
    with pytest.raises(AgreementError, match="ranks made different calls"):
        ops.all_reduce(_sum_of(1)[0], [np.ones(sizes[odd])])
    if warm:
        with pytest.raises(UnavailableError, match="an earlier all_reduce did not end"):
            ops.all_reduce(_sum_of(1)[0], [np.ones(count)])


def test_the_ranks_stand_in_the_order_of_their_nodes(transport, world, comm):
    ordered = tuple(rank for node in world.nodes for rank in node.ranks)
    assert transport.group.ranks == ordered
    assert tuple(transport.group.comm.allgather(comm.rank)) == ordered


def test_one_node_needs_no_communicators_and_close_frees_the_others(transport, hierarchy, world):
    own = list(transport._own)
    assert bool(own) == (world.num_nodes > 1)
    transport.close()
    assert all(comm == MPI.COMM_NULL for comm in own)
    assert (transport.group is hierarchy.world_group) == (world.num_nodes == 1)


def test_collectives_that_one_rank_has_chosen_stay_as_they_are(hierarchy, comm, monkeypatch):
    if comm.rank == comm.size - 1:
        monkeypatch.setenv("OMPI_MCA_coll_han_priority", "35")
    assert not mpi_world._may_advise(hierarchy)


def _sum_of(count):
    return ReduceOp.SUM, np.dtype(np.float64), (count,)
