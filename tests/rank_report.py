"""The report of a launch of tests/ranks: rank 0 writes the outcome of every test, which all ranks have agreed on, to a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

__all__ = ["LEFT_OUT", "RankReport"]

LEFT_OUT = pytest.StashKey[dict[str, str]]()
"""The tests that other launches run, and why this one does not."""


class RankReport:
    """The plugin of rank 0's session.

    Parameters
    ----------
    path : str
        The JSON file to write.
    """

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

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        for test, reason in session.config.stash.get(LEFT_OUT, {}).items():
            self._results.append({"test": test, "when": "collection", "outcome": "skipped", "text": reason})
        self._path.write_text(json.dumps(self._results))
