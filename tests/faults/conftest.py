"""The fixture `job`, and how often tasks are killed."""

import pytest

from tests.faults.jobs import Job


def pytest_generate_tests(metafunc):
    for name, share in (("worker_kill", 1), ("server_kill", 5)):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, range(max(1, metafunc.config.getoption("--kills") // share)))


@pytest.fixture
def job(tmp_path):
    """Give what runs a program text on some ranks and says how it ended."""
    return Job(tmp_path)
