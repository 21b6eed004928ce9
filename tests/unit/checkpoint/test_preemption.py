"""The preemption handler in one process: what it hears, when it saves, how it ends, and what it leaves behind."""

import os
import signal
import time
from types import SimpleNamespace

import numpy as np
import pytest

import mpistrat
from mpistrat.checkpoint import files, preemption
from mpistrat.errors import CheckpointError, InvalidArgumentError
from mpistrat.experimental import PreemptionCheckpointHandler, TerminationConfig
from mpistrat.launch import end_of_job
from mpistrat.logger import logger
from tests.processes import python

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture(autouse=True)
def handlers(monkeypatch):
    """Give the handlers of signals that were there before, and check that they come back."""
    for name in ("MPISTRAT_TIME_LIMIT", "SLURM_JOB_ID", "SLURM_JOB_END_TIME", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    before = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGINT)}
    yield before
    if preemption._active is not None:
        preemption._active.close()
    assert {number: signal.getsignal(number) for number in before} == before
    signal.signal(signal.SIGINT, before[signal.SIGINT])


@pytest.fixture
def make(tmp_path):
    """Give a function that makes a handler of a state in a directory, as the program does that is started again."""

    def made(**config):
        state = {"value": 0}
        config.setdefault("exit_fn", lambda: ended.append(handler.total_run_calls))
        checkpoint, ended = mpistrat.Checkpoint(state=state), []
        handler = PreemptionCheckpointHandler(None, checkpoint, tmp_path / "ck", TerminationConfig(**config))
        handler.state, handler.ended = state, ended
        return handler

    return made


def take(handler, count, at=None, number=signal.SIGUSR1):
    """Take steps, and raise a signal in one of them."""

    def step(which):
        handler.state["value"] += 1
        if which == at:
            signal.raise_signal(number)
        return which

    for which in range(count):
        assert handler.run(step, which=which) == which


def saved(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_saves_after_its_step_and_ends_the_program_with_the_code(make, tmp_path, number, handlers):
    handler = make(exit_fn=None)
    with pytest.raises(SystemExit) as exited:
        take(handler, 9, at=2, number=number)
    assert exited.value.code == mpistrat.RESTART_EXIT_CODE == 42
    assert (handler.total_run_calls, saved(tmp_path / "ck")) == (3, ["ckpt-00000003"])
    signal.raise_signal(number)  # a second one, while the program ends
    handler.close()
    again = make()
    assert (again.total_run_calls, again.state) == (3, {"value": 3})
    take(again, 2)
    assert (again.total_run_calls, again.ended) == (5, [])


def test_a_signal_while_a_program_ends_that_was_not_told_to_comes_too_late(tmp_path):
    program = """
import atexit, signal, sys
# is called last; later the interpreter sets all handlers back that are not SIG_IGN
atexit.register(lambda: print(signal.getsignal(signal.SIGUSR1).name))
import mpistrat
handler = mpistrat.experimental.PreemptionCheckpointHandler(None, mpistrat.Checkpoint(state={}), sys.argv[1])
handler.run(print, "a step")
"""
    done = python(program, str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "a step\nSIG_IGN\n"), done.stderr


def test_after_an_exit_fn_that_returns_the_program_goes_on_unwatched(make, tmp_path, handlers):
    handler = make()
    take(handler, 5, at=1)
    assert (handler.ended, handler.total_run_calls, saved(tmp_path / "ck")) == ([2], 5, ["ckpt-00000002"])
    assert signal.getsignal(signal.SIGTERM) == handlers[signal.SIGTERM]


def test_save_fn_gets_the_arguments_and_a_signal_in_it_counts_once(make, tmp_path):
    got = []
    handler = make(save_fn=lambda *args, **kwargs: got.append((args, kwargs)))
    handler.save_checkpoint_if_preempted(1)
    signal.raise_signal(signal.SIGUSR2)
    handler.save_checkpoint_if_preempted(2, three=3)
    assert (got, handler.ended) == ([((2,), {"three": 3})], [2])
    handler = make(save_fn=lambda: signal.raise_signal(signal.SIGTERM) or own.append(1))
    own = []
    take(handler, 4, at=0)
    assert (own, handler.ended) == ([1], [1])


def test_a_scope_is_a_step_unless_it_raises_and_inside_run_it_says_where_it_belongs(make):
    handler = make()
    with pytest.raises(KeyError), handler.watch_preemption_scope():
        raise KeyError
    assert handler.total_run_calls == 0
    with handler.watch_preemption_scope():
        signal.raise_signal(signal.SIGUSR1)
    assert handler.ended == [1]
    handler, strategy = make(), mpistrat.OneDeviceStrategy()
    with pytest.raises(RuntimeError, match=r"correct: +handler.run\(lambda: strategy.run\(step\)\)"):
        strategy.run(lambda: handler.run(abs, 1))


def test_a_watcher_function_tells_too_and_signals_may_be_others(make, handlers):
    handler = make(termination_watcher_fn=lambda: handler.total_run_calls == 3, signals=(signal.SIGUSR2,))
    assert signal.getsignal(signal.SIGTERM) == handlers[signal.SIGTERM]
    take(handler, 5)
    assert handler.ended == [3]


@pytest.fixture
def clock(monkeypatch):
    """Give a clock that only the test moves on."""
    found = SimpleNamespace(now=1000.0)
    still = SimpleNamespace(**{**vars(time), "monotonic": lambda: found.now})
    for module in (preemption, end_of_job):
        monkeypatch.setattr(module, "time", still)
    return found


def test_with_a_grace_period_it_saves_at_once_and_again_at_its_end(make, clock):
    def save():
        clock.now += 0.5

    saved_at = []
    handler = make(grace_period=60.0, save_fn=lambda: save() or saved_at.append(clock.now))

    def step():
        clock.now += 1.0

    handler.run(step)
    signal.raise_signal(signal.SIGUSR1)
    while not handler.ended:
        handler.run(step)
    # the reserve: 3 steps of 1 s, 2 saves of 0.5 s, a twentieth
    assert saved_at == [1002.5, 1055.0]
    assert handler.ended == [54]


def test_it_stops_before_the_time_limit_as_early_as_saves_and_steps_take(make, clock, monkeypatch):
    monkeypatch.setattr(preemption, "seconds_left", lambda environ: 7200.0)
    handler = make()
    handler._checkpoint._writer.longest_seconds = 100.0
    for seconds in (2.0, 90.0, 10.0):  # the longest of the steps counts
        for _ in range(3):
            handler.run(lambda: setattr(clock, "now", clock.now + seconds))  # noqa: B023
    while not handler.ended:
        handler.run(lambda: setattr(clock, "now", clock.now + 10.0))
    # 3 steps of 10 s, 2 saves of 100 s, 30 s
    assert 7200 - 270 <= clock.now - 1000 <= 7200 - 250


def test_a_step_that_was_long_is_expected_again_for_a_while(make, clock, monkeypatch):
    monkeypatch.setattr(preemption, "seconds_left", lambda environ: 440.0)
    handler = make()
    handler.run(int)
    handler.run(lambda: setattr(clock, "now", clock.now + 100.0))
    assert handler.ended == []
    handler.run(lambda: setattr(clock, "now", clock.now + 50.0))
    assert handler.ended == [3], "3 steps of 90 s do not fit into 290 s"


def test_the_line_says_why_and_how_often_slurm_has_started_it_again(make, monkeypatch, caplog):
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    take(make(), 3, at=1)
    lines = {record.message for record in caplog.records if "stops" in record.message}
    assert lines == {"the job stops after step 2, which is saved: rank 0 has received SIGUSR1; SLURM_RESTART_COUNT=2"}


@pytest.mark.parametrize("is_told_before", [False, True])
def test_a_new_handler_closes_the_one_before_and_does_what_that_was_told(make, is_told_before):
    first = make()
    if is_told_before:
        signal.raise_signal(signal.SIGUSR1)
    second = make()
    if not is_told_before:
        signal.raise_signal(signal.SIGUSR1)
    take(first, 2)
    take(second, 1)
    assert (first.ended, second.ended) == ([], [1])


def test_close_restores_the_handlers_of_the_program_which_get_a_signal_that_saved_nothing(make):
    got = []

    def own(number, frame):
        got.append(number)

    before = signal.signal(signal.SIGUSR1, own)
    handler = make()
    assert signal.getsignal(signal.SIGUSR1) is not own
    handler.close()
    handler.close()
    assert (signal.getsignal(signal.SIGUSR1), got) == (own, [])
    for grace_period in (None, 60.0):  # the first one has not ended its step, the second one has saved
        handler = make(grace_period=grace_period)
        take(handler, 1)
        signal.raise_signal(signal.SIGUSR1)
        if grace_period:
            take(handler, 1)
        handler.close()
        handler.close()
        assert got == [signal.SIGUSR1]
    signal.signal(signal.SIGUSR1, before)


def test_ctrl_c_stays_ctrl_c(make, handlers):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        take(make(), 3, at=1, number=signal.SIGINT)


def test_a_checkpoint_that_does_not_fit_leaves_nothing_behind(make, tmp_path, handlers):
    mpistrat.Checkpoint(other={}).save(tmp_path / "ck" / "ckpt-00000001", wait=True)
    with pytest.raises(CheckpointError, match="does not fit"):
        make()
    assert preemption._active is None


def test_a_save_that_fails_is_an_error_and_no_exit(make, tmp_path):
    handler = make()
    (tmp_path / "ck").write_text("no folder")
    with pytest.raises(CheckpointError, match="ck"):
        take(handler, 3, at=1)
    assert handler.ended == []


def test_a_failed_save_before_is_told_and_does_not_keep_it_from_saving(make, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(logger, "propagate", True)
    handler = make()
    with monkeypatch.context() as patched:
        patched.setattr(files, "write_manifest", lambda *given: 1 // 0)
        handler._manager.save(0)
        handler._checkpoint._writer.join()
    take(handler, 2, at=1)
    assert (handler.ended, saved(tmp_path / "ck")) == ([2], ["ckpt-00000002"])
    assert "cannot be written: ZeroDivisionError" in caplog.text


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"exit_fn": 42}, "exit_fn must be a function or None; got 42"),
        ({"grace_period": -1.0}, "grace_period must be seconds >= 0"),
        ({"grace_period": "300"}, "grace_period must be seconds >= 0, or None; got '300'"),
        ({"signals": (signal.SIGINT,)}, "not Ctrl-C's"),
        ({"signals": signal.SIGTERM}, r"signals must be a sequence .* for example \(signal.SIGTERM,\); got <Signals.SIGTERM"),
    ],
)
def test_wrong_configurations_are_refused(config, text):
    with pytest.raises(InvalidArgumentError, match=text):
        TerminationConfig(**config)


def test_a_checkpoint_needs_a_directory_and_a_manager_has_one(tmp_path):
    checkpoint = mpistrat.Checkpoint(state={})
    manager = mpistrat.CheckpointManager(checkpoint, tmp_path)
    for made in ((checkpoint, None), (manager, tmp_path), ("checkpoint", tmp_path)):
        with pytest.raises(InvalidArgumentError, match="a CheckpointManager, or a Checkpoint and its checkpoint_dir"):
            PreemptionCheckpointHandler(None, *made)
    handler = PreemptionCheckpointHandler(mpistrat.cluster_resolver.SimpleClusterResolver(mpistrat.ClusterSpec({})), manager)
    assert handler.total_run_calls == 0


def test_the_time_that_is_left_is_the_least_of_what_is_known(monkeypatch, tmp_path):
    assert end_of_job.seconds_left({}) == np.inf
    age = end_of_job._age_seconds()
    assert end_of_job.seconds_left({"MPISTRAT_TIME_LIMIT": "1:00:00"}) == pytest.approx(3600 - age, abs=1.0)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(int(time.time()) + 100)}
    assert end_of_job.seconds_left(slurm) == pytest.approx(100, abs=2.0)
    assert end_of_job.seconds_left({**slurm, "MPISTRAT_TIME_LIMIT": f"{60 + age}"}) == pytest.approx(60, abs=1.0)


@pytest.mark.parametrize(
    ("answer", "seconds", "said"),
    [
        ("1-00:01:05", 86465.0, ""),
        ("2:05", 125.0, ""),
        ("UNLIMITED", np.inf, ""),
        ("UNLIMITED\\n3:00\\n2:00\\nNOT_SET\\n", 120.0, ""),
        ("INVALID\\n2:00", 120.0, "as squeue says INVALID: MPISTRAT_TIME_LIMIT can tell"),
        ("", np.inf, "as squeue says nothing: MPISTRAT_TIME_LIMIT can tell"),
        (None, np.inf, "MPISTRAT_TIME_LIMIT can"),  # there is no squeue
    ],
)
@pytest.mark.parametrize(
    ("job", "environ"),
    [("7", {}), ("7", {"SLURM_JOB_END_TIME": "0"}), ("6_3", {"SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "3"})],
)
def test_squeue_is_asked_where_slurm_has_set_no_end(monkeypatch, tmp_path, caplog, answer, seconds, said, job, environ):
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}" if answer is not None else str(tmp_path))
    if answer is not None:  # to this question alone
        asked = f"--noheader --format=%L --jobs={job}"
        (tmp_path / "squeue").write_text(f'#!/bin/sh\n[ "$*" = "{asked}" ] && printf "{answer}"\n')
        (tmp_path / "squeue").chmod(0o755)
    assert end_of_job.seconds_left({"SLURM_JOB_ID": "7", **environ}) == seconds
    assert said in caplog.text
    assert bool(said) == bool(caplog.text)
