"""The fixture `job`, and how often tasks are killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpistrat.launch.mpiexec import find_mpi
from tests.faults.jobs import Job


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name, share in (("worker_kill", 1), ("server_kill", 5)):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, range(max(1, metafunc.config.getoption("--kills") // share)))


@pytest.fixture
def needs_ulfm() -> None:
    """Skip a test of jobs that survive the loss of ranks where they cannot."""
    if find_mpi().flavour.name != "Open MPI":
        pytest.skip("of the MPI libraries that are supported only Open MPI survives the loss of ranks")


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Give what runs a program text on some ranks and says how it ended."""
    return Job(tmp_path)
