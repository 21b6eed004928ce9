"""Two processes of one session: what the second finds is shown here, and neither outlives the other."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.processes import run_bounded

_ROOT = Path(__file__).parents[1]
_CONFTEST = """
import os
import pytest

from pathlib import Path

pytest_plugins = ["tests.lanes", "tests.launches", "tests.beside"]
os.environ.setdefault("FIRST", str(os.getpid()))
is_first = os.environ["FIRST"] == str(os.getpid())

def pytest_configure():
    from tests import launches
    launches._RANKS = Path(__file__).parent / "tests/ranks"
"""
# both sides wait for each other: in one process, or in turns, neither would go on
_MEETING = """
import os, time
from pathlib import Path

folder = Path(__file__).parents[2]

def test_meets():
    (folder / "{mine}").write_text(str(os.getpid()))
    deadline = time.monotonic() + 30
    while not (folder / "{theirs}").exists():
        assert time.monotonic() < deadline, "nobody runs beside this"
        time.sleep(0.01)
"""


@pytest.fixture
def checkout(tmp_path):
    """Give a function that runs pytest in a checkout with these files."""
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = tests\naddopts = --import-mode=importlib\n")
    (tmp_path / "conftest.py").write_text(_CONFTEST)

    def run(files: dict[str, str], *arguments: str):
        for name, text in files.items():
            path = tmp_path / "tests" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        argv = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--color=no", *arguments]
        return run_bounded(argv, 120, {**os.environ, "PYTHONPATH": str(_ROOT)}, tmp_path)

    return run


@pytest.fixture(autouse=True)
def _several_cores():
    if len(os.sched_getaffinity(0)) == 1:
        pytest.skip("on one core all tests run in one process")


def test_lanes_of_one_process_run_beside_the_others(checkout, tmp_path):
    meeting = {
        "faults/test_a.py": _MEETING.format(mine="a", theirs="b"),
        "unit/test_b.py": _MEETING.format(mine="b", theirs="a"),
    }
    done = checkout(meeting)
    assert "unit     1 run in " in done.stdout, done.stdout
    assert "faults   1 run in " in done.stdout
    assert "2 passed" in done.stdout
    assert (tmp_path / "a").read_text() != (tmp_path / "b").read_text()


def test_the_launch_of_one_rank_runs_beside_the_others(checkout, tmp_path):
    meeting = {
        "faults/test_a.py": _MEETING.format(mine="a", theirs="b"),
        "ranks/test_b.py": _MEETING.format(mine="b", theirs="a"),
        "unit/test_c.py": f"from pathlib import Path\ndef test_is_later(): assert Path({str(tmp_path / 'b')!r}).exists()\n",
    }
    done = checkout(meeting, "--num-ranks", "1,2")
    assert "ranks    2 run in " in done.stdout, done.stdout
    assert "4 passed" in done.stdout


def test_the_launch_of_many_ranks_does_not_wait_for_the_second_process(checkout):
    meeting = {
        "ranks/test_a.py": _MEETING.format(mine="a", theirs="b"),
        "unit/test_b.py": _MEETING.format(mine="b", theirs="a"),
    }
    done = checkout(meeting, "--num-ranks", "4")
    assert "ranks    1 run in " in done.stdout, done.stdout
    assert "2 passed" in done.stdout


def test_what_the_second_process_finds_is_told_as_if_it_ran_in_the_first(checkout):
    unit = """
import pytest

@pytest.fixture
def broken():
    raise ValueError("planted in a fixture")

def test_right():
    pass

def test_wrong():
    print("printed before")
    assert 1 + 1 == 3, "planted"

def test_unready(broken):
    pass

def test_left_out():
    pytest.skip("planted reason")
"""
    done = checkout({"unit/test_unit.py": unit, "faults/test_faults.py": "def test_fault():\n    pass\n"}, "-v")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    lines = [line.split(" [")[0].rstrip() for line in done.stdout.splitlines()]
    told = [line for line in lines if line.startswith("tests/") and "::" in line]
    assert told == [
        "tests/faults/test_faults.py::test_fault PASSED",
        "tests/unit/test_unit.py::test_right PASSED",
        "tests/unit/test_unit.py::test_wrong FAILED",
        "tests/unit/test_unit.py::test_unready ERROR",
        "tests/unit/test_unit.py::test_left_out SKIPPED (planted reason)",
    ]
    assert "E       AssertionError: planted" in done.stdout
    assert "printed before" in done.stdout
    assert "ValueError: planted in a fixture" in done.stdout
    assert "[100%]" in done.stdout
    assert "1 failed, 2 passed, 1 skipped, 1 error" in done.stdout
    assert "unit     3 run in 0.0 s, 2 failed, 1 skipped (1 x planted reason)" in done.stdout


def test_a_second_process_that_dies_is_a_failure_of_the_test_it_was_in(checkout):
    unit = """
import os

def test_right():
    pass

def test_dies():
    os.write(2, b"last words")
    os._exit(0)

def test_never_runs():
    pass
"""
    done = checkout({"unit/test_unit.py": unit}, "-v")
    assert done.returncode not in (pytest.ExitCode.OK, 124)
    assert "tests/unit/test_unit.py::test_right PASSED" in done.stdout
    assert "tests/unit/test_unit.py::test_dies FAILED" in done.stdout
    assert "the process that runs this test ended before the test did" in done.stdout
    assert "test_never_runs" not in done.stdout
    assert "1 failed, 1 passed" in done.stdout


def test_the_second_process_ends_with_the_first_and_clears_away(checkout, tmp_path):
    interrupted = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in the background of a shell
    files = {
        "faults/test_a.py": """
import time
from pathlib import Path

def test_fails_once_the_other_is_there():
    while not Path("started").exists():
        time.sleep(0.01)
    assert False, "planted"
""",
        "unit/test_b.py": """
import time
from pathlib import Path

def test_long():
    Path("started").touch()
    try:
        time.sleep(600)
    finally:
        Path("cleared away").touch()
""",
    }
    try:
        done = checkout(files, "-x")
    finally:
        signal.signal(signal.SIGINT, interrupted)
    assert "1 failed" in done.stdout, done.stdout
    assert "stopping after 1 failures" in done.stdout
    assert (tmp_path / "cleared away").exists()


@pytest.mark.parametrize("arguments", [["tests/unit"], ["-k", "unit"], ["-s"]])
def test_a_selection_and_live_output_stay_in_one_process(checkout, tmp_path, arguments):
    text = "import conftest\n\ndef test_unit():\n    assert conftest.is_first\n"
    done = checkout({"unit/test_unit.py": text}, *arguments)
    assert "1 passed" in done.stdout, done.stdout
