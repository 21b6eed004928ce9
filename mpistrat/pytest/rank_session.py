"""A pytest session that is one rank of a job: all ranks run the same tests, and agree on the outcome of each of several ranks.

A test that fails on one rank fails on all, with the message of that rank: otherwise that rank would begin the next test, and
its collectives would meet those of ranks still in this one. A rank that has failed while others do not leave the test waits
a moment, prints its message, and ends the job.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import NamedTuple

import pytest

from mpistrat import settings
from mpistrat.errors import CollectiveError
from mpistrat.groups.rendezvous import rendezvous
from mpistrat.launch import abort
from mpistrat.lazy import MPI
from mpistrat.watch.recorder import watched
from mpistrat.watch.watcher import watcher

PARAMETER = "ranks_shape"
"""The parameter of a test that holds its shape."""
HAS_FAILED = pytest.StashKey[bool]()
"""Whether a test has failed on some rank."""

# How long a rank that has failed waits for the others: longer than watchers need to find that those can never leave the test.
STUCK_SECONDS = 10.0
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.0002, 0.02
_DIGEST_BYTES = 16


class Shape(NamedTuple):
    """The ranks that a test runs on."""

    num_ranks: int
    nodes: str = ""  # the shape of virtual nodes, such as 2x2; the real nodes if it is empty

    def __str__(self) -> str:
        return self.nodes or f"{self.num_ranks}-ranks"


def shape_of(item: pytest.Item) -> Shape | None:
    """Return the shape that a test runs on, or None if it has no ``ranks`` mark."""
    callspec = getattr(item, "callspec", None)
    shape = callspec.params.get(PARAMETER) if callspec else None
    return shape if isinstance(shape, Shape) else None


class _Outcome(NamedTuple):
    test: str
    when: str
    outcome: str
    headline: str
    text: str

    @property
    def digest(self) -> bytes:
        """Bytes that are equal where test, phase and outcome are."""
        return blake2b("\n".join(self[:3]).encode(), digest_size=_DIGEST_BYTES).digest()


class RankSession:
    """The plugin of a session that is one rank. Creating it starts MPI, and is a collective call.

    `next_test` returns the next test to run and the one that follows it or None, or None if there is no other: on all ranks the
    same; by default all tests that are collected are run. `send` takes documents for the pytest process that has started this
    job: the number of tests, then each report of rank 0, and why any rank ends the session.
    """

    NAME = "mpistrat-rank-session"

    def __init__(
        self,
        config: pytest.Config,
        next_test: Callable[[], tuple[str, str | None] | None] | None = None,
        send: Callable[[object], None] | None = None,
    ) -> None:
        with rendezvous("pytest") as found:
            self._comm = found.comm.Dup()
        self._config, self._next_test = config, next_test
        self._not_collected: list[str] = []
        self._send_of_any = send
        self._send = send if self._comm.rank == 0 else None

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Prepare Hypothesis, before tests with settings of their own are collected."""
        _draw_equal_examples(config)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Check that all ranks have the same tests."""
        theirs = self._comm.allgather([item.nodeid for item in items])
        if any(other != theirs[0] for other in theirs):
            raise pytest.UsageError(f"ranks collected different tests, or in another order: {[*map(len, theirs)]} by rank")
        for item in items:
            shape = shape_of(item)
            if shape and shape.num_ranks != self._comm.size:
                item.add_marker(pytest.mark.skip(reason=f"{shape.num_ranks} ranks are wanted, and there are {self._comm.size}"))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep what could not be collected."""
        if report.failed:
            self._not_collected.append(report.longreprtext)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run the tests that are asked for, if they are."""
        if self._next_test is None:
            return None
        if self._not_collected:
            raise pytest.UsageError("\n".join(["this rank could not collect all tests", *self._not_collected]))
        if self._send:
            self._send(len(session.items))
        found = {item.nodeid: item for item in session.items}
        while asked := self._next_test():
            name, following = asked
            if name not in found:
                raise pytest.UsageError(f"the pytest process that started this job has collected {name}, and this rank has not")
            item, nextitem = found[name], found.get(following or "")
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
        return True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Have the node shape of a test in force during its set-up, too."""
        shape, name = shape_of(item), settings.VIRTUAL_NODES.name
        before = os.environ.get(name)
        if shape is not None:
            os.environ[name] = shape.nodes
        try:
            return (yield)
        finally:
            if shape is not None:
                os.environ.pop(name)
            if before is not None:
                os.environ[name] = before

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Wait for the other ranks at the end of each phase, and agree on its outcome."""
        report = yield
        if shape_of(item) is None and item.get_closest_marker("mpi") is None:
            return report
        mine = _Outcome(report.nodeid, str(report.when), _outcome(report), _headline(report), _text(report))
        is_equal = self._meet(mine)
        # whoever waits in this call keeps a core busy: only where there is something to tell
        outcomes = [mine] if is_equal and not report.failed else self._comm.allgather(mine)
        if verdict := _verdict(outcomes):
            item.stash[HAS_FAILED] = True
            report.outcome, report.longrepr, report.sections = "failed", verdict, []
            if hasattr(report, "wasxfail"):
                del report.wasxfail
        elif "xfailed" in {one.outcome for one in outcomes}:  # on all ranks, or on some
            item.stash[HAS_FAILED] = True
            report.outcome, report.wasxfail = "skipped", getattr(report, "wasxfail", "")
        watching = watcher()
        if report.when == "teardown" and watching is not None and item.stash.get(HAS_FAILED, False):
            watching.begin()  # which calls of this test did not match concerns no other test
        return report

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Have pytest.exit, or a KeyboardInterrupt, on any rank end the session, before this rank alone tears fixtures down."""
        if self._send_of_any:
            told = getattr(excinfo.value, "msg", "") or excinfo.exconly()
            self._send_of_any({"exit": f"rank {self._comm.rank}: {told}", "code": getattr(excinfo.value, "returncode", None)})
            self._comm.Abort(pytest.ExitCode.INTERRUPTED)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send rank 0's report to the pytest process that shows the results."""
        if self._send:
            self._send(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """Wait until all ranks have printed their results: the first one that exits after a failure ends the job."""
        everybody, began = self._comm.Ibarrier(), time.monotonic()
        while not everybody.Test() and time.monotonic() < began + STUCK_SECONDS:
            pause(began)

    def _meet(self, mine: _Outcome) -> bool:
        """Wait until every rank has come here, and return whether all have the same outcome of the same test.

        A rank that has failed does not wait for ever. Watchers take it for a collective: ranks that wait for this one in
        another collective are told that it does not come.
        """
        digests = bytearray(self._comm.size * _DIGEST_BYTES)
        everybody = self._comm.Iallgather(mine.digest, digests)
        began = time.monotonic()
        watching = watcher()
        with suppress(CollectiveError), watched(f"the end of {mine.test} ({mine.when})", among="tests"):
            while not self._have_come(everybody, began, mine):
                if watching is not None:
                    watching.raise_verdict()  # ranks that wait in another collective raise it too, and come here
        while not self._have_come(everybody, began, mine):
            pass
        return digests == mine.digest * self._comm.size

    def _have_come(self, everybody: MPI.Request, began: float, mine: _Outcome) -> bool:
        """Return whether all ranks have come, or wait a moment for them; end the job if this one has failed long ago."""
        if everybody.Test():
            return True
        if mine.outcome == "failed" and time.monotonic() > began + STUCK_SECONDS:
            message = f"{mine.test} ({mine.when}) failed here, and other ranks did not leave it\n{mine.text}"
            lines = [f"[rank {self._comm.rank}] {line}" for line in message.splitlines()]
            abort.end_job(self._comm, 1, "\n".join(["", *lines, ""]))
        pause(began)
        return False


def pause(began: float, shortest: float = _PAUSE_SECONDS) -> None:
    """Sleep a part of the time since a wait began: who waits long leaves the cores to those who work."""
    time.sleep(min(max(shortest, (time.monotonic() - began) / 20), _LONGEST_PAUSE_SECONDS))


def _draw_equal_examples(config: pytest.Config) -> None:
    """Let Hypothesis, if it is used, draw the same examples on every rank, and replay none that one rank has kept."""
    if config.pluginmanager.has_plugin("hypothesispytest"):
        import hypothesis

        if config.getoption("--hypothesis-seed") is None:
            hypothesis.core.global_force_seed = 0  # type: ignore[assignment]
        # an example takes longer on ranks that wait for each other
        hypothesis.settings.register_profile("mpistrat-ranks", deadline=None)
        hypothesis.settings.load_profile("mpistrat-ranks")


def _outcome(report: pytest.TestReport) -> str:
    """Return the outcome; of a test that is expected to fail ``xfailed`` or ``xpassed``."""
    is_expected_to_fail = hasattr(report, "wasxfail") or report.longreprtext.startswith("[XPASS(strict)]")
    return ("xfailed" if report.skipped else "xpassed") if is_expected_to_fail else report.outcome


def _headline(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    told = crash.message if crash else getattr(report.longrepr, "errorstring", "")  # a missing fixture has this
    return str(told).partition("\n")[0]


def _text(report: pytest.TestReport) -> str:
    if report.skipped and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    sections = [f"---- {title} ----\n{text}" for title, text in report.sections] if report.failed else []
    return "\n".join([report.longreprtext, *sections])


def _verdict(outcomes: Sequence[_Outcome]) -> str:
    """Return the message of a test that fails on every rank, or nothing if all agree that it does not."""
    if len({(one.test, one.when) for one in outcomes}) > 1:
        return f"ranks are in different tests: {[(one.test, one.when) for one in outcomes]}"
    failed = [rank for rank, one in enumerate(outcomes) if one.outcome == "failed"]
    if failed:
        others = f" (ranks {', '.join(map(str, failed))} failed)" if len(failed) > 1 else ""
        # a rank that waits for one that has raised raises an error of this library about that
        rank = min(failed, key=lambda rank: outcomes[rank].headline.startswith(f"{CollectiveError.__module__}."))
        first = outcomes[rank]
        return f"rank {rank} of {len(outcomes)}{others}: {first.headline}\n{first.text}"
    kinds = {one.outcome for one in outcomes}
    if len(kinds) > 1 and not ("xfailed" in kinds <= {"passed", "xfailed", "xpassed"}):
        return f"ranks disagree: {[one.outcome for one in outcomes]}"
    return ""
