"""What runs in a session, and which lanes should; commands with a deadline."""

import os
import sys
from pathlib import Path

import pytest

from mpistrat.launch.mpiexec import command, find_mpi
from mpistrat.launch.process import find
from tests.lanes import LANES, scope_of
from tests.launches import needs_ranks, numbers_of_ranks, on_ranks, up_to_ranks
from tests.processes import TIMED_OUT, run_bounded, started, until


@pytest.fixture
def session(tmp_path):
    """Give a function that runs pytest in a checkout which has one test, in the lane `unit`."""
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = tests\n")
    (tmp_path / "tests" / "unit").mkdir(parents=True)
    (tmp_path / "tests" / "unit" / "test_one.py").write_text("def test_one():\n    pass\n")

    def run(*arguments, workers="-n0", **env):
        plugins = ["-p", "tests.lanes", "-p", "no:cacheprovider", "--color=no"]
        argv = [sys.executable, "-m", "pytest", *plugins, *workers.split(), *arguments]
        return run_bounded(argv, 60, {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), **env}, tmp_path)

    return run


# both wait for each other: in one process, or in turns, neither would go on
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

def test_one(): pass
def test_two(): pass
def test_three(): pass
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="on one core all tests run in one process")
def test_files_of_a_whole_session_run_beside_each_other(session, tmp_path):
    for lane, mine, theirs in (("faults", "a", "b"), ("docs", "b", "a")):
        (tmp_path / "tests" / lane).mkdir()
        (tmp_path / "tests" / lane / f"test_{mine}.py").write_text(_MEETING.format(mine=mine, theirs=theirs))
    done = session(workers="")
    assert "9 passed" in done.stdout, done.stdout
    assert (tmp_path / "a").read_text() != (tmp_path / "b").read_text()


@pytest.mark.parametrize(
    ("nodeid", "scope"),
    [
        ("tests/ranks/test_a.py::test_b[2x2]", "ranks"),
        ("tests/unit/test_a.py::test_b[1]", "tests/unit/test_a.py"),
        ("tests/faults/test_a.py::test_b[1]", "tests/faults/test_a.py::test_b[1]"),
    ],
)
def test_what_shares_a_job_is_handed_out_together(nodeid, scope):
    assert scope_of(nodeid) == scope


def test_a_lane_that_cannot_run_is_skipped_and_fails_where_it_is_required(session, tmp_path):
    (tmp_path / "tests" / "gpu").mkdir()
    (tmp_path / "tests" / "gpu" / "test_two.py").write_text("def test_two():\n    pass\n")
    reason = LANES["gpu"]()
    if reason:  # else there is a GPU, and its lane can run
        done = session("-rs")
        assert (done.returncode, "1 passed, 1 skipped" in done.stdout) == (pytest.ExitCode.OK, True), done.stdout
        assert f"the lane gpu cannot run here: {reason}\n" in done.stdout
        done = session(MPISTRAT_REQUIRE_LANES="gpu, unit")
        assert (done.returncode, "1 passed, 1 error" in done.stdout) == (pytest.ExitCode.TESTS_FAILED, True), done.stdout
        assert f"the lane gpu cannot run here: {reason}\n" in done.stdout


def test_a_selection_stays_in_one_process(session):
    for arguments in (["tests/unit"], ["-k", "one"]):
        done = session(*arguments, workers="")
        assert done.returncode == pytest.ExitCode.OK, done.stdout
        assert "workers" not in done.stdout


def test_an_unknown_lane_cannot_be_required(session):
    done = session(MPISTRAT_REQUIRE_LANES="host")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "MPISTRAT_REQUIRE_LANES names host; lanes are quality, unit, ranks" in done.stderr


def test_marks_say_on_which_numbers_of_ranks_a_test_runs(pytestconfig):
    for marks, numbers in (
        ([], [1, 2, 3]),
        ([needs_ranks(2), up_to_ranks(3)], [2, 3]),
        ([up_to_ranks(8)], [1, 2, 3, 4, 8]),
        ([on_ranks(2, 8)], [2, 8]),
        ([on_ranks(2, 4), up_to_ranks(3)], [2]),
        ([on_ranks(6)], [6]),  # deselected, unless --num-ranks names it
    ):
        assert numbers_of_ranks(pytestconfig, _Marked(marks)) == numbers
    with pytest.raises(pytest.UsageError, match=r"unknown \['minsize'\] in its mpi mark; see tests/launches.py"):
        numbers_of_ranks(pytestconfig, _Marked([pytest.mark.mpi(minsize=2)]))


class _Marked:
    nodeid = "test_planted.py::test_spelling"

    def __init__(self, marks):
        self.marks = [each.mark for each in marks]

    def iter_markers(self, name):
        return self.marks


# A child in a process group of its own, as mpiexec's ranks are; the parent prints its number.
_PARENT = ["bash", "-mc", 'sleep 60 >/dev/null 2>&1 & echo $!; sleep "$0"']


def _ends(pid):
    return until(lambda: find(int(pid)) is None, 5)  # a killed process needs a moment


@pytest.mark.parametrize(("seconds", "limit", "code"), [(60, 1, TIMED_OUT), (0, 30, 0)], ids=["the deadline", "the end"])
def test_nothing_is_left_after(seconds, limit, code):
    done = run_bounded([*_PARENT, str(seconds)], limit)
    assert done.returncode == code
    assert ("killed: still running after 1 s" in done.stderr) == (code == TIMED_OUT)
    assert _ends(done.stdout.strip())


def test_an_mpiexec_that_is_killed_leaves_nothing_that_stops_a_later_one(tmp_path, monkeypatch):
    if find_mpi().flavour.name != "Open MPI":
        pytest.skip("Open MPI leaves such files")
    monkeypatch.setenv("PRTE_MCA_prte_tmpdir_base", str(tmp_path))
    argv, extra = command(1, ["sleep", "60"])
    with started(argv, env={**os.environ, **extra}) as process:
        assert until(lambda: any(tmp_path.glob(f"ompi.{process.pid}/pmix.*")), 30)
    assert not [*tmp_path.glob("ompi.*/pmix.*")]
