"""RankJobs: runs the tests that have the ``ranks`` mark in MPI jobs, one at a time, and reports their results."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence

import pytest

from mpistrat.pytest.rank_job import JobError, RankJob
from mpistrat.pytest.rank_shapes import shape_of

__all__ = ["RankJobs"]


class RankJobs:
    """The plugin of a pytest process that is not a rank itself.

    All tests of one number of ranks share a job, which is started when the first of them is due. If a test ends the job, the
    next one starts another for those that are left.

    Parameters
    ----------
    config : pytest.Config
        The configuration of this pytest process.

    Raises
    ------
    UsageError
        If the setting ``ranks_timeout`` is not a number of seconds.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config, self._timeout = config, _timeout(config)
        self._left: list[pytest.Item] = []
        self._job: RankJob | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Have the tests with the mark run last, and those of one number of ranks together."""
        items.sort(key=_num_ranks)
        self._left = [item for item in items if _num_ranks(item)]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """Report the results that a job sends of a test with the mark; other tests run in this process."""
        if not _num_ranks(item):
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self._reports(item):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def pytest_sessionfinish(self) -> None:
        """End the job, which still runs if pytest was stopped."""
        self._end_job()
        if self._folder is not None:
            self._folder.cleanup()

    def _reports(self, item: pytest.Item) -> Iterator[pytest.TestReport]:
        job = self._job_of(item)
        try:
            yield from job.reports(item)
        except JobError as error:
            yield pytest.TestReport(item.nodeid, item.location, dict.fromkeys(item.keywords, 1), "failed", str(error), "call")
            if job.has_begun:  # else the next one would not begin either
                self._end_job()
        self._left.remove(item)

    def _job_of(self, item: pytest.Item) -> RankJob:
        number = _num_ranks(item)
        if self._job is None or self._job.num_ranks != number:
            self._end_job()
            self._folder = self._folder or tempfile.TemporaryDirectory(prefix="mpistrat-pytest-")
            self._job = RankJob(self._config, number, _together(self._left, number), self._folder.name, self._timeout)
        return self._job

    def _end_job(self) -> None:
        if self._job is not None:
            self._job.end()
        self._job = None


def _timeout(config: pytest.Config) -> float:
    text = str(config.getini("ranks_timeout"))
    try:
        return float(text)
    except ValueError:
        raise pytest.UsageError(f"ranks_timeout = {text}: a number of seconds was expected") from None


def _together(items: Sequence[pytest.Item], num_ranks: int) -> list[pytest.Item]:
    return [item for item in items if _num_ranks(item) == num_ranks]


def _num_ranks(item: pytest.Item) -> int:
    shape = shape_of(item)
    return shape.num_ranks if shape else 0
