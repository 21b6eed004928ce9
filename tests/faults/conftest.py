"""The fixture `job`: start a program text as a user would, with a deadline."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from mpistrat.launch.mpiexec import command
from tests.faults.jobs import PROLOGUE, Ended, ended
from tests.processes import run_bounded

JOB_SECONDS = 40.0


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Ended]:
    """Run a program text on some ranks and say how it ended; `python` is what stands before the script."""

    def run(num_ranks: int, text: str, python: Sequence[str] = (sys.executable,), **environ: str) -> Ended:
        (tmp_path / "pid").mkdir()
        (tmp_path / "job.py").write_text(PROLOGUE + textwrap.dedent(text))
        argv, extra = command(num_ranks, [*python, "job.py"])
        return ended(run_bounded(argv, JOB_SECONDS, {**os.environ, **extra, **environ}, tmp_path), tmp_path)

    return run
