"""All tests are run by two processes: a second pytest runs some of them beside the first.

Launches of few ranks run beside lanes that mostly wait, and after them what takes one core beside launches of many ranks.
Reports arrive here through a pipe, and each is shown at the turn of its test, as if it had run in this process. A selection of
tests, a debugger (``--pdb``) or live output (``-s``) stay in one process, and so does a machine of one core.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from typing import Any

import pytest

from tests.lanes import is_selection, lane_of
from tests.launches import Launch, is_one_rank

__all__: list[str] = []

BESIDE = ("quality", "unit", "docs", "tools")
MOST_RANKS_BESIDE = 3
_END_SECONDS = 60.0  # what the second process may take to end what it has started

Reports = list[pytest.TestReport]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--report-to", type=int, metavar="FD", help="as the second process: send reports through this pipe")


def pytest_configure(config: pytest.Config) -> None:
    option = config.option
    if option.report_to is not None:
        config.pluginmanager.register(_Sender(config, option.report_to), "mpistrat-sender")
        return
    is_plain = not (is_one_rank(config) or is_selection(config) or option.usepdb or option.capture == "no")
    if is_plain and len(os.sched_getaffinity(0)) > 1:
        config.pluginmanager.register(_Beside(config), "mpistrat-beside")


class _Sender:
    """In the second process: sends each report to the first."""

    def __init__(self, config: pytest.Config, pipe: int) -> None:
        self._config, self._pipe = config, Connection(pipe, readable=False)
        # what a shell starts in the background ignores it
        signal.signal(signal.SIGINT, signal.default_int_handler)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Iterator[None]:
        yield  # until `launches` has appended its items
        items.sort(key=lambda item: not isinstance(item, Launch))  # while the first process mostly waits

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._pipe.send(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))


class _Beside:
    """In the first process: starts the second, and lets its reports stand for its tests."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._arrived: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._reports: defaultdict[str, Reports] = defaultdict(list)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Iterator[None]:
        yield  # until `launches` has appended its items
        items.sort(key=_is_beside)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        files = dict.fromkeys(item.nodeid.split("::")[0] for item in filter(_is_beside, session.items))
        if not files:
            return (yield)
        with tempfile.TemporaryFile("w+") as self._output:
            numbers = sorted({item.num_ranks for item in session.items if isinstance(item, Launch) and _is_small(item)})
            process = self._start([*files, *([f"--num-ranks={','.join(map(str, numbers))}"] if numbers else [])])
            try:
                return (yield)
            finally:
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_END_SECONDS)
                process.kill()
                process.wait()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        if not _is_beside(item):
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self._await(item):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _start(self, selection: Iterable[str]) -> subprocess.Popen[str]:
        option, (reader, writer) = self._config.option, Pipe(duplex=False)
        options = [f"--report-to={writer.fileno()}", f"--tb={option.tbstyle}", f"--maxfail={option.maxfail or 0}", "--color=no"]
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, *selection],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            cwd=self._config.rootpath,
            pass_fds=[writer.fileno()],
            start_new_session=True,  # the end comes from here alone, also after Ctrl-C
            text=True,
        )
        writer.close()
        Thread(target=self._receive, args=(reader,), daemon=True).start()
        return process

    def _receive(self, reader: Connection) -> None:
        try:
            while True:
                self._arrived.put(reader.recv())
        except EOFError:
            self._arrived.put(None)

    def _await(self, item: pytest.Item) -> Reports:
        """Wait until a test has been torn down, and return its reports; where its process ends before that, stop."""
        found = self._reports[item.nodeid]
        while not found or found[-1].when != "teardown":
            data = self._arrived.get()
            if data is None:
                item.session.shouldstop = "the second process ended too soon"
                return [*found, self._lost(item)]
            report = self._config.hook.pytest_report_from_serializable(config=self._config, data=data)
            self._reports[report.nodeid].append(report)
        return found

    def _lost(self, item: pytest.Item) -> pytest.TestReport:
        self._output.seek(0)
        last = "".join(self._output.readlines()[-80:])
        message = f"the process that runs this test ended before the test did\n{last}"
        return pytest.TestReport(item.nodeid, item.location, {}, "failed", message, "call")


def _is_beside(item: pytest.Item) -> bool:
    return lane_of(item.nodeid) in BESIDE or _is_small(item)


def _is_small(item: pytest.Item) -> bool:
    return isinstance(item, Launch) and item.num_ranks <= MOST_RANKS_BESIDE
