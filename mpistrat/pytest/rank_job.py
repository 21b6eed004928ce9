"""RankJob: an MPI job whose ranks run tests, and the reports that it sends."""

from __future__ import annotations

import json
import marshal
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

__all__ = ["JobError", "RankJob"]

TERMINATE_SECONDS = 10.0
_POLL_SECONDS = 0.01

# Options that concern the pytest process that shows the results, or choose the tests, which it has done.
_NOT_ON_RANKS: dict[str, Any] = {
    "keyword": "",
    "markexpr": "",
    "lf": False,
    "failedfirst": False,
    "newfirst": False,
    "stepwise": False,
    "usepdb": False,
    "trace": False,
    "maxfail": 0,
    "collectonly": False,
    "xmlpath": None,
    "cov_source": [],
    "dist": "no",
    "numprocesses": None,
    "tx": [],
}


class JobError(Exception):
    """A job did not report on a test: it has ended, or was ended because the test took too long."""


class RankJob:
    """An MPI job that runs tests.

    Parameters
    ----------
    config : pytest.Config
        The configuration of the pytest process that starts it; its options hold for the ranks, too.
    num_ranks : int
        How many ranks to start.
    items : sequence of pytest.Item
        The tests, in the order in which their reports will be asked for.
    folder : str
        Where to put its files.
    timeout : float
        Seconds that a test may take; then the job is ended.

    Attributes
    ----------
    num_ranks : int
        As given.
    has_begun : bool
        Whether it has collected the tests.
    """

    def __init__(
        self, config: pytest.Config, num_ranks: int, items: Sequence[pytest.Item], folder: str, timeout: float
    ) -> None:
        self.num_ranks = num_ranks
        self.has_begun = False
        self._config, self._timeout = config, timeout
        here = Path(tempfile.mkdtemp(prefix=f"{num_ranks}-ranks-", dir=folder))
        reports = here / "reports"
        reports.touch()
        self._reports = reports.open()
        self._line = ""
        self._output = here / "output"
        self._told = 0
        description = here / "job"
        description.write_bytes(marshal.dumps(_description(config, items, reports, here)))
        self._process = self._start(description)

    def reports(self, item: pytest.Item) -> Iterator[pytest.TestReport]:
        """Yield the reports of a test, as they come.

        Raises
        ------
        JobError
            If the job ends before the last of them, or the test takes too long; the message has what the ranks printed.
        """
        while True:
            document = self._next()
            if not isinstance(document, dict):
                self.has_begun = True
                continue
            report = self._config.hook.pytest_report_from_serializable(config=self._config, data=document)
            if report.nodeid != item.nodeid:
                raise JobError(f"the ranks reported on {report.nodeid}, and not on {item.nodeid}")
            if report.failed and self._output_size() > self._told:
                report.sections.append(("output of the job", self._output_text()))
            yield report
            if report.when == "teardown":
                self._told = self._output_size()
                return

    def end(self) -> None:
        """End the job, if it still runs."""
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(TERMINATE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reports.close()

    def _start(self, description: Path) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "mpistrat", "run", "-n", str(self.num_ranks), "-m", "mpistrat.pytest.rank_main"]
        # os.environ, because an earlier test may have started MPI here, which sets variables that only C programs see
        if self._config.option.capture == "no":
            return subprocess.Popen([*argv, str(description)], stdin=subprocess.DEVNULL, env=dict(os.environ))
        with self._output.open("wb") as output:
            return subprocess.Popen(
                [*argv, str(description)], stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=dict(os.environ)
            )

    def _next(self) -> object:
        """Return the next document that rank 0 sends."""
        deadline = time.monotonic() + self._timeout
        while True:
            has_ended = self._process.poll() is not None  # before the last look
            self._line += self._reports.readline()
            if self._line.endswith("\n"):
                line, self._line = self._line, ""
                return json.loads(line)
            if has_ended:
                raise self._failed(f"the job of {self.num_ranks} ranks ended with {self._process.returncode}")
            if time.monotonic() > deadline:
                self.end()
                raise self._failed(f"not done after {self._timeout:g} s on {self.num_ranks} ranks (ranks_timeout)")
            time.sleep(_POLL_SECONDS)

    def _failed(self, what: str) -> JobError:
        return JobError(f"{what}\n{self._output_text()}")

    def _output_text(self) -> str:
        """Return what the job has printed during the present test; nothing if that goes to the terminal."""
        if not self._output.exists():
            return ""
        with self._output.open(errors="replace") as output:
            output.seek(self._told)
            return output.read().replace("\0", "").rstrip()

    def _output_size(self) -> int:
        return self._output.stat().st_size if self._output.exists() else 0


def _description(config: pytest.Config, items: Sequence[pytest.Item], reports: Path, folder: Path) -> dict[str, Any]:
    """Return what the ranks need to know: builtin types only, as `marshal` takes them."""
    options = {name: value for name, value in vars(config.option).items() if _is_builtin(value)} | _NOT_ON_RANKS
    options |= {"rootdir": str(config.rootpath), "inifilename": str(config.inipath or "") or None, "with_mpi": True}
    options["plugins"] = [*config.option.plugins, "no:terminal"]
    return {
        "options": options,
        "files": list(dict.fromkeys(str(item.path) for item in items)),
        "tests": [item.nodeid for item in items],
        "reports": str(reports),
        "folder": str(folder),
    }


def _is_builtin(value: Any) -> bool:
    try:
        marshal.dumps(value)
    except ValueError:
        return False
    return True
