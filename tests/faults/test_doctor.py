"""`mpistrat doctor` from another shell: of a job that hangs, of one that was killed, and of none."""

import json
import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass

import pytest

from tests.faults.jobs import PROLOGUE, PYTHON, Job
from tests.processes import patient, run_bounded, until

DOCTOR = (*PYTHON, "-m", "mpistrat", "doctor")
SECONDS = 60.0

PROGRAM = """
strategy = mpistrat.MultiWorkerMirroredStrategy()

def step():
    return mpistrat.get_replica_context().all_reduce("sum", np.ones(3))

def load():
    time.sleep(1000)

strategy.run(step)
if strategy.rank == 1:
    Path("up").touch()
    load()
strategy.run(step)
"""
_LINES = (PROLOGUE + PROGRAM).splitlines()
LOAD = 1 + _LINES.index("    time.sleep(1000)")
STEP = 1 + _LINES.index('    return mpistrat.get_replica_context().all_reduce("sum", np.ones(3))')


@dataclass(frozen=True)
class Hanging:
    """A job of three ranks in which two wait for the other: its launcher, and the processes of its ranks."""

    launcher: subprocess.Popen[bytes]
    pids: tuple[int, ...]


@pytest.fixture(scope="module")
def hanging(tmp_path_factory):
    """Give a job that tests look at, and leave as it is."""
    job = Job(tmp_path_factory.mktemp("hanging"))
    with job.start(3, PROGRAM) as launcher:
        assert until((job.folder / "up").exists, SECONDS)
        assert until(lambda: _is_seen(doctor(str(launcher.pid))), SECONDS)
        yield Hanging(launcher, job.pids())


def _is_seen(job):
    """Return whether ranks have recorded who waits, and where the late one is, which a thread looks up now and then."""
    return job["waits_for"] == {"0": [1], "2": [1]} and "(load)" in job["ranks"][1]["now_at"]


def doctor(*words):
    done = run_bounded([*DOCTOR, *words, "--json"], SECONDS)
    assert done.returncode == 0, done.stderr
    [job] = json.loads(done.stdout)
    return dict(job)


def test_it_shows_who_waits_for_whom_and_where_they_are(hanging):
    began = time.monotonic()
    job = doctor(str(hanging.launcher.pid))
    assert time.monotonic() - began < patient(10)
    assert (job["size"], job["is_running"], job["finding"]) == (3, True, "")
    assert [(rank["rank"], rank["pid"], rank["state"]) for rank in job["ranks"]] == [
        (rank, pid, state) for (rank, pid), state in zip(enumerate(hanging.pids), ("in", "out", "in"), strict=True)
    ]
    assert job["waits_for"] == {"0": [1], "2": [1]}
    assert f"job.py:{LOAD} (load)" in job["ranks"][1]["now_at"]
    assert f"job.py:{STEP} (step)" in job["ranks"][0]["calls"][0]["line"]
    assert doctor(str(hanging.pids[1]))["job"] == doctor(job["job"])["job"] == job["job"]
    report = run_bounded([*DOCTOR, job["job"]], SECONDS).stdout
    assert "ranks 0, 2 wait for rank 1\n" in report + "\n"
    assert f"job.py:{LOAD} (load)" in report


def test_it_tells_a_rank_that_is_stopped(hanging):
    os.kill(hanging.pids[1], signal.SIGSTOP)
    try:
        assert until(lambda: doctor(str(hanging.launcher.pid))["ranks"][1]["state"] == "stopped", SECONDS)
    finally:
        os.kill(hanging.pids[1], signal.SIGCONT)
    assert until(lambda: doctor(str(hanging.launcher.pid))["ranks"][1]["state"] == "out", SECONDS)


def test_it_tells_the_rank_that_a_signal_has_ended_from_those_that_ended_with_it(job):
    ended = job(3, PROGRAM.replace("time.sleep(1000)", "time.sleep(1.0); os.kill(os.getpid(), 9)"), run=())
    [line] = [line for line in ended.stderr.splitlines() if line.startswith("mpistrat run:")]
    assert re.match(r"mpistrat run: rank 1 on \S+ \(process \d+\) was ended by signal 9 \(Killed; .*mpistrat doctor \S+$", line)
    found = doctor(line.split()[-1])
    assert (found["is_running"], [rank["state"] for rank in found["ranks"]]) == (False, ["gone", "killed", "gone"])
    assert found["waits_for"] == {}  # nobody is left to wait
    assert f"job.py:{STEP} (step)" in found["ranks"][0]["calls"][0]["line"]
    assert f"job.py:{LOAD} (load)" in found["ranks"][1]["now_at"]
    assert f"job.py:{LOAD} (load)" in run_bounded([*DOCTOR, found["job"]], SECONDS).stdout
