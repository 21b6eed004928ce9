"""The lane `ranks`: the session starts mpiexec for each number of ranks, and each launch is one test item.

A session that a launcher has started already (``mpiexec -n 4 pytest tests/ranks``, ``srun … pytest``) is one of the ranks:
it collects the lane's tests themselves, and nothing else.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mpistrat.launch.environment import detect
from mpistrat.launch.mpiexec import command
from tests.processes import run_bounded

NUM_RANKS = (1, 2, 3, 4, 8)
MOST_RANKS = 4  # of a test that says nothing else: more are processes that share two cores
LAUNCH_SECONDS = 1800.0
TEST_SECONDS = 300  # a test that takes longer shows where each rank stands, and ends its launch

_RANKS = Path(__file__).parent / "ranks"
_SELECTED = pytest.StashKey[list[str]]()


def needs_ranks(minimum: int) -> pytest.MarkDecorator:
    """Mark a test that makes sense from this many ranks on; launches of fewer leave it out."""
    return pytest.mark.mpi(min_size=minimum)


def up_to_ranks(maximum: int) -> pytest.MarkDecorator:
    """Mark a test that is tried on up to so many ranks rather than on up to MOST_RANKS."""
    return pytest.mark.mpi(max_size=maximum)


def on_ranks(*numbers: int) -> pytest.MarkDecorator:
    """Mark a test that proves no more on other numbers of ranks than on these."""
    return pytest.mark.mpi(sizes=numbers)


def is_one_rank(config: pytest.Config) -> bool:
    """Return whether the session is itself one rank of an MPI job."""
    view = detect()
    return bool(config.getoption("--with-mpi") or config.getoption("--only-mpi") or (view and view.rank is not None))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--num-ranks",
        default=",".join(map(str, NUM_RANKS)),
        metavar="N,N,…",
        help="launch tests/ranks with these numbers of ranks (default: %(default)s)",
    )
    parser.addoption(
        "--kills",
        type=int,
        default=1,
        metavar="N",
        help="in tests/faults/test_lost_tasks.py, kill workers in N jobs, and a server in N/5 (default: %(default)s)",
    )
    parser.addoption("--rank-report", metavar="FILE", help="as a rank: let rank 0 write every test's outcome to this JSON file")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if is_one_rank(config):
        config.option.with_mpi = True
        # a directory of its own: ranks that tidy up the one they would share trip over each other
        config.option.basetemp = tempfile.mkdtemp(prefix="pytest-rank-", dir=config.option.basetemp)
        config.add_cleanup(partial(shutil.rmtree, config.option.basetemp, ignore_errors=True))
        view = detect()
        if view is not None and view.rank:
            config.pluginmanager.set_blocked("terminalreporter")
        elif config.getoption("--rank-report"):
            config.pluginmanager.register(RankReport(config.getoption("--rank-report")))
        return
    # Open MPI names session directories by process number: killed jobs of other test runs must not have left one of ours.
    sessions = tempfile.TemporaryDirectory(prefix="mpistrat-tests-")
    os.environ.update(PRTE_MCA_prte_tmpdir_base=sessions.name)
    config.add_cleanup(sessions.cleanup)
    # No file of the lane is collected here: launch the lane, and let the ranks select.
    selected = [argument for argument in config.args if _is_in_lane(argument, config)]
    config.stash[_SELECTED] = [str(config.invocation_params.dir / argument) for argument in selected]
    if selected:
        config.args = [argument for argument in config.args if argument not in selected] + [str(_RANKS)]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    tests = Path(__file__).parent
    if is_one_rank(config) and collection_path.parent == tests and collection_path != _RANKS:
        return True
    return None


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if path == _RANKS and not is_one_rank(parent.config):
        return _Launches.from_parent(parent, path=path)
    return None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    # -k and -m select among the tests that a launch runs, not among launches.
    launches = [item for item in items if isinstance(item, Launch)]
    items[:] = [item for item in items if not isinstance(item, Launch)]
    yield
    if is_one_rank(config):
        _leave_out_those_of_other_launches(config, items)
    items[:0] = launches


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    counts = dict(report.user_properties).get("launch") if report.when == "call" else None
    if not isinstance(counts, dict) or not report.passed:
        return None
    return "passed", ".", f"PASSED ({counts['passed']} tests, {sum(counts['reasons'].values())} skipped)"


class _Launches(pytest.Directory):
    def collect(self) -> Iterator[pytest.Item]:
        for number in str(self.config.getoption("--num-ranks")).split(","):
            yield Launch.from_parent(self, name=f"{number}-ranks", num_ranks=int(number))


class Launch(pytest.Item):
    """All tests of tests/ranks, under one mpiexec."""

    def __init__(self, *, num_ranks: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.num_ranks = num_ranks

    def runtest(self) -> None:
        tmp = self.config._tmp_path_factory.mktemp(self.name)  # type: ignore[attr-defined]
        report = tmp / "report.json"
        argv, extra_env = command(self.num_ranks, [sys.executable, "-m", "pytest", *self._pytest_arguments(report)])
        done = run_bounded(argv, LAUNCH_SECONDS, {**os.environ, **extra_env}, self.config.rootpath)
        if done.returncode == pytest.ExitCode.USAGE_ERROR and self._is_selection and "ERROR: not found: " in done.stderr:
            pytest.skip(f"the selection names no test of {self.num_ranks} ranks")
        if not report.exists():
            raise RanksFailedError(_died(self.num_ranks, done.returncode, done.stdout + done.stderr))
        result = json.loads(report.read_text())
        reasons = Counter(test["text"] for test in result if test["outcome"] == "skipped")
        passed = sum(test["outcome"] == "passed" for test in result)
        failed = [test for test in result if test["outcome"] == "failed"]
        self.user_properties.append(("launch", {"passed": passed, "failed": len(failed), "reasons": dict(reasons)}))
        if failed:
            texts = [f"{test['test']} ({test['when']})\n{test['text']}" for test in failed]
            raise RanksFailedError(
                "\n\n".join([f"{len(failed)} of {len(result)} tests failed on {self.num_ranks} ranks", *texts])
            )
        if done.returncode not in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
            raise RanksFailedError(_died(self.num_ranks, done.returncode, done.stdout + done.stderr))
        if not passed:
            if self._is_selection:
                pytest.skip(f"the selection runs none of the tests of {self.num_ranks} ranks")
            raise RanksFailedError(f"no test ran on {self.num_ranks} ranks")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Show what the ranks said, not how it became known here."""
        if isinstance(excinfo.value, RanksFailedError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, None, str]:
        """Name the launch in a failure's headline."""
        return self.path, None, f"mpiexec -n {self.num_ranks}"

    @property
    def _is_selection(self) -> bool:
        option = self.config.option
        return bool(option.keyword or option.markexpr or self.config.stash[_SELECTED])

    def _pytest_arguments(self, report: Path) -> list[str]:
        option = self.config.option
        selected = self.config.stash[_SELECTED] or [str(_RANKS)]
        chosen = [*(["-k", option.keyword] if option.keyword else []), *(["-m", option.markexpr] if option.markexpr else [])]
        quiet = [
            "--color=no",
            "-p",
            "no:cacheprovider",
            "-o",
            f"faulthandler_timeout={TEST_SECONDS}",
            "--rank-report",
            str(report),
            "--basetemp",
            str(report.parent),
        ]
        return ["--with-mpi", *quiet, *chosen, *(["-x"] if option.maxfail == 1 else []), *selected]


class RankReport:
    """The plugin of rank 0's session: writes the outcome of every test, which all ranks have agreed on, to a JSON file."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._results: list[dict[str, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            text = (
                str(report.longrepr[2]).removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else report.longreprtext
            )
            outcome = {"test": report.nodeid, "when": str(report.when), "outcome": report.outcome, "text": text}
            self._results.append(outcome)

    def pytest_sessionfinish(self) -> None:
        self._path.write_text(json.dumps(self._results))


class RanksFailedError(Exception):
    """A launch, or tests in it, failed; the message says which and how."""


def _leave_out_those_of_other_launches(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of fewer or more ranks than these; skipped, each would begin and end on all ranks."""
    view = detect()
    size = view.size or 1 if view else 1
    config.hook.pytest_deselected(items=[item for item in items if not _runs_on(item, size)])
    items[:] = [item for item in items if _runs_on(item, size)]


def _runs_on(item: pytest.Item, size: int) -> bool:
    marks = [mark.kwargs for mark in item.iter_markers("mpi")]
    unknown = set().union(*marks) - {"min_size", "max_size", "sizes"}
    if unknown:
        raise pytest.UsageError(f"{item.nodeid}: unknown {sorted(unknown)} in its mpi mark; see tests/launches.py")
    minima, maxima, sizes = ([mark[key] for mark in marks if key in mark] for key in ("min_size", "max_size", "sizes"))
    most = min(maxima, default=size if sizes else MOST_RANKS)
    return max(minima, default=1) <= size <= most and all(size in each for each in sizes)


def _is_in_lane(argument: str, config: pytest.Config) -> bool:
    path = (config.invocation_params.dir / argument.split("::")[0]).resolve()
    return _RANKS in path.parents


def _died(num_ranks: int, code: int, output: str) -> str:
    marked = [line for line in output.splitlines() if line.startswith("[rank ")]
    first = marked[0].split("]")[0] + "]" if marked else ""
    shown = [line for line in marked if line.startswith(first)] or output.splitlines()[-80:]
    return f"mpiexec -n {num_ranks} ended with {code} before the tests did\n" + "\n".join(shown)
