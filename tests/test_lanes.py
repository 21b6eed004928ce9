"""The last word of a session: what ran in each lane, and which lanes should have run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.lanes import LANES
from tests.processes import run_bounded

_ROOT = Path(__file__).parents[1]


@pytest.fixture
def session(tmp_path):
    """Give a function that runs pytest in a checkout which has one test, in the lane `unit`."""
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = tests\n")
    (tmp_path / "tests" / "unit").mkdir(parents=True)
    (tmp_path / "tests" / "unit" / "test_one.py").write_text("def test_one():\n    pass\n")

    def run(*arguments: str, **env: str):
        argv = [sys.executable, "-m", "pytest", "-p", "tests.lanes", "-p", "no:cacheprovider", "--color=no", *arguments]
        return run_bounded(argv, 60, {**os.environ, "PYTHONPATH": str(_ROOT), **env}, tmp_path)

    return run


def test_a_lane_that_runs_nothing_fails_the_session(session):
    done = session()
    assert "unit     1 run in 0.0 s\n" in done.stdout
    assert "ranks    ran nothing, and no reason is known: a failure\n" in done.stdout
    assert "1 passed" in done.stdout
    assert done.returncode == pytest.ExitCode.TESTS_FAILED


def test_a_selection_may_leave_lanes_out(session):
    for arguments in (["tests/unit"], ["-k", "one"]):
        done = session(*arguments)
        assert done.returncode == pytest.ExitCode.OK, done.stdout
        assert "unit     1 run in 0.0 s\n" in done.stdout
        assert "ranks" not in done.stdout


def test_a_lane_that_cannot_run_says_why_and_fails_only_where_it_is_required(session):
    reason = LANES["gpu"]()
    if not reason:
        pytest.skip("there is a GPU: its lane can run")
    assert f"gpu      cannot run here: {reason}\n" in session().stdout
    assert f"gpu      required, but cannot run here: {reason}: a failure\n" in session(MPISTRAT_REQUIRE_LANES="gpu").stdout


def test_an_unknown_lane_cannot_be_required(session):
    done = session(MPISTRAT_REQUIRE_LANES="host")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "MPISTRAT_REQUIRE_LANES names host; lanes are quality, unit, ranks" in done.stderr
