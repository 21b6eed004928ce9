"""The preemption handler on several ranks: all save and leave at the same step, whichever of them were told, and when."""

import signal
import time
from pathlib import Path

import numpy as np
import pytest

import mpistrat
from mpistrat.checkpoint import preemption
from mpistrat.errors import AgreementError, CollectiveError, DeadlineExceededError
from mpistrat.experimental import PreemptionCheckpointHandler, TerminationConfig
from mpistrat.watch import watcher
from tests.launches import on_ranks
from tests.ranks.test_checkpoint import strategy_of


@pytest.fixture
def make(comm, tmp_path):
    """Give a function that makes a handler of a training in a folder that all ranks share, as a program started again does."""
    folder, strategies = Path(comm.bcast(str(tmp_path))) / "ck", []
    shape = f"2x{comm.size // 2}"  # what the handler exchanges is the same on all shapes

    def made(options=None, **config):
        strategy = strategy_of(comm, shape, options)
        strategies.append(strategy)
        with strategy.scope():
            weights = mpistrat.Variable(np.zeros(2))
            checkpoint = mpistrat.Checkpoint(weights=weights)
        config.setdefault("exit_fn", lambda: handler.left.append(handler.total_run_calls))
        handler = PreemptionCheckpointHandler(None, checkpoint, folder, TerminationConfig(**config))
        handler.left, handler.weights, handler.rank, handler.folder = [], weights, comm.rank, folder
        handler.step = lambda: weights.assign_add(mpistrat.get_replica_context().all_reduce("sum", np.ones(2)))
        handler.train = lambda: strategy.run(handler.step)
        return handler

    made.strategies, made.size = strategies, comm.size
    yield made
    if preemption._active is not None:
        preemption._active.close()
    for strategy in strategies:
        strategy.close()


@on_ranks(2)
def test_a_strategy_may_be_closed_before_its_handler(make):
    handler = make()
    steps(handler, handler.train)
    make.strategies.pop().close()
    handler.close()
    assert handler.weights.numpy().tolist() == [3 * make.size] * 2


def abandon(make):
    """Leave alone what cannot be closed any more, as ranks are out of step."""
    preemption._active._signals.restore()
    preemption._active = None
    make.strategies.clear()
    watcher.watcher().begin()  # as a new strategy does


def steps(handler, step_fn, count=3):
    for _ in range(count):
        handler.run(step_fn)


@on_ranks(2, 4)
def test_one_some_or_all_ranks_that_are_told_leave_at_one_step(comm, make):
    for told in ({0: 2}, {comm.size - 1: 3}, {0: 4, 1: 3}, {rank: 2 + rank % 2 for rank in range(comm.size)}):
        handler = make()
        begun, at = handler.total_run_calls, told.get(comm.rank)
        assert handler.weights.numpy().tolist() == [begun * comm.size] * 2
        for count in range(1, 9):
            handler.run(handler.train)
            if count == at:  # after the end of this step: passed on at that of the next one, known at that of the one after
                signal.raise_signal(signal.SIGUSR1)
        assert handler.left == [begun + min(told.values()) + 2]
        names = [path.name for path in handler.folder.iterdir()]
        comm.Barrier()
        assert names == [f"ckpt-{handler.left[0]:08d}"]


@on_ranks(2)
def test_a_signal_inside_run_is_known_a_step_later(comm, make):
    handler = make()

    def step():
        if comm.rank == 1 and handler.total_run_calls == 0:
            signal.raise_signal(signal.SIGTERM)
        handler.step()

    steps(handler, lambda: handler.weights._strategy.run(step))
    assert handler.left == [2]


@on_ranks(2)
def test_the_grace_period_of_one_rank_is_that_of_all(comm, make):
    saves = []
    handler = make(grace_period=0.6, save_fn=lambda: saves.append(handler.total_run_calls))
    if comm.rank == 1:
        signal.raise_signal(signal.SIGUSR2)
    while not handler.left:
        handler.run(handler.train)
    assert saves == [2, *handler.left]
    assert comm.allgather(handler.left) == [handler.left] * comm.size


@on_ranks(2)
def test_the_time_limit_that_rank_0_knows_is_that_of_all(comm, make, monkeypatch):
    monkeypatch.setattr(preemption, "seconds_left", lambda environ: 0.5 if comm.rank == 0 else pytest.fail("one rank asks"))
    handler = make()
    while not handler.left:
        handler.run(handler.train)
    assert comm.allgather(handler.left) == [handler.left] * comm.size


@on_ranks(2)
def test_ranks_with_other_arguments_or_another_call_are_named(comm, make):
    with pytest.raises(AgreementError, match=r"PreemptionCheckpointHandler\(checkpoint_dir=.*, grace_period=0.5\)"):
        make(grace_period=0.5 if comm.rank else None)
    handler = make()
    handler.run(handler.train)
    with pytest.raises(CollectiveError, match="PreemptionCheckpointHandler: a step"):
        handler.train() if comm.rank else steps(handler, int)
    abandon(make)


@on_ranks(2)
def test_a_rank_that_misses_the_deadline_of_a_step_is_in_step_with_the_others_in_what_follows(comm, make):
    handler = make(mpistrat.experimental.CommunicationOptions(timeout_seconds=0.5))
    handler.run(int)
    if comm.rank == 0:
        handler.run(int)
        with pytest.raises(DeadlineExceededError, match="PreemptionCheckpointHandler: a step did not end within 0.5 s"):
            handler.run(int)
    abandon(make)
    comm.Barrier()
    if comm.rank == 0:  # it has come further than the other one, which waits so long that it looks what this one does
        time.sleep(watcher.PATIENCE_SECONDS + 3 * watcher.WAKE_SECONDS)
    mpistrat.MultiWorkerMirroredStrategy().close()
