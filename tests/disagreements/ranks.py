"""The ranks of a job, each with a line to whoever started it; and where it runs: on this machine, or on the hosts of a lab."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mpistrat.launch.mpiexec import command
from mpistrat.topology.world import World
from tests.hosts import lab
from tests.processes import started

HOSTS = "hosts:"


def default_environment(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a program of which nobody has set anything, but for the settings given."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MPISTRAT_")}
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return {**kept, **threads, "PYTHONPATH": str(Path(__file__).parents[2]), **settings}


class Place:
    """Ranks in a shape: ``2x2`` and ``3+1`` are nodes on this machine, ``1x4`` is the machine, ``hosts:2+2`` a lab's hosts."""

    def __init__(self, shape: str) -> None:
        self.shape = shape
        self._hosts = shape.removeprefix(HOSTS).split("+") if shape.startswith(HOSTS) else []
        world = World.from_shape(shape.removeprefix(HOSTS) if not self._hosts or "x" in shape else "+".join(self._hosts))
        self.size, self._local_sizes = world.size, world.local_sizes
        self._lab: lab.Lab | None = None

    def missing(self) -> str:
        """Return why jobs cannot run here, or an empty text."""
        return lab.missing() if self._hosts else ""

    @contextmanager
    def started(self, argv: Sequence[str], environment: Mapping[str, str], output: Path) -> Iterator[subprocess.Popen[bytes]]:
        """Start a program on all ranks, and end the job with all its processes; all it prints goes to a file."""
        if self._hosts:
            command_line, variables = self._in_lab(argv)
        else:
            nodes = self.shape if len(self._local_sizes) > 1 else ""
            command_line, variables = command(self.size, argv, nodes, environ=environment)
        with (
            output.open("wb") as stream,
            started(command_line, stdout=stream, stderr=stream, env={**environment, **variables}) as process,
        ):
            try:
                yield process
            finally:
                if self._lab is not None and process.poll() is None:
                    self.close()  # what runs on other hosts is not of the launcher's session

    def close(self) -> None:
        if self._lab is not None:
            self._lab.close()
            self._lab = None

    def _in_lab(self, argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        if self._lab is None:
            self._lab = lab.Lab(len(self._local_sizes)).__enter__()
        command_line, variables = self._lab.mpirun(self.size, "+".join(map(str, self._local_sizes)), argv)
        inside = self._lab.environment(**variables)
        added = {name: inside[name] for name in ("PATH", "LAB_FOLDER", *variables)}
        return self._lab.on(self._lab.hosts[0], command_line), added


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
