"""Where a job runs: on this machine, in nodes of a shape that ranks pretend, or on the hosts of a lab."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from mpistrat.launch.mpiexec import command
from mpistrat.topology.world import World
from tests.hosts import lab
from tests.processes import started

HOSTS = "hosts:"
_ROOT = Path(__file__).parents[2]


def default_environment(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a program of which nobody has set anything, but for the settings given."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MPISTRAT_")}
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return {**kept, **threads, "PYTHONPATH": str(_ROOT), **settings}


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
        """Give back what jobs ran on."""
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
