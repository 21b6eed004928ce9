"""The plugin, as a user's tests see it: one session with tests that pass, fail, disagree, die and hang."""

import os
import re
import sys
import xml.etree.ElementTree as ET

import pytest

from mpistrat.launch.mpiexec import command
from tests.processes import codes_after_loss, run_bounded

_TESTS = """
import os, time
import numpy as np
import pytest
import mpistrat


@pytest.mark.ranks(2, nodes="2x1")
def test_passes(communicator):
    assert communicator.size == 2
    assert communicator.all_reduce("sum", np.ones(3))[0] == 2
    print(os.environ.get("MPISTRAT_VIRTUAL_NODES"))

@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrong", [0, 1])
def test_wrong_on_one_rank(strategy, wrong):
    assert strategy.rank != 1 or not wrong, "planted"

@pytest.mark.ranks(2)
def test_skipped_on_one_rank(communicator):
    if communicator.rank:
        pytest.skip("planted")

@pytest.mark.ranks(2)
@pytest.mark.xfail(strict=True)
@pytest.mark.parametrize("number", range(3))
def test_fails_as_expected(communicator, number):
    assert communicator.rank < min(number, 1)
    if number == 2:
        communicator.barrier()

@pytest.fixture
def on_rank_0(communicator):
    assert communicator.rank == 0

@pytest.mark.ranks(2)
@pytest.mark.xfail
def test_set_up_on_one_rank(on_rank_0):
    communicator.barrier()

@pytest.mark.ranks(2)
def test_fails_as_expected_later(communicator):
    if communicator.rank == 1:
        pytest.xfail("planted")

@pytest.mark.ranks(2)
def test_skipped(communicator):
    pytest.skip("planted")

@pytest.mark.ranks(2)
def test_left_by_one_rank(communicator):
    if communicator.rank == 0:
        communicator.all_reduce("sum", np.ones(3))

@pytest.mark.ranks(2)
def test_raises_on_one_rank(communicator):
    if communicator.rank == 1:
        raise ValueError("planted")
    communicator.barrier()

@pytest.mark.ranks(2)
def test_kills_one_rank(communicator):
    if communicator.rank == 1:
        os._exit(3)
    communicator.barrier()

@pytest.mark.ranks(2)
def test_sleeps_on_one_rank(communicator):
    if communicator.rank == 1:
        time.sleep(1000)
    communicator.barrier()

@pytest.mark.ranks(2)
def test_after_all_that(communicator, tmp_path, request):
    assert request.config.getoption("--greeting") == "hello"
    (tmp_path / "mine").write_text(str(communicator.rank))
    communicator.barrier()
    assert (tmp_path / "mine").read_text() == str(communicator.rank)

@pytest.mark.ranks(2)
def test_without_a_fixture(comm):
    pass

@pytest.mark.ranks(8)
def test_not_selected():
    assert False

def test_in_this_process(strategy):
    assert strategy.num_replicas_in_sync == 1
"""
_CONFTEST = """
def pytest_addoption(parser):
    parser.addoption("--greeting")
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "test_planted.py").write_text(_TESTS)
    (tmp_path / "conftest.py").write_text(_CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    return tmp_path


def _run(folder, *options, seconds=120.0, environ=None):
    """Run pytest there; return how it ended, and for each test its outcome and text."""
    # Hypothesis would be imported for nothing, by each rank too
    argv = [sys.executable, "-m", "pytest", "-p", "no:hypothesispytest", "--junitxml=results.xml", *options]
    done = run_bounded(argv, seconds, {**os.environ, **(environ or {})}, folder)
    found: dict[str, tuple[str, str]] = {}
    for case in ET.parse(folder / "results.xml").getroot().iter("testcase"):
        children = [child for child in case if child.tag in ("failure", "error", "skipped")]
        assert case.get("name") not in found, "each test is reported once"
        found[case.get("name")] = (children[0].tag, "".join(children[0].itertext())) if children else ("passed", "")
    return done, found


def test_each_test_of_several_ranks_is_one_test_here(folder):
    options = ["--greeting=hello", "-rs", "-k", "not selected", "-o", "ranks_timeout=5"]
    done, results = _run(folder, *options, seconds=300, environ={"MPISTRAT_STALL_SECONDS": "2"})
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    passed = {name for name, (outcome, _) in results.items() if outcome == "passed"}
    assert passed == {
        "test_in_this_process",
        "test_passes[2-ranks]",
        "test_passes[2x1]",
        "test_wrong_on_one_rank[2-ranks-0]",
        "test_after_all_that[2-ranks]",
    }
    skipped = {name for name, (outcome, _) in results.items() if outcome == "skipped"}
    names = ("skipped", "set_up_on_one_rank", "fails_as_expected_later")
    assert skipped == {
        *(f"test_fails_as_expected[2-ranks-{number}]" for number in range(3)),
        *(f"test_{name}[2-ranks]" for name in names),
    }
    assert re.search(r"SKIPPED \[1\] test_planted.py:\d+: planted", done.stdout)
    failures = {name: text for name, (outcome, text) in results.items() if outcome in ("failure", "error")}
    assert failures.keys() == results.keys() - passed - skipped
    assert failures["test_wrong_on_one_rank[2-ranks-1]"].startswith("rank 1 of 2: AssertionError: planted")
    assert failures["test_without_a_fixture[2-ranks]"].startswith("rank 0 of 2 (ranks 0, 1 failed): fixture 'comm' not found")
    assert failures["test_skipped_on_one_rank[2-ranks]"] == "ranks disagree: ['passed', 'skipped']"
    assert "all_reduce(SUM, [float64 (3,)]" in failures["test_left_by_one_rank[2-ranks]"]
    assert "the end of test_planted.py::test_left_by_one_rank" in failures["test_left_by_one_rank[2-ranks]"]
    raised = failures["test_raises_on_one_rank[2-ranks]"]
    assert raised.startswith("rank 1 of 2 (ranks 0, 1 failed): ValueError: planted"), "not what rank 0 has found of it"
    ended = re.match(r"the job of 2 ranks ended with (\d+)\n", failures["test_kills_one_rank[2-ranks]"])
    assert ended, failures["test_kills_one_rank[2-ranks]"]
    assert int(ended[1]) in codes_after_loss(3)
    assert "UserWarning" not in failures["test_kills_one_rank[2-ranks]"]
    slept = failures["test_sleeps_on_one_rank[2-ranks]"]
    assert slept.startswith("the job of 2 ranks is not done with this test after 5 s")
    assert "barrier()" in slept
    assert f"test_planted.py:{_line('time.sleep')} (test_sleeps_on_one_rank)" in slept, "the report names the line"


_LAUNCHED = '"OMPI_COMM_WORLD_RANK" in os.environ or "PMI_RANK" in os.environ'
_ANY = f"""
import os, time, pytest
if {_LAUNCHED}:
    {{begin}}
@pytest.mark.ranks(2)
@pytest.mark.parametrize("x", range({{count}}))
def test_any(communicator, x): pass
"""


@pytest.mark.parametrize(
    ("begin", "start_seconds", "outcome", "told"),
    [
        ("raise ImportError('planted')", 60, "failure", "ImportError: planted"),
        ("time.sleep(1000)", 2, "failure", "^the job of 2 ranks has not collected the tests after 2 s"),
        ("time.sleep(4)", 60, "passed", ""),  # which is not counted as the time of a test
    ],
)
def test_a_job_that_does_not_begin_fails_each_of_its_tests(folder, begin, start_seconds, outcome, told):
    (folder / "test_planted.py").write_text(_ANY.format(begin=begin, count=2))
    (folder / "conftest.py").write_text(f"from mpistrat.pytest import rank_jobs; rank_jobs.START_SECONDS = {start_seconds}\n")
    done, results = _run(folder, "-o", "ranks_timeout=3")
    assert [found for found, _ in results.values()] == [outcome] * 2, done.stdout
    assert all(re.search(told, text) for _, text in results.values())


_LOOP = """
import os, pytest

@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    if {launched}:
        return None
    for item, following in zip(session.items[1::2], [*session.items[3::2], None]):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
    return True
"""


def test_a_process_of_xdist_runs_the_tests_that_it_is_given(folder):
    (folder / "test_planted.py").write_text(_ANY.format(begin="pass", count=5))
    (folder / "conftest.py").write_text(_LOOP.format(launched=_LAUNCHED))
    done, results = _run(folder)
    assert {name: outcome for name, (outcome, _) in results.items()} == {
        "test_any[2-ranks-1]": "passed",
        "test_any[2-ranks-3]": "passed",
    }, done.stdout


@pytest.mark.parametrize(
    ("options", "told"),
    [(["-p", "no:capture", "--setup-show"], "1 passed"), (["--setup-plan"], "SETUP    F communicator")],
    ids=lambda value: value[-1],
)
def test_options_that_show_what_pytest_does_are_taken(folder, options, told):
    (folder / "test_planted.py").write_text("import pytest\n@pytest.mark.ranks(2)\ndef test_any(communicator): pass\n")
    done, _ = _run(folder, *options)
    assert done.returncode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED), done.stdout + done.stderr
    assert told in done.stdout


def test_fixtures_of_a_module_are_made_once_on_ranks(folder):
    (folder / "test_planted.py").write_text(
        "import pytest\n"
        "made = []\n"
        "@pytest.fixture(scope='module')\ndef kept(): made.append(1); yield; made.clear()\n"
        "@pytest.mark.ranks(2)\n@pytest.mark.parametrize('x', range(3))\n"
        "def test_any(kept, x): assert made == [1]\n"
    )
    (folder / "test_zzz.py").write_text(
        "import pytest, test_planted\n@pytest.mark.ranks(2)\ndef test_after(): assert test_planted.made == []\n"
    )
    done, results = _run(folder)
    assert [outcome for outcome, _ in results.values()] == ["passed"] * 4, done.stdout


def test_a_session_started_on_ranks_runs_what_fits_it_and_agrees_on_it(folder):
    selected = [sys.executable, "-m", "pytest", "--color=no", "-rs", "-k", "passes or wrong or not_selected"]
    argv, environ = command(2, selected)
    done = run_bounded(argv, 120, {**os.environ, **environ}, folder)
    assert done.stdout.count("1 failed, 3 passed, 1 skipped") == 2, done.stdout
    assert "8 ranks are wanted, and there are 2" in done.stdout


def test_a_session_started_on_ranks_for_other_tests_starts_no_mpi(folder):
    (folder / "test_planted.py").write_text("import sys\ndef test_any(): assert 'mpi4py.MPI' not in sys.modules\n")
    argv, environ = command(2, [sys.executable, "-m", "pytest", "--color=no"])
    done = run_bounded(argv, 60, {**os.environ, **environ}, folder)
    assert done.stdout.count("1 passed") == 2, done.stdout


def test_a_malformed_mark_or_setting_is_refused(folder):
    (folder / "test_planted.py").write_text("import pytest\n@pytest.mark.ranks(0)\ndef test_any(): pass\n")
    done, _ = _run(folder)
    assert "test_planted.py::test_any: pytest.mark.ranks(0): 0 is not a number of ranks" in done.stdout
    for text in ("5m", "nan"):
        done = run_bounded([sys.executable, "-m", "pytest", "-o", f"ranks_timeout={text}"], 60, None, folder)
        assert f"ranks_timeout = {text}: a number of seconds above 0 was expected" in done.stderr


@pytest.mark.parametrize(
    ("statement", "told", "code"),
    [("pytest.exit('planted', 7)", "rank 1: planted", 7), ("raise KeyboardInterrupt", "rank 1: KeyboardInterrupt", 2)],
)
def test_one_rank_ends_the_whole_session(folder, statement, told, code):
    (folder / "test_planted.py").write_text(
        "import pytest\n@pytest.mark.ranks(2)\n@pytest.mark.parametrize('x', range(3))\ndef test_any(communicator, x):\n"
        f"    if x and communicator.rank: {statement}\n    communicator.barrier()\n"
    )
    done, results = _run(folder)
    assert done.returncode == code, done.stdout
    assert len(results) < 3, "the third is not begun; whether rank 0 reports the second one, and the first, is a race"
    assert f"Exit: {told}" in done.stdout


def _line(text):
    return next(number for number, line in enumerate(_TESTS.splitlines(), 1) if text in line)


@pytest.mark.parametrize(
    "text",
    [
        "class TestAny(unittest.TestCase):\n    @pytest.mark.ranks(2)\n    def test_any(self): pass\n",
        "@pytest.mark.parametrize('x', [pytest.param(1, marks=pytest.mark.ranks(2))])\ndef test_any(x): pass\n",
    ],
    ids=["unittest", "parameter"],
)
def test_a_mark_that_starts_no_ranks_is_refused(folder, text):
    (folder / "test_planted.py").write_text(f"import unittest, pytest\n{text}")
    ended = run_bounded([sys.executable, "-m", "pytest"], 60, None, folder)
    assert ended.returncode == pytest.ExitCode.USAGE_ERROR
    assert "::test_any" in ended.stderr
    assert "would run in this process alone" in ended.stderr
