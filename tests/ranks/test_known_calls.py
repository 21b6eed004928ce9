"""Known calls: small batches take a fast path through MPI, plans are cached alike on all ranks, and changes are noticed."""

import weakref
from dataclasses import replace
from itertools import product
from unittest.mock import Mock

import numpy as np
import optree
import pytest

import mpistrat
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.communicator.reductions import Reductions
from mpistrat.errors import InvalidArgumentError, UnavailableError
from mpistrat.execution.program import SMALL_BATCH_BYTES, SmallBatch
from mpistrat.reduction import HALF_DTYPES, ReduceOp, accumulation_dtype
from mpistrat.testing.transport_suite import DTYPES, operations
from mpistrat.transports.window import NodeWindow
from mpistrat.watch.record import RankFile
from mpistrat.watch.recorder import recorder
from tests.launches import needs_ranks, up_to_ranks
from tests.reference import LAYOUTS

pytestmark = up_to_ranks(3)

SHAPES = [(3,), (), (2, 2), (0,), (5, 1)]


@pytest.fixture
def ops(make_ops, world):
    return make_ops(world, STRICT="0")


@pytest.fixture
def fast_paths(monkeypatch):
    """Count the calls that take the fast path."""
    taken = []
    run = SmallBatch.run

    def counted(self, arrays, out):
        taken.append(len(arrays))
        return run(self, arrays, out)

    monkeypatch.setattr(SmallBatch, "run", counted)
    return taken


def batch(dtype, rank):
    return [np.asarray((np.arange(np.prod(shape)) + rank + 1) % 5).reshape(shape).astype(dtype) for shape in SHAPES]


def test_the_short_way_gives_the_bits_of_the_long_one(ops, fast_paths):
    for op, dtype in product(ReduceOp, (*DTYPES, *HALF_DTYPES)):
        if op not in operations(dtype):
            continue
        for arrays in (batch(dtype, ops.rank), [batch(dtype, ops.rank)[0]]):
            first = ops.all_reduce(op, arrays)
            del fast_paths[:]
            again = ops.all_reduce(op, arrays)
            is_direct = len(arrays) == 1 and accumulation_dtype(op, dtype) == dtype
            assert fast_paths == ([] if is_direct else [len(arrays)]), (op, dtype)
            for one, other, array in zip(first, again, arrays, strict=True):
                assert (other.dtype, other.shape) == (array.dtype, array.shape)
                assert one.tobytes() == other.tobytes(), (op, dtype)
                assert other.flags.writeable
                assert not np.shares_memory(other, array)


def test_the_record_of_a_call_has_the_bytes_that_this_rank_passes(make_ops):
    ops = make_ops()
    for call in (ops.all_reduce, lambda *given: ops.start_all_reduce(*given).wait()):
        for _ in range(2):
            call(ReduceOp.SUM, [np.ones(3), np.ones(100_000, np.float32)])
            assert RankFile(recorder().memory).last().nbytes == 400_024


@needs_ranks(2)
def test_one_rank_may_take_the_slow_path(ops):
    arrays = [np.full(3, ops.rank), np.full(2, 2 * ops.rank)]
    for turn in range(4):
        ops.timeline.enabled = ops.rank == 1 and turn > 1
        ops.barrier()
        total, double = ops.all_reduce(ReduceOp.SUM, arrays)
        assert total.tolist() == [sum(range(ops.size))] * 3
        assert double.tolist() == [2 * sum(range(ops.size))] * 2
        # what follows in the memory of the node must find the ranks in step
        through_node = [np.full(5, ops.rank, np.float32), np.full(4, ops.rank, np.float16)]
        for result in ops.all_reduce(ReduceOp.SUM, through_node, CommunicationOptions(algorithm="hierarchical")):
            assert (result == sum(range(ops.size))).all()


@needs_ranks(2)
@pytest.mark.parametrize("reads", ["0", "1"])
def test_one_rank_may_take_the_slow_path_in_shared_memory(make_ops, monkeypatch, reads):
    ops = make_ops(STRICT="0", PEER_MEMORY=reads)
    refusals, barrier = [], NodeWindow.barrier
    monkeypatch.setattr(NodeWindow, "barrier", lambda *given: refusals.append(not ops._guard.thread._free) or barrier(*given))
    # of one block, of one block that is worth attaching to, and of several: what follows must find the ranks in step
    for kib in (128, 1536, 3 * 1024, 3 * 1024):
        array = np.arange(kib << 8, dtype=np.float32)
        for turn in range(3):
            ops.timeline.enabled = turn == 2 and ops.rank == 1
            [total] = ops.all_reduce(ReduceOp.SUM, [array + ops.rank])
            assert (total == ops.size * array + sum(range(ops.size))).all(), (kib, turn)
    assert refusals, "shared memory was not used"
    assert all(refusals), "another thread may come in between"


@needs_ranks(2)
def test_large_arrays_of_the_caller_are_not_kept(comm, make_ops):
    ops = make_ops(STRICT="0")
    for count in (1 << 17, 3 << 18):
        source, target = np.ones(count), np.zeros(count)
        for _ in range(3):
            ops.all_reduce(ReduceOp.SUM, [source], out=[target])
        assert (target == comm.size).all()
        kept = weakref.ref(source), weakref.ref(target)
        del source, target
        assert [one() for one in kept] == [None, None], count


@pytest.mark.parametrize("into", [False, True])
def test_after_a_failed_fast_path_no_collective_is_made(ops, into):
    array, out = np.ones(3), [np.empty(3)] if into else None
    for _ in range(2):
        ops.all_reduce(ReduceOp.SUM, [array], None, out)
    [(key, known)] = ops._programs._known.items()

    ops._programs._known[key] = replace(known, run=Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        ops.all_reduce(ReduceOp.SUM, [array], None, out)
    with pytest.raises(UnavailableError, match=r"an earlier all_reduce did not end \(KeyboardInterrupt\)"):
        ops.all_reduce(ReduceOp.SUM, [array], None, out)


def test_other_batches_run_their_plan(ops, make_ops, world, fast_paths):
    small, large = np.ones(2), np.ones(SMALL_BATCH_BYTES // 8)
    for arrays, options in (
        ([small, small.astype(np.float32)], None),
        ([small, large], None),
        ([small, small], CommunicationOptions(num_packs=2)),
    ):
        for _ in range(3):
            assert all((total == ops.size).all() for total in ops.all_reduce(ReduceOp.SUM, arrays, options))
    ops, arrays = make_ops(world, STRICT="0", MAX_MESSAGE_BYTES="64"), [np.arange(30, dtype=np.int8)] * 2
    for _ in range(3):
        assert all(np.array_equal(mean, arrays[0]) for mean in ops.all_reduce(ReduceOp.MEAN, arrays))
    assert fast_paths == []


ONE = np.arange(6.0)
NESTS = [
    *(ONE, [ONE], {"w": ONE, "b": np.array(2.0), "none": np.zeros((0, 3))}, (ONE, [ONE[:3]], {"w": ONE.reshape(3, 2)})),
    *({"b": [ONE, ONE], "a": [ONE[::-1], ONE[::2]], "c": ONE}, [np.asfortranarray(ONE.reshape(2, 3)), ONE.reshape(2, 3).T]),
    *([np.arange(3), ONE], [np.arange(3, dtype=np.int8)], {"z": {"w": ONE}, "a": {"b": ONE[:3], "a": ONE}}, [1.5, ONE]),
    *([np.full(index % 3, float(index)) for index in range(40)], [ONE.view(np.recarray), ONE], {"y": None, "x": (ONE,)}),
]


def test_nests_come_back_alike_however_often_they_are_reduced(make_strategy):
    strategy = make_strategy(STRICT="0")

    def step():
        ctx = mpistrat.get_replica_context()
        for op, layout, nest in product(("sum", "MEAN", ReduceOp.MAX), ("C", "strided", "read-only"), NESTS):
            mine = optree.tree_map(lambda leaf: np.array(leaf + ctx.replica_id_in_sync_group), nest)
            value = optree.tree_map(LAYOUTS[layout], mine)
            first, *others = [ctx.all_reduce(op, value) for _ in range(3)]
            kept = repr(first)
            for other in others:
                assert repr(other) == kept  # keys in one order too
                for leaf in optree.tree_leaves(other):
                    if leaf.ndim:
                        before = [id(each) for each in optree.tree_leaves(other) if np.shares_memory(each, leaf)]
                        assert before == ([id(leaf)] if leaf.size else [])
                    leaf[...] = -1
            assert repr(first) == kept
            for leaf, total in zip(optree.tree_leaves(nest), optree.tree_leaves(first), strict=True):
                ranks = [np.asarray(leaf) + rank for rank in range(strategy.num_replicas_in_sync)]
                expected = {"sum": np.sum, "MEAN": np.mean, ReduceOp.MAX: np.max}[op](ranks, axis=0)
                assert np.array_equal(total, expected.astype(total.dtype)), (leaf, total)

    strategy.run(step)


def test_all_ranks_forget_the_same_plan_whichever_of_them_use_it(comm, make_ops, world, monkeypatch):
    monkeypatch.setattr("mpistrat.communicator.programs.PROGRAMS_KEPT", 3)
    ops = make_ops(world, STRICT="0")
    ops.timeline.enabled = comm.rank == 0  # it looks its plans up, where the others take their fast paths
    for count in (1, 2, 3, 1, 4, 1, 2, 5, 4, 1):
        assert ops.all_reduce("sum", np.ones(count)).tolist() == [ops.size] * count
        kept = [shape for *_, [(_, shape, _)] in ops._programs._programs]
        assert comm.allgather(kept) == [kept] * comm.size
    assert kept == [(5,), (4,), (1,)]


@needs_ranks(2)
def test_a_call_is_looked_at_again_if_what_was_started_has_it_forgotten_once_it_was_found(comm, make_ops, monkeypatch):
    monkeypatch.setattr("mpistrat.communicator.programs.PROGRAMS_KEPT", 1)
    ops = make_ops(STRICT="0")
    for _ in range(2):
        ops.all_reduce("sum", np.ones(3))
    is_clear = ops._guard.is_clear
    if comm.rank:
        comm.Barrier()
    work = ops.start_all_reduce("sum", np.ones(4))  # which ranks compare before they forget
    if comm.rank == 0:
        monkeypatch.setattr(ops._guard, "is_clear", lambda: (comm.Barrier(), work.wait(), is_clear())[2])
    else:
        work.wait()
    assert ops.all_reduce("sum", np.ones(3)).tolist() == [comm.size] * 3


@pytest.fixture
def looked_up(monkeypatch):
    """Note the calls whose arrays are looked at: those that take no plan by what they were seen to be like."""
    found = []
    look = Reductions.reduce

    def noted(self, verb, op, *arguments):
        found.append(op)
        return look(self, verb, op, *arguments)

    monkeypatch.setattr(Reductions, "reduce", noted)
    return found


@needs_ranks(2)
def test_arrays_with_a_fast_path_are_checked_again_after_a_change(comm, make_ops, world, looked_up):
    ops = make_ops(world, STRICT="0")
    arrays = [np.ones(70_000), np.ones(5, np.float32)]

    def is_known():
        del looked_up[:]
        assert [(total == comm.size).all() for total in ops.all_reduce("sum", arrays)] == [True, True]
        return not looked_up

    def strictly():
        ops.is_strict = True
        assert not is_known()
        assert not is_known()
        ops.is_strict = False

    assert [is_known(), is_known()] == [False, True]
    held = ops.memory_report().window_bytes
    ops.all_reduce("sum", [np.ones(1 << 21, np.float32), np.ones(1, np.int8)])
    assert is_known() == (ops.memory_report().window_bytes == held), "what was bound to the memory held before is bound anew"
    strictly()
    assert [is_known(), is_known()] == [False, True]
    work = ops.start_all_reduce("sum", arrays)
    assert not is_known(), "it waits for what was started"
    work.wait()
    ops.timeline.enabled = True
    assert not is_known()
    ops.timeline.enabled = False
    assert is_known()
    with pytest.raises(InvalidArgumentError, match="out"):
        ops.all_reduce("sum", arrays, out=[np.empty(70_000), np.empty(6, np.float32)])
    comm.Barrier()
    ops.close()
    with pytest.raises(RuntimeError, match="was closed"):
        ops.all_reduce("sum", arrays)
