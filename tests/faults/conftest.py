"""The fixture `job`: start a program text as a user would, with a deadline."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from mpistrat.launch.mpiexec import command, find_mpi
from tests.faults.jobs import PROLOGUE, Ended, ended, run_until
from tests.processes import run_bounded

JOB_SECONDS = 120.0  # for one that hangs


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name, share in (("worker_kill", 1), ("server_kill", 5)):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, range(max(1, metafunc.config.getoption("--kills") // share)))


@pytest.fixture
def needs_ulfm() -> None:
    """Skip a test of jobs that survive the loss of ranks where they cannot."""
    if find_mpi().flavour.name != "Open MPI":
        pytest.skip("of the MPI libraries that are supported only Open MPI survives the loss of ranks")


_NOT_STARTED = "The PMIx server's listener thread failed to start"


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Ended]:
    """Run a program text on some ranks and say how it ended; `python` is what stands before the script.

    With `enough` the job is ended as soon as that is true of what stands on its stderr; with `survive` it survives lost ranks.
    """

    def run(
        num_ranks: int,
        text: str,
        python: Sequence[str] = (sys.executable,),
        enough: Callable[[str], bool] | None = None,
        survive: bool = False,
        **environ: str,
    ) -> Ended:
        (tmp_path / "pid").mkdir()
        (tmp_path / "job.py").write_text(PROLOGUE + textwrap.dedent(text))
        argv, extra = command(num_ranks, [*python, "job.py"], survive=survive)
        execute = partial(run_until, enough) if enough else run_bounded
        done = execute(argv, JOB_SECONDS, {**os.environ, **extra, **environ}, tmp_path)
        if _NOT_STARTED in done.stderr:  # Open MPI's launcher itself, before it has started a rank; rare, on a busy machine
            done = execute(argv, JOB_SECONDS, {**os.environ, **extra, **environ}, tmp_path)
        return ended(done, tmp_path)

    return run
