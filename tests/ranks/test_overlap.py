"""What is started goes on by itself: several at a time, in order, beside other collectives and the program."""

import signal
import threading
import time

import numpy as np
import pytest

from mpistrat.communicator.options import CommunicationOptions
from mpistrat.errors import AgreementError, InvalidArgumentError, UnavailableError
from mpistrat.execution import engine
from mpistrat.reduction import ReduceOp
from mpistrat.transports import small
from tests.launches import needs_ranks, up_to_ranks

pytestmark = up_to_ranks(3)

SUM, MEAN, MAX = ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.MAX


def given(rank, count, seed):
    return np.random.default_rng([seed, rank]).integers(-50, 50, count).astype(np.float32)


def expected(size, count, seed):
    return sum(given(rank, count, seed) for rank in range(size))


def test_a_reduce_scatter_and_an_all_gather_are_started_by_the_same_rules(ops):
    rows, parts = given(ops.rank, 4 * ops.size, 0).reshape(-1, 2), [given(ops.rank, 3, 1), given(ops.rank, 5, 2)]
    out = np.empty((2, 2), np.float32)
    np.testing.assert_array_equal(ops.start_reduce_scatter(SUM, rows, out=out).wait(), ops.reduce_scatter(SUM, rows))
    np.testing.assert_array_equal(out, ops.reduce_scatter(SUM, rows))
    np.testing.assert_array_equal(ops.start_all_gather(rows, 1).wait(), ops.all_gather(rows, 1))
    for one, other in zip(ops.start_all_gather(parts).wait(), ops.all_gather(parts), strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(InvalidArgumentError, match="out of range"):
        ops.start_all_gather(rows, 2)


@needs_ranks(2)
def test_a_small_sum_like_an_earlier_one_is_completed_by_the_thread_that_asks_for_it(comm, make_ops, monkeypatch):
    ops, submitted, results = make_ops(STRICT="0"), [], [np.empty(5, np.float32), None]
    forms = [(op, out) for op in (SUM, MEAN, MAX) for out in results]
    for turn, (op, out) in enumerate([*forms, *forms]):
        if turn == len(forms):
            for module in ("guard", "engine"):
                monkeypatch.setattr(f"mpistrat.execution.{module}.submit", submitted.append)
        array = given(ops.rank, 5, turn)
        addends = np.array([given(rank, 5, turn) for rank in range(ops.size)])
        work = ops.start_all_reduce(op, array, out=array if turn == 7 else out)
        comm.Barrier()
        assert work.done() or turn < len(forms)
        total = work.wait()
        assert total is (array if turn == 7 else out) or out is None
        np.testing.assert_array_equal(total, {SUM: addends.sum(0), MEAN: addends.mean(0), MAX: addends.max(0)}[op])
    assert not submitted, "to wake the engine takes ten times as long"
    monkeypatch.undo()
    works = [ops.start_all_reduce(SUM, given(ops.rank, 5, turn)) for turn in range(3)]
    called = threading.Event()
    works[2].add_done_callback(called.set)
    for turn in (2, 0, 1):
        np.testing.assert_array_equal(works[turn].wait(), expected(ops.size, 5, turn))
    assert called.wait(60)


class InterruptedWaitError(Exception):
    """Raised by a signal handler."""


@needs_ranks(2)
def test_an_interrupt_of_who_waits_for_a_small_sum_loses_nothing(make_ops, monkeypatch):
    ops, interrupted = make_ops(STRICT="0"), 0

    def interrupt(*_):
        raise InterruptedWaitError

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        for turn in range(400):
            work = ops.start_all_reduce(SUM, np.full(3, turn))
            try:
                if ops.rank == 0:
                    signal.setitimer(signal.ITIMER_REAL, 1e-6 + turn % 40 * 5e-7)
                work.wait()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except InterruptedWaitError:
                interrupted += 1
            assert work.wait().tolist() == [turn * ops.size] * 3
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert interrupted or ops.rank


@needs_ranks(2)
@pytest.mark.parametrize("first", ["nothing", "wait", "memory_report"])
def test_a_collective_of_a_signal_handler_does_not_overwrite_what_is_being_summed(comm, make_ops, monkeypatch, first):
    ops, ones = make_ops(STRICT="0"), np.ones(3)
    for _ in range(2):
        ops.start_all_reduce(SUM, ones).wait()
        ops.all_reduce(SUM, ones)

    def handle():  # when all ranks have come, and before the sum
        monkeypatch.undo()
        {"nothing": int, "wait": work.wait, "memory_report": ops.memory_report}[first]()
        for call in (lambda: ops.all_reduce(SUM, 9 * ones), ops.close):
            with pytest.raises(UnavailableError, match="this thread is in a collective already"):
                call()

    work = ops.start_all_reduce(SUM, ones)
    comm.Barrier()  # this thread completes it
    if ops.rank == 0:
        monkeypatch.setattr(ops._guard, "raise_if_failed", handle)
    assert work.wait().tolist() == [ops.size] * 3
    with pytest.raises(AgreementError, match="a refused call within another one"):
        ops.all_reduce(SUM, ones)


@needs_ranks(2)
def test_a_mean_is_divided_once_though_a_signal_handler_asks_for_it_before_that(comm, make_ops, monkeypatch):
    ops, ones = make_ops(STRICT="0"), np.ones(3)
    for _ in range(2):
        ops.start_all_reduce(MEAN, ones).wait()

    def summed(*given):
        monkeypatch.undo()
        add = small.summing(*given)
        return lambda: (add(), work.wait())

    work = ops.start_all_reduce(MEAN, ones)
    comm.Barrier()  # this thread completes it
    monkeypatch.setattr(small, "summing", summed)
    assert work.wait().tolist() == [1] * 3


@needs_ranks(2)
def test_what_is_started_while_another_thread_asks_for_the_memory_is_not_forgotten(comm, make_ops):
    ops = make_ops(STRICT="0")
    if comm.rank:
        comm.Barrier()
    works = [ops.start_all_reduce(SUM, given(ops.rank, 100_000, 0))]
    if comm.rank == 0:
        reporting = threading.Thread(target=ops.memory_report)
        reporting.start()
        while not engine._engine.num_waiting:
            time.sleep(0.001)
        works.append(ops.start_all_reduce(SUM, given(ops.rank, 100_000, 1)))
        comm.Barrier()
        reporting.join()
        assert not works[1].done()
        assert ops._guard.refusal, "a call would begin beside it"
    comm.Barrier()
    works = works if comm.rank == 0 else [*works, ops.start_all_reduce(SUM, given(ops.rank, 100_000, 1))]
    for turn, work in enumerate(works):
        np.testing.assert_array_equal(work.wait(), expected(ops.size, 100_000, turn))


@needs_ranks(2)
def test_nothing_is_started_beside_a_collective_of_another_thread(comm, make_ops):
    ops = make_ops(STRICT="0")
    array, found = given(comm.rank, 400_000, 0), []
    in_memory = CommunicationOptions(algorithm="hierarchical")
    ops.all_reduce(SUM, [array], in_memory)
    beside = threading.Thread(target=lambda: found.extend(ops.all_reduce(SUM, [array], in_memory)))
    if comm.rank == 0:
        beside.start()
        while ops._guard.thread._free:  # until it is in a call
            time.sleep(0.0001)
        with pytest.raises(UnavailableError, match="another thread is in a collective"):
            ops.start_all_reduce(SUM, [array])
        comm.Barrier()
    else:
        comm.Barrier()
        beside.start()
    beside.join()
    np.testing.assert_array_equal(found[0], expected(comm.size, 400_000, 0))
    np.testing.assert_array_equal(ops.start_all_reduce(SUM, [array]).wait()[0], found[0])


@up_to_ranks(4)
def test_other_collectives_come_after_what_was_started(ops):
    verbs = {
        "all_reduce": lambda: ops.all_reduce(SUM, [np.ones(3)])[0].tolist() == [ops.size] * 3,
        "batch": lambda: ops.all_reduce(SUM, [np.ones(3), np.ones(1)])[1].tolist() == [ops.size],
        "reduce_scatter": lambda: ops.reduce_scatter(MAX, np.arange(ops.size)).tolist() == [ops.rank],
        "all_gather": lambda: ops.all_gather(np.full(1, ops.rank)).tolist() == list(range(ops.size)),
        "gather": lambda: (ops.gather(np.ones(1)) is None) == (ops.rank != 0),
        "all_to_all": lambda: len(ops.all_to_all([np.ones(1)] * ops.size)) == ops.size,
        "broadcast": lambda: ops.broadcast(np.full(1, ops.rank)).tolist() == [0],
        "barrier": lambda: ops.barrier() is None,
        "agree": lambda: ops.agree("this") is None,
    }
    for turn in range(2):  # the second time around fast paths know the arrays
        for name, verb in verbs.items():
            work = ops.start_all_reduce(SUM, [given(ops.rank, 100_000, turn)])
            assert verb(), name
            assert work.done(), f"{name} did not wait for what was started before it"
            np.testing.assert_array_equal(work.wait()[0], expected(ops.size, 100_000, turn))


def test_what_is_dropped_is_carried_out(make_ops, world):
    ops = make_ops(world)
    target = np.zeros(200_000, np.float32)
    ops.start_all_reduce(SUM, [given(ops.rank, target.size, 5)], out=[target])
    ops.start_all_reduce(SUM, [np.ones(4)])
    ops.close()  # which waits for it
    np.testing.assert_array_equal(target, expected(ops.size, target.size, 5))


def test_lists_may_change_after_the_call_that_was_started(ops):
    arrays, out = [np.ones(3), np.ones(2)], [np.zeros(3), np.zeros(2)]
    first, second = out
    work = ops.start_all_reduce(SUM, arrays, out=out)
    arrays.clear()
    out.reverse()
    found = work.wait()
    assert [found[0] is first, found[1] is second] == [True, True]
    assert (first.tolist(), second.tolist()) == ([ops.size] * 3, [ops.size] * 2)


@needs_ranks(2)
def test_in_strict_mode_what_differs_is_raised_where_it_is_waited_for(comm, make_ops):
    ops = make_ops(STRICT="1")
    before = ops.start_all_reduce(SUM, [np.ones(2)])
    differs = ops.start_all_reduce(SUM, [np.ones(3 + comm.rank)])
    named = ops.start_all_reduce(SUM, [np.ones(2)], structure="a list" if comm.rank else "a dict")
    after = ops.start_all_reduce(SUM, [np.ones(2)])
    assert (before.wait()[0] == comm.size).all()
    with pytest.raises(AgreementError, match=r"(?s)ranks made different calls.*start_all_reduce\(SUM, .float64 \(3,\)"):
        differs.wait()
    with pytest.raises(AgreementError, match="of a dict"):
        named.wait()
    assert (after.wait()[0] == comm.size).all(), "all ranks know, so all go on"
    with pytest.raises(InvalidArgumentError if comm.rank else AgreementError, match="out must be"):
        ops.start_all_reduce(SUM, [np.ones(2)], out=[np.ones(2 + comm.rank)]).wait()
    ops.barrier()


@needs_ranks(2)
def test_starting_does_not_wait_for_ranks_that_are_late(comm, make_ops):
    for strict in "01":
        ops = make_ops(STRICT=strict)
        if comm.rank == comm.size - 1:
            comm.Barrier()
        works = [ops.start_all_reduce(SUM, [np.ones(n)], CommunicationOptions(timeout_seconds=60)) for n in (2, 100_000)]
        if comm.rank < comm.size - 1:
            assert not works[0].done()
            comm.Barrier()
        assert [work.wait()[0][0] for work in works] == [comm.size] * 2


@needs_ranks(2)
def test_what_fails_is_the_last(comm, make_ops, monkeypatch):
    ops = make_ops()

    def broken(*_):
        assert threading.current_thread().name == "mpistrat engine"
        raise OSError("the wire is cut")
        yield

    with monkeypatch.context() as patch:
        patch.setattr("mpistrat.execution.program.Program.steps", broken)
        works = [ops.start_all_reduce(SUM, [np.ones(2)]) for _ in range(2)]
        with pytest.raises(OSError, match="the wire is cut"):
            works[0].wait()
    with pytest.raises(UnavailableError, match="an earlier start_all_reduce did not end .OSError."):
        works[1].wait()
    for call in (lambda: ops.start_all_reduce(SUM, [np.ones(2)]), ops.barrier, lambda: ops.all_reduce(SUM, [np.ones(2)])):
        with pytest.raises(UnavailableError, match="an earlier start_all_reduce did not end"):
            call()
    comm.Barrier()


@needs_ranks(2)
def test_strategies_share_the_engine_in_the_order_of_the_program(comm, make_ops):
    several = [make_ops(), make_ops(f"{comm.size}x1")]
    works = [several[turn % 2].start_all_reduce(SUM, [np.full(2000, turn)]) for turn in range(6)]
    assert (several[0].all_reduce(SUM, [np.ones(1)])[0] == comm.size).all()
    assert [work.wait()[0][0] for work in works] == [turn * comm.size for turn in range(6)]
    assert sum(thread.name == "mpistrat engine" for thread in threading.enumerate()) == 1
