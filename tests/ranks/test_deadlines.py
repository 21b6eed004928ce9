"""A rank that does not come in time: every verb ends, says who is missing, and is the last of its strategy."""

import os
import time
from contextlib import contextmanager
from functools import cache
from itertools import product

import numpy as np
import pytest

import mpistrat
from mpistrat.context.values import PerReplica
from mpistrat.errors import AgreementError, CollectiveError, DeadlineExceededError, TransportError, UnavailableError
from mpistrat.execution.comparison import Call
from mpistrat.groups.agreement import ROW, Signature
from mpistrat.groups.deadline_barrier import LONGEST_GRACE_SECONDS
from mpistrat.reduction import Fold, ReduceOp
from mpistrat.steps import until
from mpistrat.transports import mpi, mpi_world
from mpistrat.watch import watcher
from tests.launches import on_ranks

SUM = ReduceOp.SUM
SECONDS = 0.1  # for what is missed
ENOUGH_SECONDS = 0.3  # for ranks that come: a busy machine lets them wait for a core
# beside the deadline and the grace: what a busy machine may take until it looks at the clock
PATIENCE_SECONDS = SECONDS + LONGEST_GRACE_SECONDS + 3

SHAPES = {2: "2x1", 4: "2x2"}
pytestmark = on_ranks(2, 4)  # these tests wait, for most of their time
two_ranks = on_ranks(2)
ONES = np.ones(10, np.float32)


def within(seconds, **others):
    return mpistrat.experimental.CommunicationOptions(timeout_seconds=seconds, **others)


def start(ops, array, seconds, number):
    """Start calls, one behind the other, and return the first one."""
    first, *_ = [ops.start_all_reduce(SUM, [array], within(seconds)) for _ in range(number)]
    return first


VERBS = {
    "flat": lambda ops, seconds: ops.all_reduce(SUM, [ONES], within(seconds, algorithm="flat")),
    "hierarchical": lambda ops, seconds: ops.all_reduce(SUM, [ONES, ONES], within(seconds, algorithm="hierarchical")),
    "chunks": lambda ops, seconds: ops.all_reduce(SUM, [np.ones(400_000)], within(seconds, algorithm="hierarchical")),
    "deterministic": lambda ops, seconds: ops.all_reduce(SUM, [ONES], within(seconds, deterministic=True)),
    "started": lambda ops, seconds: start(ops, ONES, seconds, 2).wait(),
    "reduce_scatter": lambda ops, seconds: ops.reduce_scatter(SUM, ONES, options=within(seconds)),
    "all_gather": lambda ops, seconds: ops.all_gather(ONES, options=within(seconds)),
    "gather": lambda ops, seconds: ops.gather(ONES, options=within(seconds)),
    "all_to_all": lambda ops, seconds: ops.all_to_all([ONES] * ops.size, within(seconds)),
    "broadcast": lambda ops, seconds: ops.broadcast(ONES, options=within(seconds)),
    "barrier": lambda ops, seconds: ops.barrier(within(seconds)),
}
NAMES = {name: "all_reduce" for name in ("flat", "hierarchical", "chunks", "deterministic")}
NAMES["started"] = "start_all_reduce"


@pytest.fixture
def make(comm, make_ops):
    """Make collectives without a deadline of their own, that have made every call once."""

    def make(**settings):
        ops = make_ops(SHAPES[comm.size], **settings)
        for call in VERBS.values():
            call(ops, 60)
        return ops

    return make


@contextmanager
def late(comm, ops, *ranks):
    """Let these ranks in once the others have left; then free what collectives leave alone once they have failed."""
    barrier = ops._guard.deadlines.barrier
    turn = barrier._turn
    if comm.rank in ranks:
        comm.Barrier()
    yield
    if comm.rank not in ranks:
        comm.Barrier()
    # a test that leaves communicators behind makes all later ones slow; here everybody is known to be through
    ops.close()
    world = ops.hierarchy.world_group.comm
    # ranks of a node meet first, so that of a node with a late rank nobody has started what all ranks meet in
    apart = {rank for node in ops.world.nodes if set(node.ranks) & set(ranks) for rank in node.ranks}
    is_by_mpi = ops.world.num_nodes > 1 and ops._executor.world.rows is None
    if any(comm.allgather(barrier._turn > turn)) and comm.rank in apart and is_by_mpi:
        world.Iallgather(np.zeros(ROW, np.int64), np.zeros((comm.size, ROW), np.int64)).Wait()
    comm.Barrier()
    ops._executor.close()
    ops.hierarchy.close()


@on_ranks(4)
@pytest.mark.parametrize(("verb", "strict"), [*product(VERBS, "0"), *product(["flat", "chunks", "barrier"], "1")])
def test_every_verb_ends_and_names_who_is_missing(comm, make, verb, strict):
    ops = make(STRICT=strict)
    last, number = comm.size - 1, ops.num_collectives + 1
    with late(comm, ops, last):
        started = time.monotonic()
        with pytest.raises(DeadlineExceededError) as caught:
            VERBS[verb](ops, SECONDS)
    took, message = time.monotonic() - started, str(caught.value)
    assert isinstance(caught.value, TimeoutError)
    assert message.startswith(f"rank {comm.rank} ({ops.world.place(comm.rank).node.name}): ")
    assert f": collective {number}, {NAMES.get(verb, verb)}(" in message
    node = ops.world.place(last).node.index
    if comm.rank == last:
        assert "comes too late: rank" in message
        assert took < 0.5 * PATIENCE_SECONDS, "it need not wait"
    else:
        assert message.endswith(f"not all ranks have arrived: missing rank {last} (node{node})")
        assert SECONDS <= took < PATIENCE_SECONDS
    for again in VERBS.values():
        with pytest.raises(UnavailableError, match=f"an earlier {NAMES.get(verb, verb)} did not end .DeadlineExceededError."):
            again(ops, None)


@two_ranks
@pytest.mark.parametrize("strict", ["0", "1"])
def test_the_first_call_of_a_shape_has_the_deadline_too(comm, make_ops, strict):
    ops = make_ops(STRICT=strict)
    message = r"collective 1, all_reduce\(SUM.*(missing rank 0 \(node0\)$|comes too late)"
    with late(comm, ops, 0), pytest.raises(DeadlineExceededError, match=message):
        ops.all_reduce(SUM, [np.ones(123_456)], within(SECONDS, algorithm="hierarchical"))


@on_ranks(4)
def test_those_that_wait_for_a_rank_that_has_failed_do_not_call_it_late_and_all_that_are_missing_are_named(comm, make):
    ops = make()
    if comm.rank == 0:
        time.sleep(PATIENCE_SECONDS / 4)  # by now the others are in the exchange of all ranks
        ops._guard.deadlines.barrier.give_up()
    with late(comm, ops, 0), pytest.raises(UnavailableError, match=r"cannot complete: rank.* gave up because it failed there"):
        ops.barrier(within(PATIENCE_SECONDS))
    ops = make()
    message = r"comes too late: rank 0 .node0. gave up waiting|missing rank 1 \(node0\), rank"
    with late(comm, ops, *range(1, comm.size)), pytest.raises(DeadlineExceededError, match=message):
        ops.barrier(within(SECONDS))


@on_ranks(4)
@pytest.mark.parametrize(("strict", "others"), [("0", 30), ("1", 30), ("1", None)])
def test_the_shortest_deadline_holds_for_all_and_in_strict_mode_for_those_without_one(comm, make, strict, others):
    ops = make(STRICT=strict)
    started = time.monotonic()
    told = "missing rank|comes too late|was given up by"
    with late(comm, ops, comm.size - 1), pytest.raises(DeadlineExceededError, match=told) as caught:
        ops.barrier(within(SECONDS if comm.rank == 0 else others))
    assert time.monotonic() - started < 25
    if comm.rank not in (0, comm.size - 1):
        assert "was given up by rank 0 (node0)" in str(caught.value)
        assert "whose deadline had passed; not all ranks have arrived" in str(caught.value)


def test_deadlines_may_differ_and_a_rank_that_is_late_but_in_time_is_not_an_error(comm, make):
    ops = make()
    for turn in range(4):
        # a budget of which each rank has used more or less; some values come back on one rank alone
        assert ops.all_reduce(SUM, ONES, within(60 - turn * (comm.rank == 0)))[0] == comm.size
    ops = make()
    for verb in VERBS.values():
        time.sleep(0.02 * (comm.rank == comm.size - 1))
        verb(ops, 10 + comm.rank)


@pytest.mark.parametrize("count", [10, 10_000])
def test_a_call_of_which_only_some_have_a_deadline_is_refused_on_all(comm, make_ops, count):
    ops = make_ops(SHAPES[comm.size])
    with pytest.raises(AgreementError, match=r"(?s)rank 0: all_reduce\(.*\) with a deadline\n"):
        ops.all_reduce(SUM, np.ones(count), within(60 if comm.rank == 0 else None))


@on_ranks(4)
def test_at_the_last_moment_all_raise_or_none(comm, make_ops):
    rng = np.random.default_rng(7)  # of one seed, so that all ranks draw the same
    for moment in rng.uniform(0.048, 0.06, 8):
        ops = make_ops()
        comm.Barrier()
        time.sleep(moment * (comm.rank == comm.size - 1))
        try:
            ops.barrier(within(0.05))
            outcome = "passed"
        except DeadlineExceededError:
            outcome = "raised"
        assert len(set(comm.allgather(outcome))) == 1, moment
        ops.close()


def test_a_deadline_leaves_agreement_as_it_is(comm, make):
    ops = make(STRICT="1")
    with pytest.raises(AgreementError, match="ranks made different calls"):
        ops.barrier(within(10)) if comm.rank else ops.all_gather(ONES, options=within(20))
    with pytest.raises((ValueError, AgreementError), match="root must be one of"):
        ops.broadcast(ONES, root=-1 if comm.rank else 0, options=within(10))
    ops.barrier()


@two_ranks
def test_the_setting_is_the_deadline_of_calls_that_name_none(comm, make_ops, monkeypatch):
    monkeypatch.setenv("MPISTRAT_TIMEOUT_SECONDS", str(ENOUGH_SECONDS))
    ops = make_ops()
    time.sleep(2 * ENOUGH_SECONDS * (comm.rank == 0))
    ops.barrier(within(0))  # no deadline here, or in strict mode for its check
    told = r"agree\(this\) (did not end within 0.3 s|comes too late)"
    with late(comm, ops, 0), pytest.raises(DeadlineExceededError, match=told):
        ops.agree("agree(this)")


@on_ranks(4)
@pytest.mark.parametrize("is_started", [False, True])
@pytest.mark.parametrize("shape", ["1x4", "2x2"])
def test_ranks_that_wait_in_a_call_for_one_that_has_stopped_there_are_not_missing(
    comm, make_ops, monkeypatch, shape, is_started
):
    ops, large = make_ops(shape), np.ones(500_000)
    if comm.rank == 3:
        name = {"1x4": "shared_memory.Exchange._walk", "2x2": "ring.BoundRing.run"}[shape]
        others_have_left = cache(lambda: comm.Barrier() is None)
        monkeypatch.setattr(f"mpistrat.transports.{name}", lambda *_: until(others_have_left))
    seconds = 60 if comm.rank == 3 else ENOUGH_SECONDS
    found = "too late|was given up" if comm.rank == 3 else r"all ranks had arrived, and then no answer from rank 3 \(node\d\)$"
    number = 1 + (comm.rank != 1)  # behind the call under way ranks may have started others, as far as they have come
    with pytest.raises(DeadlineExceededError, match=found):
        start(ops, large, seconds, number).wait() if is_started else ops.all_reduce(SUM, [large], within(seconds))
    if comm.rank != 3:
        comm.Barrier()


@two_ranks
def test_a_rank_on_a_busy_machine_learns_in_time_that_another_has_left_the_call(comm, make_ops, monkeypatch):
    ops = make_ops("1x2")
    for _ in range(2):
        ops.all_reduce(SUM, ONES)
    if comm.rank == 0:
        monkeypatch.setattr(os, "sched_yield", lambda: time.sleep(0.01))  # as if other processes had run
        with pytest.raises(UnavailableError, match="rank 1 has left"):  # after TAKE_SECONDS the watcher would end the job
            ops.all_reduce(SUM, ONES)
    else:
        with ops._guard:
            ops._guard.number += 1
            ops._guard.fail_current(RuntimeError("planted"))
    comm.Barrier()


@two_ranks
@pytest.mark.parametrize("shape", ["2x1", "1x2"])
@pytest.mark.parametrize("verb", ["all_reduce", "all_gather", "gather", "broadcast", "all_to_all"])
def test_no_rank_returns_what_mpi_has_read_of_a_rank_that_has_left_the_call(comm, make_ops, monkeypatch, verb, shape):
    ops, values, out = make_ops(shape), np.ones(1 << 20), np.ones(2 << 20)
    module = mpi_world if verb == "all_reduce" else mpi
    until_complete = module.until_complete

    def interrupted(requests, memory):
        comm.recv(source=1)
        kept.append((list(requests), memory))
        raise KeyboardInterrupt
        yield

    def late(requests, memory):
        comm.send(None, 0)
        comm.recv(source=0)
        yield from until_complete(requests, memory)

    kept = []
    monkeypatch.setattr(module, "until_complete", late if comm.rank else interrupted)
    others = {"all_gather": [0, None, out], "gather": [1], "broadcast": [0], "all_to_all": []}
    given = [values, *others[verb]] if verb in others else [SUM, values, within(60, algorithm="flat")]
    with pytest.raises(CollectiveError if comm.rank else KeyboardInterrupt, match="rank 0 has left" if comm.rank else None):
        getattr(ops, verb)(*given)
    values[:] = out[:] = 5
    if comm.rank == 0:
        comm.send(None, 1)
    comm.Barrier()


@two_ranks
def test_all_ranks_learn_that_one_cannot_read_the_array_of_another(comm, make_ops, monkeypatch):
    ops = make_ops("1x2")
    if not ops._executor.intra.combines_arrays:
        pytest.skip("arrays are read by cross-memory attach alone")
    if comm.rank:
        monkeypatch.setattr(ops._executor.intra.window.cma, "_copy", lambda *given: "Bad address")
    told = "rank 1 has left collective .* it raised TransportError: rank 1: reading .* ordinary memory"
    with pytest.raises(TransportError if comm.rank else UnavailableError, match="Bad address" if comm.rank else told):
        ops.all_reduce("sum", np.ones(1 << 20), within(10))
    comm.Barrier()


@two_ranks
@pytest.mark.parametrize("calls_before", [0, 2], ids=["a new call", "a known one"])
@pytest.mark.parametrize("seconds", [SECONDS, None], ids=["deadline", "signal"])
def test_no_rank_returns_a_sum_of_what_another_has_changed_that_has_left_the_call(
    comm, make_ops, monkeypatch, seconds, calls_before
):
    ops, values, into = make_ops(), np.ones(1 << 20), Fold.into
    if not ops._executor.intra.combines_arrays:
        pytest.skip("arrays are combined where they lie by cross-memory attach alone")
    for _ in range(calls_before):
        ops.all_reduce(SUM, values, within(seconds and 60))

    def slow(*given):
        monkeypatch.setattr(Fold, "into", into)
        comm.send(None, 0)
        comm.recv(source=0)
        into(*given)

    def interrupted():
        if not seconds and comm.iprobe(source=1):
            raise KeyboardInterrupt

    if comm.rank == 0:
        monkeypatch.setattr(os, "sched_yield", interrupted)
        with pytest.raises(DeadlineExceededError if seconds else KeyboardInterrupt):
            ops.all_reduce(SUM, values, within(seconds))
        values[:] = 5
        comm.recv(source=1)
        comm.send(None, 1)
    else:
        monkeypatch.setattr(Fold, "into", slow)
        with pytest.raises(CollectiveError, match="comes too late: rank 0" if seconds else "rank 0 has left it"):
            ops.all_reduce(SUM, values, within(seconds and 60))


@two_ranks
@pytest.mark.parametrize("is_started", [False, True])
def test_steps_that_do_not_end_name_who_does_not_answer(comm, make, monkeypatch, is_started):
    # all have arrived, and one leaves the call as if it had ended
    ops, last = make(STRICT="0"), comm.size - 1
    options = within(60 if comm.rank == last else ENOUGH_SECONDS, deterministic=True)
    if comm.rank == last:
        monkeypatch.setattr("mpistrat.execution.compile.overlap", lambda *_: iter(()))
    works = [ops.start_all_reduce(SUM, [ONES, ONES], options) for _ in range(is_started * (1 if comm.rank == last else 3))]
    call = works[0].wait if works else lambda: ops.all_reduce(SUM, [ONES, ONES], options)
    if comm.rank == last:
        call()
    else:
        message = (
            rf"all_reduce\(SUM, .* did not end within 0.3 s; all ranks had arrived, .* no answer from rank {last} \(node1\)"
        )
        for again in [call, call, works[0].done] if works else [call]:
            with pytest.raises(DeadlineExceededError, match=message):
                again()
        for later in works[1:]:
            told = "an earlier start_all_reduce did not end .DeadlineExceededError."
            with pytest.raises(UnavailableError, match=told) as caught:
                later.wait()
            assert caught.value.__cause__ is works[0]._job.failure
        for again in VERBS.values():
            with pytest.raises(UnavailableError):
                again(ops, None)
    comm.Barrier()
    if comm.rank == last:
        # it hears at its next call, or when it closes, that the others will not come
        with pytest.raises(DeadlineExceededError, match=r"comes too late: rank|was given up by ranks? 0"):
            ops.barrier(within(60))


@two_ranks
@pytest.mark.parametrize("strict", ["0", "1"])
def test_the_deadline_of_what_was_started_counts_from_its_turn_and_ends_with_it(comm, make, strict):
    ops = make(STRICT=strict)
    comm.Barrier()
    is_late = comm.rank == comm.size - 1
    if is_late:
        time.sleep(2.5 * ENOUGH_SECONDS)
    # the first waits for the last rank; the second would be overdue by then, had its time run from here
    works = [ops.start_all_reduce(SUM, [ONES], within(seconds)) for seconds in (30, 2 * ENOUGH_SECONDS)]
    assert [work.wait()[0][0] for work in works] == [comm.size] * 2
    time.sleep(3 * ENOUGH_SECONDS * comm.rank)


def _rows():
    return mpistrat.IndexedSlices(np.ones((2, 3)), [0, 4], (5, 3))


def _in_run(call):
    return lambda strategy, options: strategy.run(lambda: call(mpistrat.get_replica_context(), options))


def _in_scope(call):
    def scoped(strategy, options):
        with strategy.scope():
            return call(options)

    return scoped


_ops, _one = mpistrat.HierarchicalAllReduce(), mpistrat.ReductionToOneDevice(accumulation_fn=sum)
STRATEGY_CALLS = {
    "all_reduce of slices": _in_run(lambda context, options: context.all_reduce("sum", _rows(), options)),
    "started all_reduce of slices": _in_run(lambda context, options: context.start_all_reduce("sum", _rows(), options).wait()),
    "reduce of slices": lambda strategy, options: strategy.reduce("sum", PerReplica(_rows()), None, options),
    "ops.reduce of slices": _in_scope(lambda options: _ops.reduce("sum", PerReplica(_rows()), {0, 1}, options)),
    "ops.batch_reduce of slices": _in_scope(lambda options: _ops.batch_reduce("sum", [(PerReplica(_rows()), 0)], options)),
    "ops.reduce by a function": _in_scope(lambda options: _one.reduce("sum", PerReplica(ONES), 0, options)),
    "reduce": lambda strategy, options: strategy.reduce("sum", PerReplica(ONES), None, options),
    "gather": lambda strategy, options: strategy.gather(PerReplica(ONES), 0, options),
    "all_gather": _in_run(lambda context, options: context.all_gather(ONES, 0, options)),
    "weighted all_reduce": _in_run(lambda context, options: context.all_reduce("mean", ONES, options, weight=1.0)),
    "reduce of a plain value": lambda strategy, options: strategy.reduce("sum", np.zeros(2), None, options),
}


@two_ranks  # each step is one of the verbs above, which are tried on nodes of several ranks
@pytest.mark.parametrize(("call", "strict"), [*product(STRATEGY_CALLS, "0"), ("reduce of slices", "1"), ("reduce", "1")])
def test_the_deadline_of_a_call_of_a_strategy_holds_in_all_its_steps(comm, make_strategy, call, strict):
    strategy = make_strategy(STRICT=strict, VIRTUAL_NODES=SHAPES[comm.size])
    STRATEGY_CALLS[call](strategy, within(60))
    started = time.monotonic()
    with late(comm, strategy.extended.communicator, comm.size - 1), pytest.raises(DeadlineExceededError) as caught:
        STRATEGY_CALLS[call](strategy, within(SECONDS))
    assert "comes too late" in str(caught.value) or f"missing rank {comm.size - 1}" in str(caught.value)
    if comm.rank < comm.size - 1:
        assert time.monotonic() - started < PATIENCE_SECONDS


@two_ranks
def test_calls_of_one_communicator_leave_the_deadline_of_another_one(make_ops):
    """As of another thread, which may be blocked in MPI: the watcher holds the deadline then."""
    one, other = make_ops(), make_ops()
    waiting = one._guard.deadlines
    waiting.watch(Call(1, "barrier", Signature("()"), 60.0, ends=time.monotonic() + 60))
    other.barrier(within(60))
    assert list(watcher.start().limits) == [waiting]
    waiting.end()
    assert not watcher.start().limits
