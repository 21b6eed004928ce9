"""Inside one rank of a test launch: after each phase of each test all ranks agree how it went.

Without this a rank that fails walks into the next test, where its collectives meet those of ranks still in this one. A test
that fails on one rank is red on all, with that rank's message; only rank 0 prints. A rank that has failed while others are
stuck in a collective waits a moment, says what happened, and ends the job.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import hypothesis
import pytest

from mpistrat.launch.bootstrap import start

if TYPE_CHECKING:
    from mpi4py import MPI

__all__: list[str] = []

STUCK_SECONDS = 5.0  # how long a rank that has failed waits for the others

_COMM: pytest.StashKey[MPI.Intracomm] = pytest.StashKey()
_RESULTS: list[dict[str, str]] = []


class _Outcome(NamedTuple):
    test: str
    when: str
    outcome: str
    text: str


def pytest_configure(config: pytest.Config) -> None:
    comm = start().Dup()
    config.stash[_COMM] = comm
    if comm.rank:
        config.pluginmanager.set_blocked("terminalreporter")
    # Every rank draws the same examples, and none remembers any in a file that the others write too.
    hypothesis.settings.register_profile("ranks", derandomize=True, database=None, deadline=None)
    hypothesis.settings.load_profile("ranks")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    comm = config.stash[_COMM]
    mine = [item.nodeid for item in items]
    theirs = comm.allgather(mine)
    if any(other != mine for other in theirs):
        raise pytest.UsageError(
            f"ranks collected different tests, or in another order: {[len(other) for other in theirs]} by rank"
        )
    for item in items:
        for mark in item.iter_markers("mpi"):
            unknown = set(mark.kwargs) - {"min_size", "max_size"}
            if unknown:
                raise pytest.UsageError(f"{item.nodeid}: unknown {sorted(unknown)} in its mpi mark; see tests/launches.py")
            minimum, maximum = mark.kwargs.get("min_size", 1), mark.kwargs.get("max_size", comm.size)
            if comm.size < minimum:
                item.add_marker(pytest.mark.skip(reason=f"needs {minimum} ranks or more"))
            if comm.size > maximum:
                item.add_marker(pytest.mark.skip(reason=f"up to {maximum} ranks have all of it"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    comm = item.config.stash[_COMM]
    mine = _Outcome(report.nodeid, str(report.when), report.outcome, _text(report))
    _wait_or_abort(comm, mine)
    outcomes = comm.allgather(mine)
    verdict = _verdict(outcomes)
    if verdict:
        report.outcome, report.longrepr = "failed", verdict
        if hasattr(report, "wasxfail"):
            del report.wasxfail
    if report.when == "call" or report.outcome != "passed":
        _RESULTS.append({"test": mine.test, "when": mine.when, "outcome": report.outcome, "text": verdict or mine.text})
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--rank-report")
    if path and session.config.stash[_COMM].rank == 0:
        Path(path).write_text(json.dumps(_RESULTS))


def _text(report: pytest.TestReport) -> str:
    if report.skipped and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    sections = [f"---- {title} ----\n{text}" for title, text in report.sections] if report.failed else []
    return "\n".join([report.longreprtext, *sections])


def _wait_or_abort(comm: MPI.Intracomm, mine: _Outcome) -> None:
    """Wait until every rank has come here; a rank that has failed waits not for ever."""
    everybody = comm.Ibarrier()
    deadline = time.monotonic() + STUCK_SECONDS if mine.outcome == "failed" else float("inf")
    while not everybody.Test():
        if time.monotonic() > deadline:
            message = f"{mine.test} ({mine.when}) failed here, and other ranks did not leave it\n{mine.text}"
            lines = [f"[rank {comm.rank}] {line}" for line in message.splitlines()]
            print("\n".join(["", *lines]), file=sys.stderr, flush=True)
            comm.Abort(1)
        os.sched_yield()
        time.sleep(0.0002)


def _verdict(outcomes: list[_Outcome]) -> str:
    """Return the message of a test that is red on every rank, or nothing where all agree that it is not."""
    if len({(one.test, one.when) for one in outcomes}) > 1:
        return f"ranks are in different tests: {[(one.test, one.when) for one in outcomes]}"
    failed = [rank for rank, one in enumerate(outcomes) if one.outcome == "failed"]
    if failed:
        others = f" (ranks {', '.join(map(str, failed))} failed)" if len(failed) > 1 else ""
        return f"rank {failed[0]} of {len(outcomes)}{others}:\n{outcomes[failed[0]].text}"
    if len({one.outcome for one in outcomes}) > 1:
        return f"ranks disagree: {[one.outcome for one in outcomes]}"
    return ""
