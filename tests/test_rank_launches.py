"""What becomes of a test that goes wrong on one rank only: planted tests, launched as the lane `ranks` launches its own."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from mpistrat.launch.mpiexec import command
from tests.processes import run_bounded

_ROOT = Path(__file__).parents[1]
_HEAD = """
import pytest
from mpi4py import MPI
from tests.launches import on_ranks, up_to_ranks

world = MPI.COMM_WORLD
pytestmark = pytest.mark.mpi
"""


@pytest.fixture
def launch(tmp_path):
    """Give a function that runs a planted test file on 3 ranks and returns the finished process and rank 0's report."""

    def run(source: str, *options: str):
        planted, report, own = tmp_path / "test_planted.py", tmp_path / "report.json", tmp_path / "own"
        own.mkdir()
        planted.write_text(_HEAD + source)
        configuration = ["-c", str(_ROOT / "pyproject.toml"), "--rootdir", str(_ROOT), "-p", "no:cacheprovider", "--color=no"]
        harness = ["-p", "tests.launches", "--with-mpi", "--rank-report", str(report), "--basetemp", str(own)]
        pytest_argv = [sys.executable, "-m", "pytest", *configuration, *harness, *options, str(planted)]
        argv, extra_env = command(3, pytest_argv)
        done = run_bounded(argv, 60, {**os.environ, **extra_env, "PYTHONPATH": str(_ROOT)}, tmp_path)
        tests = json.loads(report.read_text()) if report.exists() else []
        return done, {test["test"].rpartition("::")[2]: test for test in tests}

    return run


def test_a_failure_on_one_rank_is_red_on_all_and_tells_which(launch):
    done, tests = launch(
        """
def test_one_rank_is_wrong():
    assert world.rank != 1, "planted"

def test_the_next_one_is_not_touched():
    assert world.allreduce(1) == 3

@up_to_ranks(2)
def test_of_fewer_ranks():
    assert False, "planted"

@on_ranks(2, 4)
def test_of_other_ranks():
    assert False, "planted"

@up_to_ranks(3)
def test_of_these_ranks():
    pass
"""
    )
    assert done.returncode == 1
    assert tests["test_one_rank_is_wrong"]["outcome"] == "failed"
    assert tests["test_one_rank_is_wrong"]["text"].startswith("rank 1 of 3:")
    assert "AssertionError: planted" in tests["test_one_rank_is_wrong"]["text"]
    assert tests["test_the_next_one_is_not_touched"]["outcome"] == "passed"
    assert not {"test_of_fewer_ranks", "test_of_other_ranks"} & tests.keys()
    assert done.stdout.count("1 failed, 2 passed, 2 deselected") == 1, "only rank 0 prints"


def test_a_rank_that_fails_before_a_barrier_ends_the_launch(launch):
    done, _ = launch(
        """
def test_others_wait():
    assert world.rank != 1, "planted"
    world.Barrier()
"""
    )
    assert done.returncode not in (0, 124), "the launch must end, and long before its deadline"
    assert "[rank 1] " in done.stderr
    assert "test_others_wait (call) failed here, and other ranks did not leave it" in done.stderr
    assert "AssertionError: planted" in done.stderr


def test_a_test_without_end_shows_where_each_rank_stands(launch):
    done, _ = launch(
        """
def test_a_barrier_without_rank_0():
    if world.rank:
        world.Barrier()
""",
        "-o",
        "faulthandler_timeout=3",
    )
    assert done.returncode not in (0, 124)
    assert "test_planted.py" in done.stderr
    assert "in test_a_barrier_without_rank_0" in done.stderr


def test_a_misspelt_condition_is_refused(launch):
    done, _ = launch(
        """
@pytest.mark.mpi(minsize=2)
def test_spelling():
    pass
"""
    )
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "unknown ['minsize'] in its mpi mark; see tests/launches.py" in done.stderr
