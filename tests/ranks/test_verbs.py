"""The verbs beside all_reduce, on every node shape, against what one process makes of all arrays."""

import tracemalloc
from itertools import product

import ml_dtypes
import numpy as np
import pytest

import mpistrat
from mpistrat.algorithms.planners import SCATTER_FROM_BYTES
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.errors import CollectiveError
from mpistrat.reduction import HALF_DTYPES, ReduceOp
from mpistrat.testing.transport_suite import DTYPES, operations
from mpistrat.transports import shared_memory
from tests.gpu import verbs_rank
from tests.launches import needs_ranks, on_ranks, up_to_ranks
from tests.ranks.test_all_reduce import expected, rows, same_bits

SUM, MEAN = ReduceOp.SUM, ReduceOp.MEAN


@up_to_ranks(8)
def test_every_verb_gives_what_numpy_makes_of_all_arrays(strategy, monkeypatch):
    monkeypatch.setattr(verbs_rank, "SHAPES", verbs_rank.SMALL_SHAPES)
    monkeypatch.setattr(verbs_rank, "DTYPES", ("float32", "int16", "complex64", ml_dtypes.bfloat16))
    assert verbs_rank.check(strategy)["compared"] > 200


def test_the_number_of_an_axis_or_a_root_may_be_of_any_type(mixed):
    mixed.is_strict = False
    mine = np.arange(12.0).reshape(3, 4) * (mixed.rank + 1)
    wanted = np.array_split(np.arange(12.0).reshape(3, 4) * sum(range(mixed.size + 1)), mixed.size, 1)[mixed.rank]
    for axis in (True, 1, np.int64(1), True, np.array(1)):
        for turn in range(3):
            mixed.timeline.enabled = turn == 2 and mixed.rank == 0  # this rank alone looks at the call closely
            assert same_bits(mixed.reduce_scatter(SUM, mine, axis), wanted), axis
    mixed.timeline.enabled = False
    with pytest.raises(TypeError, match=r"axis must be an int; got 1\.0"):
        mixed.reduce_scatter(SUM, mine, 1.0)
    last = mixed.size - 1
    for root in (last, np.int64(last), np.array(last)):
        assert mixed.broadcast(np.full(3, mixed.rank), root).tolist() == [last] * 3
        assert (mixed.gather(np.full(3, mixed.rank), root) is None) == (mixed.rank != last)


def array_of(rank, turn, axis=0):
    """Return the array of a rank in a turn: of none to hundreds of bytes, now and then of kilobytes."""
    rows = (rank + turn) % 4 if turn % 5 else 400 * rank
    return np.moveaxis(np.arange(rows * 6.0).reshape(rows, 3, 2) + 100 * rank + turn, 0, axis)


@up_to_ranks(4)
def test_calls_may_move_arrays_of_other_extents_than_the_last(make_ops, world):
    ops = make_ops(world, STRICT="0")
    rank, ranks = ops.rank, range(ops.size)
    for turn in range(20):
        axis, root = turn % 3, turn % ops.size
        gathered = np.concatenate([array_of(other, turn, axis) for other in ranks], axis)
        assert same_bits(ops.all_gather(array_of(rank, turn, axis), axis), gathered)
        out = np.empty(gathered.shape)
        assert ops.all_gather(array_of(rank, turn, axis), axis, out=out) is out
        assert same_bits(out, gathered)
        given = array_of(rank, turn) if rank == root or turn % 2 else np.zeros(0, np.float32)
        assert same_bits(ops.broadcast(given, root), array_of(root, turn))
        found = ops.gather(array_of(root, turn) + rank, root)
        assert (found is None) == (rank != root)
        assert all(same_bits(one, array_of(root, turn) + other) for other, one in enumerate(found or ()))
        received = ops.all_to_all([array_of(rank, turn + to) for to in ranks])
        assert all(map(same_bits, received, [array_of(other, turn + rank) for other in ranks]))


@on_ranks(2, 3)
def test_ranks_that_move_arrays_in_different_calls_are_told(comm, monkeypatch):
    monkeypatch.setenv("MPISTRAT_STRICT", "0")
    communicator = mpistrat.Communicator(comm)
    verbs = communicator.all_gather, communicator.broadcast
    for verb in verbs * 2:
        verb(np.ones(2))
    with pytest.raises(CollectiveError, match=r"(?s)all_gather\(float64.*broadcast\(root=0\)"):
        verbs[comm.rank == 1](np.ones(2))


@on_ranks(2, 3)
def test_an_array_that_is_gathered_may_lie_anywhere_in_out(comm):
    communicator, rank, size, count = mpistrat.Communicator(comm), comm.rank, comm.size, 20_000
    wanted = np.repeat(np.arange(1.0, size + 1), count)
    for place in range(size):  # in turn each rank's own, and those of others
        out = np.zeros(size * count)
        first = (rank + place) % size * count
        mine = out[first : first + count] if rank % 2 == 0 else np.empty(count)  # on some ranks it lies elsewhere
        mine[:] = rank + 1
        assert same_bits(communicator.all_gather(mine, out=out), wanted), place
    communicator.close()


def test_calls_are_counted(mixed):
    mixed.is_strict = False
    before = mixed.num_collectives
    array = np.ones(3, np.float32)
    for _ in range(3):
        mixed.all_reduce(SUM, [array])
        mixed.all_reduce(SUM, [array], out=[np.empty_like(array)])
    mixed.barrier()
    mixed.broadcast(array)
    mixed.agree("this")
    assert mixed.num_collectives == before + 9


ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


@up_to_ranks(8)
def test_a_wire_dtype_rounds_between_nodes_and_nowhere_else(ops, world):
    given = np.random.default_rng(3).normal(size=(world.size, 30_001)).astype(np.float32)
    node_sums = np.array([given[list(node.ranks)].astype(np.float64).sum(0) for node in world.nodes])
    for wire, op in product(ROUNDOFF, (SUM, MEAN)):
        options = CommunicationOptions(algorithm="hierarchical", wire_dtype=wire)
        divisor = world.size if op is MEAN else 1
        half = np.full(100, ops.rank + 1, ml_dtypes.bfloat16)
        arrays = [given[ops.rank], given[ops.rank, :7], given[ops.rank].astype(np.float64), half]
        results = ops.all_reduce(op, arrays, options)
        exact = node_sums.sum(0) / divisor
        error = np.abs(results[0] - exact)
        bound = ROUNDOFF[wire] * (np.abs(node_sums).sum(0) + np.abs(node_sums.sum(0))) / divisor * 1.01 + 1e-5
        assert (error <= bound).all()
        assert (error.max() > 1e-4) == (world.num_nodes > 1), "nothing was cast, or what need not be"
        assert [result.dtype for result in results] == [array.dtype for array in arrays]
        assert (results[3] == world.size * (world.size + 1) / 2 / divisor).all(), "16-bit floats are sent as they are"
        assert results[0][:7].tobytes() == results[1].tobytes()
        assert np.abs(results[2] - exact).max() < 1e-12, "float64 is sent as it is"
        same_everywhere = ops.all_gather(results[0][None])
        assert (same_everywhere == same_everywhere[0]).all()
        assert ops.all_reduce(ReduceOp.MAX, [given[ops.rank]], options)[0].tobytes() == given.max(0).tobytes()


def test_what_float16_cannot_hold_is_infinite_on_all_replicas_and_in_that_call_alone(ops, world):
    given = np.zeros((world.size, 5), np.float32)
    given[:] = [30_000, -30_000, 1, 0, 0]
    given[:, 3] = 40_000 * (-1.0) ** np.arange(world.size)
    given[0, 4], given[-1, 4] = 1e5, given[-1, 4] - 1e5  # infinite of both signs where they are on two nodes
    options = CommunicationOptions(algorithm="hierarchical", wire_dtype="float16")
    narrow = np.float16 if world.num_nodes > 1 else np.float32
    with np.errstate(over="ignore", invalid="ignore"):
        sums = [given[list(node.ranks)].sum(0).astype(narrow).astype(np.float32) for node in world.nodes]
        total = sum(sums[1:], sums[0]).astype(narrow).astype(np.float32)
    for op, wanted in ((SUM, total), (MEAN, total / world.size)):
        [found] = ops.all_reduce(op, [given[ops.rank]], options)
        assert np.array_equal(found, wanted, equal_nan=True), (found, wanted)
    [after] = ops.all_reduce(SUM, [np.ones(5, np.float32)], options)
    assert (after == world.size).all()


@needs_ranks(2)
def test_a_flat_all_reduce_has_nothing_to_cast(comm, make_ops):
    ops = make_ops(f"{comm.size}x1")
    told = "wire_dtype='float16' needs a step between nodes, which algorithm 'flat' does"
    with pytest.raises(mpistrat.errors.InvalidArgumentError, match=told):
        ops.all_reduce(SUM, [np.ones(3)], CommunicationOptions(algorithm="flat", wire_dtype="float16"))


ALWAYS = CommunicationOptions(algorithm="hierarchical")
LARGE = SCATTER_FROM_BYTES // 2 + 7  # elements: of float32 more than a MiB, so that arrays of peers are read where they lie


def sliced(ops, op, array, axis=0, options=None):
    """Return this rank's part of an all-reduce."""
    return np.array_split(ops.all_reduce(op, array, options), ops.size, axis)[ops.rank]


def phases(ops, call):
    ops.timeline.enabled, ops.timeline.events[:] = True, []
    call()
    ops.timeline.enabled = False
    return {event.name.split(" rail")[0] for event in ops.timeline.events} - {"copy in", "copy out"}


def own_phases(world):
    """Return the phases of a large reduce-scatter on these nodes; those of an all-reduce where it needs one: none."""
    if not world.is_uniform or world.size == 1:
        return set()
    inside = {"intra reduce_scatter"} if world.num_shards > 1 else set()
    return inside | ({"inter reduce_scatter"} if world.num_nodes > 1 else set())


@pytest.mark.ranks(nodes=["1x2", "2x1", "2+1", "4x2:cyclic"])
@pytest.mark.parametrize("extent", [1, 1033])
def test_every_operation_and_dtype_gives_the_part_of_a_sum(ops, world, extent):
    # many ranks divide arrays otherwise, but add as few do
    for dtype in (*DTYPES, *HALF_DTYPES) if world.size <= 4 else (np.dtype(np.float64), *HALF_DTYPES):
        for op in operations(dtype):
            given = rows(dtype, op, 3 * extent, world.size, 3)
            mine, total = given[ops.rank].reshape(extent, 3), expected(op, given).reshape(extent, 3)
            for axis in (0, -1):
                part = ops.reduce_scatter(op, mine, axis, ALWAYS)
                assert same_bits(part, np.array_split(total, ops.size, axis)[ops.rank]), (op, dtype, axis)
                assert part.flags.c_contiguous


def test_a_large_array_is_reduced_without_an_all_reduce_unless_results_must_not_depend_on_the_way(ops, world):
    mine = np.arange(LARGE, dtype=np.float32) % 1013 * (ops.rank + 1)
    found = phases(ops, lambda: ops.reduce_scatter(SUM, mine))
    if own_phases(world):
        assert found == own_phases(world)
    elif world.size > 1:
        assert any("all_reduce" in phase for phase in found)
    wanted = np.arange(LARGE, dtype=np.float32) % 1013 * sum(range(world.size + 1))
    assert same_bits(ops.reduce_scatter(SUM, mine), np.array_split(wanted, world.size)[ops.rank])
    assert not phases(ops, lambda: ops.reduce_scatter(SUM, mine[:1000])) & own_phases(world)
    values = np.random.default_rng(ops.rank).normal(size=LARGE).astype(np.float32)
    for options in (CommunicationOptions(deterministic=True), CommunicationOptions(algorithm="flat")):
        assert not phases(ops, lambda options=options: ops.reduce_scatter(SUM, values, options=options)) & own_phases(world)
        assert same_bits(ops.reduce_scatter(SUM, values, options=options), sliced(ops, SUM, values, options=options))
    if world.num_nodes == 1:  # nothing is cast
        return
    cast = CommunicationOptions(wire_dtype="bfloat16")
    assert same_bits(ops.reduce_scatter(SUM, values, options=cast), sliced(ops, SUM, values, options=cast))


@up_to_ranks(4)
@pytest.mark.parametrize("axis", [0, 1])
def test_the_part_may_lie_in_the_array(make_ops, world, axis):
    # several chunks, in one node and between nodes: what is written with the first must not be what is read for a later one
    ops = make_ops(world, PEER_MEMORY="0", CHUNK_BYTES="200KB")
    for halves in range(2 * world.size - 1):
        columns = 100_000 // world.size**2 * world.size
        mine = np.arange(2.0 * world.size * columns).reshape(2 * world.size, -1) % 97 + ops.rank
        wanted = sliced(ops, SUM, mine, axis)
        flat = mine.reshape(-1)
        first = halves * (wanted.size // 2)
        out = flat[first : first + wanted.size].reshape(wanted.shape)
        assert ops.reduce_scatter(SUM, mine, axis, ALWAYS, out=out) is out
        assert same_bits(out, wanted)


def test_it_holds_no_more_than_shards_in_flight_and_allocates_its_part(ops, world):
    mine = np.ones(LARGE, np.float32)
    ops.reduce_scatter(SUM, mine)
    held = ops.memory_report()
    tracemalloc.start()
    part = ops.reduce_scatter(SUM, mine)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    if own_phases(world):
        assert peak < part.nbytes + 200_000
        assert held.plan_bytes <= 3 * (2 << 20) // world.num_shards
        assert held.largest_pack_bytes == mine.nbytes
    assert ops.memory_report().num_plans == held.num_plans == 1


@needs_ranks(2)
@pytest.mark.parametrize("setting", ["MPISTRAT_INTRA_TRANSPORT", "MPISTRAT_INTER_TRANSPORT"])
def test_where_mpi_was_asked_for_an_all_reduce_is_made(make_ops, world, monkeypatch, setting):
    monkeypatch.setenv(setting, "mpi")
    ops = make_ops(world)
    mine = np.full(LARGE, ops.rank, np.float32)
    found = phases(ops, lambda: ops.reduce_scatter(SUM, mine))
    # what joins nothing in this world forbids nothing
    is_unused = world.num_nodes == 1 if setting == "MPISTRAT_INTER_TRANSPORT" else world.num_shards == 1
    assert (found == own_phases(world)) == is_unused
    assert (ops.reduce_scatter(SUM, mine) == sum(range(world.size))).all()


@needs_ranks(2)
def test_ranks_that_ask_for_different_algorithms_are_told(mixed):
    mine = np.ones(LARGE, np.float32)
    flat = CommunicationOptions(algorithm="flat")
    for known in ((), (ALWAYS, flat)):
        for options in known:
            mixed.reduce_scatter(SUM, mine, options=options)
        with pytest.raises(mpistrat.errors.AgreementError, match="algorithm=flat"):
            mixed.reduce_scatter(SUM, mine, options=flat if mixed.rank == 1 else ALWAYS)


@needs_ranks(2)
def test_ranks_read_the_arrays_of_others_only_within_their_parts(make_ops, monkeypatch):
    read = []
    whole = shared_memory.Exchange._ranges

    def ranges(self):
        read.append(sum(stop - start for start, stop in whole(self)))
        return whole(self)

    monkeypatch.setattr(shared_memory.Exchange, "_ranges", ranges)
    ops = make_ops()
    part = ops.reduce_scatter(SUM, np.ones(LARGE, np.float32))
    assert read in ([], [part.size])  # none where the kernel forbids it
