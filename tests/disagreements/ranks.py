"""Ranks: the processes of a job, each with a line to whoever started it."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.disagreements.places import Place

_START_SECONDS = 120.0
_FOLDER = "RANKS_FOLDER"  # a variable of the ranks


class JobError(RuntimeError):
    """The ranks could not be started."""


class Ranks:
    """A module that runs on all ranks of a place, in a folder of their own; each has a line to here, after `connect`."""

    def __init__(self, place: Place, module: str, environment: Mapping[str, str]) -> None:
        self.place, self.lines = place, list[Connection]()
        self._stack = ExitStack()
        self.folder = Path(self._stack.enter_context(TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True)))
        environment = {**environment, _FOLDER: str(self.folder)}
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(self.folder / "socket"))
            server.listen(place.size)
            job = place.started([sys.executable, "-m", module], environment, self.folder / "output")
            self.process = self._stack.enter_context(job)
            while len(self.lines) < place.size:
                if (line := next_line(server, lambda: self.process.poll() is not None)) is None:
                    printed = self.output()
                    self.end()
                    raise JobError(f"the ranks did not start: {printed[-3000:]}")
                self.lines.append(self._stack.enter_context(line))

    def ask(self, **request: Any) -> None:
        """Send a request to all ranks."""
        for line in tuple(self.lines):
            try:
                line.send(request)
            except OSError:
                self._drop(line)

    def receive(self) -> list[dict[str, Any]]:
        """Return what ranks say, after a quarter of a second at the latest."""
        found = []
        for line in wait(self.lines, 0.25):
            assert isinstance(line, Connection)
            try:
                found.append(line.recv())
            except (EOFError, OSError):
                self._drop(line)
        return found

    def output(self, begun: int = 0) -> str:
        """Return what was printed, after so many bytes."""
        with (self.folder / "output").open("rb") as output:
            output.seek(begun)
            return output.read().decode(errors="replace")

    def end(self) -> None:
        """End the ranks."""
        self._stack.close()

    def _drop(self, line: Connection) -> None:
        self.lines.remove(line)
        line.close()


def next_line(server: socket.socket, has_ended: Callable[[], bool]) -> Connection | None:
    """Return the line to the next rank that connects; None if none does in time, or the job has ended."""
    deadline = time.monotonic() + _START_SECONDS
    server.settimeout(0.5)
    while True:
        try:
            accepted = server.accept()[0]
        except TimeoutError:
            if time.monotonic() > deadline or has_ended():
                return None
        else:
            accepted.setblocking(True)
            return Connection(accepted.detach())


def connect() -> tuple[Connection, Path]:
    """Return the line of this rank, and the folder of its job."""
    folder = Path(os.environ[_FOLDER])
    return Client(str(folder / "socket"), "AF_UNIX"), folder
