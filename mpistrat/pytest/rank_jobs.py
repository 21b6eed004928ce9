"""RankJobs: runs the tests that have the ``ranks`` mark in MPI jobs, one at a time, and reports their results.

Each rank of a job runs ``python -m mpistrat.pytest.rank_jobs FOLDER``.
"""

from __future__ import annotations

import json
import marshal
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import pytest

from mpistrat.logger import stderr
from mpistrat.pytest.rank_session import RankSession, pause, shape_of

START_SECONDS = 300.0  # until the ranks have collected the tests
TERMINATE_SECONDS = 10.0
_POLL_SECONDS = 0.002

# Options that concern the pytest process that shows the results, or choose the tests, which it has done.
_NOT_ON_RANKS: dict[str, Any] = {
    **dict.fromkeys(("lf", "failedfirst", "newfirst", "stepwise", "usepdb", "trace", "collectonly", "setupshow"), False),
    **dict.fromkeys(("keyword", "markexpr"), ""),
    **dict.fromkeys(("xmlpath", "numprocesses"), None),
    "maxfail": 0,
    "cov_source": [],
    "dist": "no",
    "tx": [],
}


class RankJobs:
    """The plugin of a pytest process that is not a rank itself.

    Tests of one number of ranks that follow each other share a job, which is started when the first of them is due. If a test
    ends the job, the next one starts another.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config, self._timeout = config, _timeout(config)
        self._items: list[pytest.Item] = []
        self._job: RankJob | None = None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Have the tests with the mark run last, and those of one number of ranks together."""
        items.sort(key=_num_ranks)
        self._items = items

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        """Report the results that a job sends of a test with the mark; other tests run in this process."""
        if not _num_ranks(item) or self._config.getoption("setuponly", False):  # then only fixtures are shown
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self._reports(item, nextitem):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def pytest_sessionfinish(self) -> None:
        """End the job, which still runs if pytest was stopped."""
        self._end_job()

    def _reports(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[pytest.TestReport]:
        job = self._job_of(item)
        following = nextitem if nextitem is not None and _num_ranks(nextitem) == job.num_ranks else None
        try:
            yield from job.reports(item, following)
        except JobError as error:
            yield pytest.TestReport(item.nodeid, item.location, dict.fromkeys(item.keywords, 1), "failed", str(error), "call")
            if job.has_begun:  # else the next one would not begin either
                self._end_job()
        if following is None:
            self._end_job()

    def _job_of(self, item: pytest.Item) -> RankJob:
        number = _num_ranks(item)
        if self._job is None or self._job.num_ranks != number:
            self._end_job()
            files = dict.fromkeys(str(each.path) for each in self._items if _num_ranks(each) == number)
            self._job = RankJob(self._config, number, list(files), self._timeout)
        return self._job

    def _end_job(self) -> None:
        if self._job is not None:
            self._job.end()
        self._job = None


class JobError(Exception):
    """A job did not report on a test: it has ended, or was ended because the test took too long."""


class RankJob:
    """An MPI job that runs the tests it is asked for; a test that takes longer than `timeout` seconds ends it.

    Its folder has the description of the job, the tests that it is asked for, what its ranks report, and what the job prints.
    """

    def __init__(self, config: pytest.Config, num_ranks: int, files: Sequence[str], timeout: float) -> None:
        self.num_ranks = num_ranks
        self.has_begun = False  # it has collected the tests
        self._config, self._timeout = config, timeout
        self._folder = tempfile.TemporaryDirectory(prefix="mpistrat-pytest-")
        here = Path(self._folder.name)
        self._asked, self._output = here / "asked", here / "output"
        self._asked.touch()
        self._reports = (here / "reports").open("a+")
        (here / "job").write_bytes(marshal.dumps({"options": _options(config), "files": [*files], "asker": os.getpid()}))
        self._line = self._ended_because = ""
        self._told = 0
        self._process = self._start()

    def reports(self, item: pytest.Item, following: pytest.Item | None) -> Iterator[pytest.TestReport]:
        """Run a test, and yield its reports as they come; fixtures stay that the following one uses.

        A job that ends before the last of them raises a JobError with what the ranks printed.
        """
        if not self.has_begun:
            self._next(START_SECONDS, "has not collected the tests")
            self.has_begun = True
        self._ask([item.nodeid, following and following.nodeid])
        while True:
            document = self._next(self._timeout, "is not done with this test")
            report = self._config.hook.pytest_report_from_serializable(config=self._config, data=document)
            if isinstance(report.longrepr, list):  # where and why a test was skipped: JSON has no tuples, and pytest wants one
                report.longrepr = tuple(report.longrepr)
            if report.failed and self._output_size() > self._told:
                report.sections.append(("output of the job", self._output_text()))
            yield report
            if report.when == "teardown":
                self._told = self._output_size()
                return

    def end(self) -> None:
        """End the job, if it still runs: by itself, if its ranks are not in a test."""
        self._ask(None)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(TERMINATE_SECONDS)
        self._stop()
        self._reports.close()
        self._folder.cleanup()

    def _ask(self, what: object) -> None:
        with self._asked.open("a") as asked:
            print(json.dumps(what), file=asked)

    def _stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(TERMINATE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "mpistrat", "run", "-n", str(self.num_ranks), "-m", "mpistrat.pytest.rank_jobs"]
        with nullcontext() if self._config.getoption("capture", "no") == "no" else self._output.open("wb") as output:
            # os.environ, because an earlier test may have started MPI here, which sets variables that only C programs see
            return subprocess.Popen(
                [*argv, self._folder.name], stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=dict(os.environ)
            )

    def _next(self, seconds: float, what: str) -> object:
        """Return the next document that rank 0 sends; after these seconds, end the job and say what it has not done."""
        began = time.monotonic()
        while True:
            has_ended = self._process.poll() is not None  # before the last look
            self._line += self._reports.readline()
            if self._line.endswith("\n"):
                line, self._line = self._line, ""
                document = json.loads(line)
                if isinstance(document, dict) and "exit" in document:
                    raise pytest.exit.Exception(document["exit"], document["code"])
                return document
            if has_ended:
                reason = self._ended_because or f"ended with {self._process.returncode}"
                raise JobError(f"the job of {self.num_ranks} ranks {reason}\n{self._output_text()}")
            if time.monotonic() > began + seconds:
                self._ended_because = f"{what} after {seconds:g} s"
                self._stop()
            pause(began, _POLL_SECONDS)

    def _output_text(self) -> str:
        """Return what the job has printed during the present test; nothing if that goes to the terminal."""
        if not self._output.exists():
            return ""
        with self._output.open(errors="replace") as output:
            output.seek(self._told)
            return output.read().replace("\0", "").rstrip()

    def _output_size(self) -> int:
        return self._output.stat().st_size if self._output.exists() else 0


def _timeout(config: pytest.Config) -> float:
    text = str(config.getini("ranks_timeout"))
    with suppress(ValueError):
        if (seconds := float(text)) > 0:
            return seconds
    raise pytest.UsageError(f"ranks_timeout = {text}: a number of seconds above 0 was expected")


def _num_ranks(item: pytest.Item) -> int:
    shape = shape_of(item)
    return shape.num_ranks if shape else 0


def _options(config: pytest.Config) -> dict[str, Any]:
    """Return the options of pytest that concern the ranks, if they have builtin types, as `marshal` takes them."""
    given = dict(vars(config.option))
    given.pop("file_or_dir", None)  # argparse warns of it, because the ranks are told the files as arguments
    options = {name: value for name, value in given.items() if _is_builtin(value)} | _NOT_ON_RANKS
    options |= {"rootdir": str(config.rootpath), "inifilename": str(config.inipath or "") or None, "with_mpi": True}
    options["plugins"] = [*config.option.plugins, "no:terminal"]
    # the ranks have imported mpistrat before pytest; where warnings are errors, that would be one
    options["pythonwarnings"] = [
        *(options.get("pythonwarnings") or []),
        "ignore:Module already imported:pytest.PytestAssertRewriteWarning",
    ]
    return options


def _is_builtin(value: Any) -> bool:
    try:
        marshal.dumps(value)
    except ValueError:
        return False
    return True


def main() -> int:
    """Run the tests of a `RankJob`, as one of its ranks; return 0 if their results were sent, and else pytest's exit code."""
    here = Path(sys.argv[1])
    job = marshal.loads((here / "job").read_bytes())
    stderr.stream = os.fdopen(os.dup(sys.stderr.fileno()), "w", buffering=1)  # before pytest captures it
    own = tempfile.mkdtemp(prefix="pytest-rank-", dir=here)
    config = pytest.Config.fromdictargs({**job["options"], "basetemp": own}, job["files"])
    # As in workers of pytest-xdist, plugins that write files leave that to the process that has started the job.
    config.workerinput = {"workerid": "rank"}  # type: ignore[attr-defined]
    with (here / "reports").open("a") as reports, (here / "asked").open() as asked:
        session = RankSession(config, partial(_next_test, asked, job["asker"]), partial(_send, reports))
        config.pluginmanager.register(session, RankSession.NAME)
        code: int = config.hook.pytest_cmdline_main(config=config)
    shutil.rmtree(own, ignore_errors=True)
    return 0 if code == pytest.ExitCode.TESTS_FAILED else code


def _send(reports: TextIO, document: object) -> None:
    print(json.dumps(document, default=str), file=reports, flush=True)


def _next_test(asked: TextIO, asker: int) -> tuple[str, str | None] | None:
    """Wait for the next test, and return it and the one that follows; None at the end, or if the asker is gone."""
    line = asked.readline()
    while not line.endswith("\n"):
        time.sleep(_POLL_SECONDS / 2)
        try:
            os.kill(asker, 0)
        except ProcessLookupError:
            return None
        line += asked.readline()
    found: tuple[str, str | None] | None = json.loads(line)
    return found


if __name__ == "__main__":
    sys.exit(main())
