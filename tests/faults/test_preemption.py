"""A slice of ``python -m tests.faults.preempt``: jobs that are told to end save, leave, and continue as if nobody had."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import mpistrat
from tests.faults.jobs import LIMIT_SECONDS
from tests.faults.preempt import PROGRAM, Counts, preempt
from tests.processes import run_bounded


def test_preempted_jobs_end_with_the_weights_of_an_undisturbed_one() -> None:
    counts = Counts()
    wrong = list(preempt("2x2", 2, seed=1, counts=counts))
    assert not wrong, "\n".join(wrong)
    assert counts.preempted


def test_mpistrat_run_returns_the_code_after_one_line_of_why(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    argv = [sys.executable, "-m", "mpistrat", "run", "-n", "2", "train.py", "0", "1000000"]
    done = run_bounded(argv, LIMIT_SECONDS, {**os.environ, "MPISTRAT_TIME_LIMIT": "0.01"}, tmp_path)
    assert (done.returncode, done.stdout) == (mpistrat.RESTART_EXIT_CODE, "")
    saved, stopped = done.stderr.splitlines()
    assert saved.startswith("mpistrat: step 2: ")
    assert stopped == "mpistrat: the job stops after step 2, which is saved: the time limit is near"


def test_a_program_that_finalizes_mpi_itself_ends_well(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"{PROGRAM}\nfrom mpi4py import MPI\nMPI.Finalize()\n")
    argv = [sys.executable, "-m", "mpistrat", "run", "-n", "2", "train.py", "0", "3"]
    done = run_bounded(argv, LIMIT_SECONDS, dict(os.environ), tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
