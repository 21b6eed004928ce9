"""Restarts: which ends of a job start it again, how often, and what is said."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpistrat.launch.abort import RESTART_EXIT_CODE
from mpistrat.launch.end_of_job import note_saved, run_again, seconds_left
from mpistrat.launch.mpiexec import TIMED_OUT, Ended
from mpistrat.settings import PROGRESS_FILE, RESTART_COUNT
from tests.processes import started

FAILS, PREEMPTED = Ended(1), Ended(RESTART_EXIT_CODE)
NO_PROGRESS = "not started again, because it failed twice without progress: why"
THAT_OFTEN = "not started again, because that was done 2 times: why"
NONE_SAVED, LAST = "no checkpoint was saved since it started", "the last checkpoint is that of step"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run jobs that save steps and end in turn; return the exit code, how many have run, and what was said."""
    for name in (RESTART_COUNT, PROGRESS_FILE, "MPISTRAT_TIME_LIMIT", "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        monkeypatch.delenv(name, raising=False)

    def run(most, *jobs):
        counts, said = list[str](), list[str]()

        def start(variables):
            steps, ended = jobs[len(counts)]
            counts.append(variables[RESTART_COUNT])
            assert Path(variables[PROGRESS_FILE]).parent == tmp_path
            monkeypatch.setenv(PROGRESS_FILE, variables[PROGRESS_FILE])
            for step in steps:
                note_saved(step)
            return ended, "why"

        code = run_again(start, most, 0.0, tmp_path, said.append)
        assert counts == [str(number) for number in range(len(counts))]
        assert not list(tmp_path.iterdir())
        return code, len(counts), said

    return run


def test_what_is_saved_is_told_at_each_restart(run):
    code, count, said = run(9, ([], FAILS), ([5, 10], Ended(137)), ([15], Ended(TIMED_OUT)), ([20], Ended(0)))
    assert (code, count) == (0, 4)
    assert said == [
        f"restart 1 of 9: why; {NONE_SAVED}",
        "restart 2 of 9: why; the last checkpoint is that of step 10",
        "restart 3 of 9: why; the last checkpoint is that of step 15",
    ]


BY_USR1 = {"signals": frozenset({signal.SIGUSR1})}
# how often it may be started again, what its jobs save and how they end; the code, and why it was not started again
ENDS = {
    "twice without progress": (9, [([], Ended(3)), ([], Ended(4))], 4, f"{NO_PROGRESS}; {NONE_SAVED}"),
    "an older step": (9, [([5], FAILS), ([10], FAILS), ([10, 5], FAILS)], 1, f"{NO_PROGRESS}; {LAST} 10"),
    # checkpoints without steps are progress
    "no steps": (9, [([0], FAILS), ([0, 0], FAILS), ([0], FAILS), ([], FAILS)], 1, f"{NO_PROGRESS}; {LAST} 0"),
    "steps, and none": (9, [([0, 5], FAILS), ([0], FAILS)], 1, NO_PROGRESS),
    # a preemption after a save is no failure
    "preempted": (9, [([], PREEMPTED), ([], PREEMPTED), ([], FAILS), ([], PREEMPTED), ([], FAILS)], 1, NO_PROGRESS),
    "too often": (2, [([step], Ended(7)) for step in range(3)], 7, f"{THAT_OFTEN}; {LAST} 2"),
    # what is preempted with its allocation is not started again in it
    "preempted from outside": (9, [([5], Ended(RESTART_EXIT_CODE, **BY_USR1))], RESTART_EXIT_CODE, ""),
    "failed after a signal": (9, [([5], Ended(1, **BY_USR1)), ([], Ended(0))], 0, "restart 1 of 9"),
    **{
        f"ended by {number.name}": (9, [([5], Ended(130, signals=frozenset({number})))], 130, "")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    },
}


@pytest.mark.parametrize("end", ENDS)
def test_a_job_is_started_again_until_that_is_in_vain(run, end):
    most, jobs, code, told = ENDS[end]
    found, count, said = run(most, *jobs)
    assert (found, count, bool(said)) == (code, len(jobs), bool(told))
    assert said == [] or said[-1].startswith(told)


def test_in_an_allocation_of_slurm_and_before_a_time_limit_nothing_is_started_again(run, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert run(9, ([5], PREEMPTED)) == (RESTART_EXIT_CODE, 1, [])
    monkeypatch.setenv("MPISTRAT_TIME_LIMIT", "11:50:00")
    assert run(9, ([5], FAILS), ([10], PREEMPTED))[:2] == (RESTART_EXIT_CODE, 2)


def test_the_time_limit_counts_from_the_first_start(monkeypatch):
    now, left = 1000.0, list[float]()
    monkeypatch.setattr(time, "time", lambda: now)

    def start(variables):
        nonlocal now
        now += 40.0
        left.append(seconds_left({**variables, "MPISTRAT_TIME_LIMIT": "100"}))
        return FAILS, "why"

    run_again(start, 9, 0.0, None, lambda _: None)
    assert left == [60.0, 20.0]


def test_a_progress_file_that_is_on_another_host_is_no_error(tmp_path, monkeypatch):
    monkeypatch.delenv(PROGRESS_FILE, raising=False)
    note_saved(1)
    monkeypatch.setenv(PROGRESS_FILE, str(tmp_path / "progress"))
    note_saved(1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "saved", "code"),
    [
        ("INT", "no", -signal.SIGINT),
        ("TERM", "no", 128 + signal.SIGTERM),
        ("HUP", "no", 128 + signal.SIGHUP),
        ("USR1", "no", 1),
        ("USR1", "a", RESTART_EXIT_CODE),
        ("USR2", "a", RESTART_EXIT_CODE),
    ],
)
def test_a_signal_between_two_jobs_leaves_nothing_behind(tmp_path, name, saved, code):
    program = """
import sys
from pathlib import Path
from mpistrat.launch.mpiexec import Ended
from mpistrat.launch.end_of_job import run_again
def start(variables):
    if sys.argv[1] == "a":
        Path(variables["MPISTRAT_PROGRESS_FILE"]).write_text("0\\n")
    return Ended(1), "why"
run_again(start, 3, 60.0, Path.cwd(), lambda line: print(line, flush=True))
"""
    argv = ["env", "--default-signal=HUP,INT,TERM,USR1,USR2", sys.executable, "-c", program, saved]
    with started(argv, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        place = "the last checkpoint is that of step 0" if saved == "a" else "no checkpoint was saved since it started"
        assert process.stdout.readline() == f"restart 1 of 3 in 60 s: why; {place}\n"
        assert len(list(tmp_path.iterdir())) == 1
        os.kill(process.pid, signal.Signals[f"SIG{name}"])
        assert process.wait(60) == code
    assert not list(tmp_path.iterdir())
