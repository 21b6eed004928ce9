"""What every collective passes: one thread at a time, and the same call on all ranks."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest

import mpistrat
from mpistrat.errors import AgreementError, InvalidArgumentError, UnavailableError
from mpistrat.execution import guard
from mpistrat.watch.recorder import recorder
from tests.launches import needs_ranks
from tests.ranks.cases import on_thread

pytestmark = needs_ranks(2)

SUM = mpistrat.ReduceOp.SUM


@pytest.fixture
def one_node(make_ops):
    return make_ops(STRICT="0")


@pytest.mark.parametrize("count", [1, 100_000])
def test_a_second_thread_gets_the_error(one_node, comm, count):
    for _ in range(2):
        one_node.all_reduce(SUM, [np.ones(count)])
    assert one_node._guard.thread.lock()  # this thread is in a collective
    with pytest.raises(UnavailableError, match="another thread is in a collective"):
        on_thread(one_node.all_reduce, SUM, [np.ones(count)])
    one_node._guard.thread.unlock()
    comm.Barrier()
    assert (one_node.all_reduce(SUM, [np.ones(count)])[0] == comm.size).all(), "nothing has happened"


def test_what_was_noted_is_compared_with_the_next_collective(one_node, comm):
    for _ in range(3):
        one_node.note("a step")
        one_node.all_reduce(SUM, [np.ones(3)])
    one_node.note("a step" if comm.rank else "another step")
    with pytest.raises(AgreementError, match=r"(?s)rank 0: barrier\(\), after another step.*after a step"):
        one_node.barrier()
    one_node.barrier()  # they have compared, and done nothing else
    one_node.note("a step" if comm.rank else "another step")
    with pytest.raises(AgreementError, match="ranks made different calls"):
        one_node.all_reduce(SUM, [np.ones(3)])


@pytest.mark.ranks(nodes=["1x2", "2x1", "2x2"])
def test_a_known_barrier_is_compared(comm, make_ops, world):
    ops = make_ops(world, STRICT="0")
    for _ in range(3):
        ops.barrier()
        ops.all_reduce(SUM, np.ones(1))
    with pytest.raises(AgreementError, match=r"(?s)rank 0: barrier\(\).*: all_reduce\(SUM"):
        ops.all_reduce(SUM, np.ones(1)) if comm.rank else ops.barrier()


def test_all_that_was_noted_is_told_of_a_call_that_is_known(comm, one_node):
    arrays = [np.ones(100_000), np.ones(2)]
    for _ in range(3):
        one_node.all_reduce(SUM, arrays)
    one_node.note(f"the note of rank {comm.rank}")
    one_node.note("the last note")
    with pytest.raises(AgreementError) as caught:
        one_node.all_reduce(SUM, arrays)
    for rank in range(comm.size):
        assert f"after the note of rank {rank}; the last note" in str(caught.value)


@pytest.mark.parametrize("common", [0, 1])
@pytest.mark.parametrize("is_started", [False, True])
def test_a_call_is_not_paired_with_one_that_a_rank_has_refused(one_node, comm, is_started, common):
    def wrong():
        with pytest.raises(InvalidArgumentError):
            (one_node.start_all_reduce if is_started else one_node.all_reduce)(SUM, [np.ones(3)], out=[np.ones(2)])

    wrong()  # on all ranks
    assert one_node.all_reduce(SUM, [np.ones(3)])[0][0] == comm.size
    for _ in range(common + (comm.rank == 0)):
        wrong()
    with pytest.raises(AgreementError, match=r"rank 0: .*, after a refused (start_)?all_reduce"):
        one_node.all_reduce(SUM, [np.ones(3)])


@pytest.mark.parametrize(
    ("verb", "error"), [("all_gather", RuntimeError), ("all_gather", KeyboardInterrupt), ("reduce_scatter", RuntimeError)]
)
def test_a_call_is_not_paired_with_one_whose_argument_raises(one_node, comm, verb, error):
    call = partial(getattr(one_node, verb), *[SUM] * (verb == "reduce_scatter"), np.ones(4))
    if comm.rank == 0:
        with pytest.raises(error):
            call(axis=MagicMock(__index__=Mock(side_effect=error)))
    with pytest.raises(AgreementError, match=f"after a (refused {verb}|call that has not begun)"):
        call()


@pytest.mark.parametrize("is_known", [False, True])
def test_a_call_is_not_paired_with_one_that_raises_what_was_started_has_failed_of(one_node, comm, is_known):
    def fail():
        raise OSError("in a callback")

    for _ in range(2 * is_known):
        one_node.all_reduce(SUM, np.ones(3))
    if comm.rank:
        comm.Barrier()
    work = one_node.start_all_reduce(SUM, np.ones(3))
    if comm.rank == 0:
        work.add_done_callback(fail)
        comm.Barrier()
        with pytest.raises(OSError, match="in a callback"):
            one_node.all_reduce(SUM, np.ones(3))  # in which the others wait meanwhile
    with pytest.raises(AgreementError, match="after a call that has not begun"):
        one_node.all_reduce(SUM, np.ones(3))


def test_what_has_failed_is_raised_by_the_next_call_though_what_was_started_later_has_ended(one_node):
    for _ in range(2):
        one_node.all_reduce(SUM, np.ones(3))
    one_node.start_all_reduce(SUM, np.ones(3)).add_done_callback(lambda: 1 // 0)
    one_node.start_all_reduce(SUM, np.ones(3)).wait()
    with pytest.raises(ZeroDivisionError):
        one_node.all_reduce(SUM, np.ones(3))


def test_a_call_is_not_paired_with_one_that_is_interrupted_while_it_completes_what_was_started(make_ops, comm, monkeypatch):
    ops = make_ops(STRICT="0")
    for _ in range(2):
        ops.all_reduce(SUM, np.ones(3))
        ops.start_all_reduce(SUM, np.ones(3)).wait()
    ops.start_all_reduce(SUM, np.ones(3))
    if comm.rank == 0:
        with monkeypatch.context() as patched:
            patched.setattr("mpistrat.execution.engine.Job.has_ended", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                ops.all_reduce(SUM, np.ones(3))
    with pytest.raises(AgreementError, match="after a call that has not begun"):
        ops.all_reduce(SUM, np.ones(3))


@pytest.mark.parametrize("then", ["are confirmed", "become strict"])
def test_what_was_started_has_ended_when_calls(comm, make_ops, then):
    ops, ones = make_ops(f"{comm.size}x1", STRICT="0"), np.ones(20_000, np.float32)  # which MPI sums between nodes
    for _ in range(10):
        work = ops.start_all_reduce(SUM, ones)
        if comm.rank == 0:
            work.wait()
        if then == "become strict":  # on the others it may not have begun
            ops.is_strict = True
        else:
            ops.confirm()
            assert not ops.hierarchy.call.unconfirmed
        assert (work.wait() == comm.size).all()
        ops.is_strict = False


@pytest.mark.parametrize("leaves", [1, 2])
@pytest.mark.parametrize("count", [3, 300_000])
def test_structures_are_compared_where_arrays_are_alike(comm, make_strategy, count, leaves):
    strategy = make_strategy(STRICT="0")
    ones = [np.ones(count)] * leaves

    def step(value):
        return mpistrat.get_replica_context().all_reduce("sum", value)

    for value in ({"a": ones, "b": None}, {"a": None, "b": ones}):
        for _ in range(3):
            strategy.run(step, (value,))
    with pytest.raises(AgreementError, match="ranks made different calls") as caught:
        strategy.run(step, ({"a": ones, "b": None} if comm.rank else {"a": None, "b": ones},))
    for structure in ("{'a': None, 'b': [", "{'a': [", "'b': None}"):
        assert structure in str(caught.value), "each rank tells what all were in"


def test_a_call_is_told_by_name_whatever_others_were_made_since_it_was_new(make_ops, world):
    often = make_ops(world, STRICT="0")
    calls = [(op, [np.ones(3)]) for op in ("max", "sum")]
    for turn in range(280):  # one communicator of many
        recorder().intern(f"another call {turn}")
        for call in calls:
            often.all_reduce(*call)
    with pytest.raises(AgreementError, match=r"(?s)rank 0: all_reduce\(MAX, .*all_reduce\(SUM, "):
        often.all_reduce(*calls[min(often.rank, 1)])


def test_what_is_assigned_outside_run_is_compared(comm, make_strategy):
    strategy = make_strategy(STRICT="0")
    with strategy.scope():
        variable = mpistrat.Variable(np.zeros(3), name="w")
        variable.assign(np.ones(3))
        variable.assign(np.full(3, float(comm.rank)))
    with pytest.raises(AgreementError, match=r"Variable\('w', float64 \(3,\)\).assign"):
        strategy.run(lambda: mpistrat.get_replica_context().all_reduce("sum", np.ones(2)))


@pytest.mark.parametrize("count", [3, 100_000])
def test_threads_that_take_turns_alike_are_legal_and_their_calls_not_paired_with_those_of_the_main_one(one_node, comm, count):
    def call():
        return one_node.all_reduce(SUM, np.full(count, comm.rank))[0]

    for _ in range(3):  # the thread of each turn has ended before the next one begins
        assert {on_thread(call), call(), call(), on_thread(call)} == {sum(range(comm.size))}
    work = on_thread(lambda: one_node.start_all_reduce(SUM, np.ones(count)))
    assert one_node.all_reduce(SUM, np.ones(count))[0] == comm.size, "which waits for what the thread has started"
    assert work.wait()[0] == comm.size

    def call():
        return one_node.all_reduce(SUM, np.ones(count))

    for _ in range(3):
        call()
    with pytest.raises(AgreementError, match=r"after a change to thread 'other_#' \(1\)"):
        on_thread(call) if comm.rank else call()


def test_two_threads_beside_each_other_are_refused_on_the_rank_that_finds_them(comm, one_node):
    def call():
        return one_node.all_reduce(SUM, np.ones(3))

    with ThreadPoolExecutor(1, "first") as first, ThreadPoolExecutor(1, "second") as second:
        second.submit(int).result()
        first.submit(call).result()
        told = "rank 0: .*thread 'second_0' makes one" if comm.rank else "'second_0' makes one, and so does thread 'first_0'"
        with pytest.raises(UnavailableError, match=told):
            (first if comm.rank else second).submit(call).result()


@pytest.mark.parametrize("count", [3, 100_000])
@pytest.mark.parametrize("names", [(None, None), ("A", "B"), ("part-1", "part-2")])
def test_threads_that_begin_in_another_order_on_some_ranks_are_told_before_a_sum_is_wrong(comm, one_node, count, names):
    def call(value):
        try:
            results.append(one_node.all_reduce(SUM, np.full(count, value))[0])
        except (AgreementError, UnavailableError) as error:
            told.append(str(error))

    results, told = [], []
    for _ in range(3):
        one_node.all_reduce(SUM, np.ones(count))
    for order in (1, -1 if comm.rank else 1):
        values = zip(names, (1.0, 10.0), strict=True)
        threads = [threading.Thread(target=call, name=name, args=(value,)) for name, value in values]
        for thread in threads[::order]:  # the second may get the identifier of the first
            thread.start()
            thread.join()
        assert results == [comm.size, 10 * comm.size]
    assert len(told) == 2
    assert "after a change to thread" in told[0]


def test_names_of_threads_may_have_the_number_of_the_rank(comm, one_node):
    for name in (f"rank-{comm.rank}", f"Thread-{comm.rank + 5} (call)"):
        assert on_thread(lambda: one_node.all_reduce(SUM, np.ones(3))[0], name=name) == comm.size


@pytest.mark.parametrize("made_by", ["main", "first"])
def test_threads_that_were_started_together_are_refused_though_the_first_has_ended(comm, one_node, made_by):
    with ThreadPoolExecutor(1, "second") as second:
        second.submit(int).result()
        with ThreadPoolExecutor(1, "first") as first:
            ops = one_node if made_by == "main" else first.submit(mpistrat.Communicator, comm).result()
            assert first.submit(ops.all_reduce, SUM, np.ones(3)).result()[0] == comm.size
        with pytest.raises(UnavailableError, match="second_0.*first_0"):
            second.submit(ops.all_reduce, SUM, np.ones(3)).result()


@pytest.mark.parametrize("kind", ["new", "known", "started", "planned"])
def test_an_exception_after_a_call_has_its_number_is_told_to_the_other_ranks(comm, one_node, monkeypatch, kind):
    number, array = 3 if kind == "known" else 1, np.ones(1 << 20 if kind == "planned" else 3)
    for _ in range(number - 1):
        one_node.all_reduce(SUM, array)
    if comm.rank == 0:
        planted = Mock(side_effect=KeyboardInterrupt)
        where = {"new": (one_node._guard, "_move_notes"), "started": (guard, "submit"), "known": (one_node, "_recorder")}
        where["planned"] = one_node._executor, "reserve"  # in which the other ranks wait
        monkeypatch.setattr(*where[kind], Mock(places={}, find_line=planted) if kind == "known" else planted)
    told = None if comm.rank == 0 else f"rank 0 has left collective {number}"
    with pytest.raises(UnavailableError if told else KeyboardInterrupt, match=told):
        one_node.start_all_reduce(SUM, array).wait() if kind == "started" else one_node.all_reduce(SUM, array)
    with pytest.raises(UnavailableError, match=f"an earlier {'all_reduce' if kind == 'known' else '.*'} did not end"):
        one_node.barrier()


@pytest.mark.ranks(nodes=["1x2", "2x1"])
@pytest.mark.parametrize("verb", ["all_reduce", "all_reduce of a list", "all_gather", "reduce_scatter"])
def test_a_rank_without_memory_raises_that_and_the_others_are_told(comm, make_ops, world, monkeypatch, verb):
    ops, array = make_ops(world, STRICT="0"), np.ones(9 << 20, np.float32)
    calls = {
        "all_reduce": lambda: ops.all_reduce(SUM, array),
        "all_reduce of a list": lambda: ops.all_reduce(SUM, [array, array]),
        "all_gather": lambda: ops.all_gather(array),
        "reduce_scatter": lambda: ops.reduce_scatter(SUM, np.concatenate([array] * comm.size)),
    }
    kept = [calls[verb]()]
    comm.Barrier()
    if comm.rank == 0:
        monkeypatch.setattr("mpistrat.arrays._Block", Mock(side_effect=MemoryError("planted")))
    told = "rank 0 has left collective .*MemoryError: planted" if comm.rank else None
    with pytest.raises(UnavailableError if told else MemoryError, match=told):
        kept.append(calls[verb]())


@pytest.mark.parametrize("outer", ["passes", "is refused"])
@pytest.mark.parametrize("is_on_all", [True, False])
def test_a_call_within_a_call_is_refused_and_noted(one_node, monkeypatch, is_on_all, outer):
    def within(call):
        if one_node.rank == 0 or is_on_all:
            for refused in (one_node.barrier, lambda: one_node.start_all_reduce("sum", np.ones(3), structure="a nest")):
                with pytest.raises(UnavailableError, match="this thread is in a collective already"):
                    refused()

    with monkeypatch.context() as patch:
        patch.setattr(one_node._guard, "_move_notes", within)  # as a signal handler or a finalizer would
        if outer == "passes":
            one_node.barrier()
        else:
            with pytest.raises(InvalidArgumentError, match="root"):
                one_node.broadcast(np.ones(3), root=99)
    with nullcontext() if is_on_all else pytest.raises(AgreementError, match="a refused call within another one"):
        one_node.gather(np.ones(1))  # which ranks may make that were between two calls
    one_node.gather(np.ones(1))
