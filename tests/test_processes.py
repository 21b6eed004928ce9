"""Commands with a deadline: what they return, and that they leave nothing running."""

import os

import pytest

from mpistrat.launch.mpiexec import command, find_mpi
from mpistrat.launch.process import find
from tests.processes import TIMED_OUT, python, run_bounded, started, until

# A child in a process group of its own, as mpiexec's ranks are; the parent prints its number.
_PARENT = ["bash", "-mc", 'sleep 60 >/dev/null 2>&1 & echo $!; sleep "$0"']


def _ends(pid):
    return until(lambda: find(int(pid)) is None, 5)  # a killed process needs a moment


def test_a_command_returns_what_it_said():
    done = python("import sys; print('out', *sys.argv[1:]); print('err', file=sys.stderr); sys.exit(3)", "a word")
    assert (done.returncode, done.stdout, done.stderr) == (3, "out a word\n", "err\n")


def test_nothing_is_left_after_the_deadline():
    done = run_bounded([*_PARENT, "60"], 1)
    assert done.returncode == TIMED_OUT
    assert "killed: still running after 1 s" in done.stderr
    assert _ends(done.stdout.strip())


def test_nothing_is_left_after_the_end():
    done = run_bounded([*_PARENT, "0"], 30)
    assert done.returncode == 0
    assert _ends(done.stdout.strip())


def test_an_mpiexec_that_is_killed_leaves_nothing_that_stops_a_later_one(tmp_path, monkeypatch):
    if find_mpi().flavour.name != "Open MPI":
        pytest.skip("Open MPI leaves such files")
    monkeypatch.setenv("PRTE_MCA_prte_tmpdir_base", str(tmp_path))
    argv, extra = command(1, ["sleep", "60"])
    with started(argv, env={**os.environ, **extra}) as process:
        assert until(lambda: any(tmp_path.glob(f"ompi.{process.pid}/pmix.*")), 30)
    assert not [*tmp_path.glob("ompi.*/pmix.*")]
