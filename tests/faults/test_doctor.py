"""`mpistrat doctor` from another shell: of a job that hangs, of one that was killed, and of none."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mpistrat.launch.mpiexec import command
from tests.processes import patient, run_bounded, started, until

DOCTOR = (sys.executable, "-m", "mpistrat", "doctor")
SECONDS = 60.0

PROGRAM = """
import os, sys, time
from pathlib import Path
import numpy as np
import mpistrat

strategy = mpistrat.MultiWorkerMirroredStrategy()

def step():
    return mpistrat.get_replica_context().all_reduce("sum", np.ones(3))

def load():
    time.sleep(1000)

strategy.run(step)
rank = strategy.extended.communicator.rank
Path(f"pid{rank}").write_text(str(os.getpid()))
if rank == 1:
    load()
strategy.run(step)
"""
LOAD, STEP = (
    1 + PROGRAM.splitlines().index("    time.sleep(1000)"),
    1 + PROGRAM.splitlines().index('    return mpistrat.get_replica_context().all_reduce("sum", np.ones(3))'),
)


@dataclass(frozen=True)
class Hanging:
    """A job of three ranks in which two wait for the other: its launcher, and the processes of its ranks."""

    launcher: subprocess.Popen[bytes]
    pids: list[int]


@pytest.fixture(scope="module")
def hanging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hanging]:
    """Give a job that tests look at, and leave as it is."""
    folder = tmp_path_factory.mktemp("hanging")
    (folder / "train.py").write_text(PROGRAM)
    argv, extra = command(3, [sys.executable, "train.py"])
    environ = {**os.environ, **extra}
    files = [folder / f"pid{rank}" for rank in range(3)]
    with started(argv, env=environ, cwd=folder, stderr=subprocess.DEVNULL) as launcher:
        assert until(lambda: all(file.exists() and file.read_text() for file in files), SECONDS)
        assert until(lambda: doctor(str(launcher.pid))["waits_for"] == {"0": [1], "2": [1]}, SECONDS)
        yield Hanging(launcher, [int(file.read_text()) for file in files])


def doctor(*words: str) -> dict[str, Any]:
    done = run_bounded([*DOCTOR, *words, "--json"], SECONDS)
    assert done.returncode == 0, done.stderr
    [job] = json.loads(done.stdout)
    return dict(job)


def test_it_shows_who_waits_for_whom_and_where_they_are(hanging: Hanging) -> None:
    began = time.monotonic()
    job = doctor(str(hanging.launcher.pid))
    assert time.monotonic() - began < patient(10)
    assert (job["size"], job["is_running"], job["finding"]) == (3, True, "")
    assert [(rank["rank"], rank["pid"], rank["state"]) for rank in job["ranks"]] == [
        (rank, pid, state) for (rank, pid), state in zip(enumerate(hanging.pids), ("in", "out", "in"), strict=True)
    ]
    assert job["waits_for"] == {"0": [1], "2": [1]}
    assert f"train.py:{LOAD} (load)" in job["ranks"][1]["now_at"]
    assert f"train.py:{STEP} (step)" in job["ranks"][0]["calls"][0]["line"]
    assert doctor(str(hanging.pids[1]))["job"] == doctor(job["job"])["job"] == job["job"]
    report = run_bounded([*DOCTOR, job["job"]], SECONDS).stdout
    assert "ranks 0, 2 wait for rank 1\n" in report + "\n"
    assert f"train.py:{LOAD} (load)" in report


def test_it_tells_a_rank_that_is_stopped(hanging: Hanging) -> None:
    os.kill(hanging.pids[1], signal.SIGSTOP)
    try:
        assert until(lambda: doctor(str(hanging.launcher.pid))["ranks"][1]["state"] == "stopped", SECONDS)
    finally:
        os.kill(hanging.pids[1], signal.SIGCONT)
    assert until(lambda: doctor(str(hanging.launcher.pid))["ranks"][1]["state"] == "out", SECONDS)


def test_it_tells_the_rank_that_a_signal_has_ended_from_those_that_ended_with_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM.replace("time.sleep(1000)", "time.sleep(1.5); os.kill(os.getpid(), 9)"))
    done = run_bounded([sys.executable, "-m", "mpistrat", "run", "-n", "3", "train.py"], SECONDS, cwd=tmp_path)
    [line] = [line for line in done.stderr.splitlines() if line.startswith("mpistrat run:")]
    assert re.match(r"mpistrat run: rank 1 on \S+ \(process \d+\) was ended by signal 9 \(Killed; .*mpistrat doctor \S+$", line)
    job = doctor(line.split()[-1])
    assert (job["is_running"], [rank["state"] for rank in job["ranks"]]) == (False, ["gone", "killed", "gone"])
    assert job["waits_for"] == {}  # nobody is left to wait
    assert f"train.py:{STEP} (step)" in job["ranks"][0]["calls"][0]["line"]
    assert f"train.py:{LOAD} (load)" in job["ranks"][1]["now_at"]
    assert f"train.py:{LOAD} (load)" in run_bounded([*DOCTOR, job["job"]], SECONDS).stdout
