"""The lanes: what kinds of tests there are, what each needs, and the last word of a session: how many of each ran, how long.

A session of all tests has two workers of pytest-xdist, if there are several cores: one runs the jobs of tests/ranks while the
other takes what needs one core, file by file; what mostly waits comes last, and both take it test by test.

A lane is a folder of tests/; tests directly in it are the lane `quality`. A lane that cannot run on this machine says why,
and that is a failure where MPISTRAT_REQUIRE_LANES (names joined by commas) demands the lane. A lane that runs nothing for
no such reason fails the session, unless tests were selected.
"""

import os
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import cache
from pathlib import PurePosixPath

import pytest
from xdist.scheduler import LoadScopeScheduling

from mpistrat.device.cuda import count_visible
from mpistrat.text import format_elapsed
from tests.hosts import lab
from tests.launches import is_one_rank
from tests.slurm import cluster

# Each lane, and what tells why it cannot run here (an empty text: it can).
LANES: dict[str, Callable[[], str]] = {
    "quality": lambda: "",
    "unit": lambda: "",
    "ranks": lambda: "",
    "faults": lambda: "",
    "tools": lambda: "",
    "docs": lambda: "",
    "hosts": lab.missing,
    "slurm": cluster.missing,
    "gpu": lambda: count_visible()[1],
}


# one process of `unit` compiles PyTorch and JAX, before all ranks of the jobs of `docs` would
_ORDER = ("ranks", "unit", "docs", "quality", "tools", "hosts", "slurm", "gpu", "faults")
_SHARED = ("tests/faults/test_doctor.py", "tests/faults/test_stall_report.py")  # tests of which share the jobs of a fixture


def is_selection(config: pytest.Config) -> bool:
    """Return whether a session runs some tests rather than all."""
    option = config.option
    named = {(config.invocation_params.dir / argument).resolve() for argument in config.args}
    whole = bool(named & {config.rootpath, config.rootpath / "tests"})
    return not whole or bool(option.keyword or option.markexpr or option.collectonly or config.getoption("lf", False))


def lane_of(nodeid: str) -> str:
    parts = PurePosixPath(nodeid.split("::")[0]).parts
    return parts[1] if len(parts) > 1 and parts[1] in LANES else "quality"


@pytest.hookimpl(wrapper=True)
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, object, object]:
    option = config.option
    is_live = option.usepdb or option.capture == "no" or option.numprocesses is not None
    is_first = not (is_one_rank(config) or hasattr(config, "workerinput"))
    if is_first and not is_live and not is_selection(config) and len(os.sched_getaffinity(0)) > 1:
        option.numprocesses, option.dist, option.loadscopereorder = 2, "loadfile", False
    return (yield)


def pytest_configure(config: pytest.Config) -> None:
    unknown = _required() - set(LANES)
    if unknown:
        raise pytest.UsageError(f"MPISTRAT_REQUIRE_LANES names {', '.join(sorted(unknown))}; lanes are {', '.join(LANES)}")
    if not config.getoption("--with-mpi") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Summary(config), "mpistrat-lanes")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None, object, object]:
    for item in items:
        reason = _reason(lane_of(item.nodeid))
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
    done = yield
    # keeps the order of jobs, which the plugin has made
    items.sort(key=lambda item: (_ORDER.index(lane_of(item.nodeid)), not item.nodeid.startswith(_SHARED)))
    return done


def scope_of(nodeid: str) -> str:
    """Return what a test is handed to a worker with: mostly its file.

    The tests of one number of ranks share a job. Those of the last lane start jobs of their own, and are handed out one by one:
    so both workers end at the same time.
    """
    lane = lane_of(nodeid)
    if lane == _ORDER[-1] and not nodeid.startswith(_SHARED):
        return nodeid
    return lane if lane == "ranks" else nodeid.split("::")[0]


class _OneWorkerStartsJobs(LoadScopeScheduling):  # type: ignore[misc]
    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> _OneWorkerStartsJobs:
    return _OneWorkerStartsJobs(config, log)


@dataclass
class _Result:
    passed: int = 0
    failed: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


class _Summary:
    """Counts what ran, and judges the lanes when the session ends."""

    def __init__(self, config: pytest.Config) -> None:
        self.results = {lane: _Result() for lane in LANES}
        self.selected = is_selection(config)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        result = self.results[lane_of(report.nodeid)]
        result.seconds += report.duration
        if report.skipped:
            result.skipped[_skip_reason(report)] += 1
        elif report.failed:
            result.failed += 1
        elif report.when == "call":
            result.passed += 1

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self._problems() and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        problems = self._problems()
        terminalreporter.section("lanes")
        shown = {lane: result for lane, result in self.results.items() if not self.selected or result != _Result()}
        for lane, result in shown.items():
            color = "red" if lane in problems or result.failed else "green" if result.passed else "yellow"
            terminalreporter.line(f"{lane:8} {problems.get(lane) or _line(lane, result)}", **{color: True})

    def _problems(self) -> dict[str, str]:
        """Return the lanes that ran nothing although they should have."""
        if self.selected:
            return {}
        idle = [lane for lane, result in self.results.items() if not result.passed + result.failed]
        unexplained = {lane: "ran nothing, and no reason is known: a failure" for lane in idle if not _reason(lane)}
        required = [lane for lane in idle if lane in _required()]
        return unexplained | {lane: f"required, but {_line(lane, self.results[lane])}: a failure" for lane in required}


def _line(lane: str, result: _Result) -> str:
    ran = result.passed + result.failed
    if not ran and _reason(lane):
        return f"cannot run here: {_reason(lane)}"
    reasons = "; ".join(f"{count} x {reason}" for reason, count in result.skipped.most_common())
    parts = [f"{ran} run in {format_elapsed(result.seconds)}"]
    parts += [f"{result.failed} failed"] if result.failed else []
    parts += [f"{result.skipped.total()} skipped ({reasons})"] if result.skipped else []
    return ", ".join(parts)


def _skip_reason(report: pytest.TestReport) -> str:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    return reason.removeprefix("Skipped: ")


@cache
def _reason(lane: str) -> str:
    return LANES[lane]()


def _required() -> set[str]:
    return {lane.strip() for lane in os.environ.get("MPISTRAT_REQUIRE_LANES", "").split(",") if lane.strip()}
