"""Jobs of program texts: how each is started as a user would, how it has ended, and what it has left behind."""

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mpistrat.launch.mpiexec import command, find_mpi
from mpistrat.launch.process import find
from tests.processes import TAKES_CTRL_C, started, until

# From the fault to the end of a job, which takes a second or two, and more on a busy machine. What
# nothing ends takes longer, or for ever.
LIMIT_SECONDS = 60.0
JOB_SECONDS = 120.0  # for one that hangs
PYTHON = (sys.executable,)
MPISTRAT_RUN = (*PYTHON, "-m", "mpistrat", "run")

# Each rank writes its process into a file, and a rank about to fail the time.
PROLOGUE = """
import atexit, os, signal, sys, threading, time
from pathlib import Path
import numpy as np
import mpistrat
from mpistrat.launch.bootstrap import start

comm = start()
mine = comm.Dup()
Path("pid", str(comm.rank)).write_text(str(os.getpid()))
mine.Barrier()

def note_fault():
    Path("fault").write_text(str(time.time()))

"""


# A job with parameter servers: what stands after this the chief does.
SERVED = """
import itertools
from mpistrat.errors import CancelledError, UnavailableError
from mpistrat.experimental import ParameterServerStrategy

resolver = mpistrat.cluster_resolver.MPIClusterResolver(chief=1, ps=NUM_SERVERS)
if resolver.task_type in ("worker", "ps"):
    mpistrat.Server(resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id).join()
    print("served", resolver.task_type, resolver.task_id, flush=True)
    sys.exit()
strategy = ParameterServerStrategy(resolver)
coordinator = mpistrat.experimental.coordinator.ClusterCoordinator(strategy)
pids = [int(Path("pid", str(rank)).read_text()) for rank in range(comm.size)]

def kill_after(seconds, rank):
    def kill():
        note_fault()
        os.kill(pids[rank], signal.SIGKILL)

    killing = threading.Timer(seconds, kill)
    killing.start()
    return killing
"""


def with_servers(chief: str, **constants: object) -> str:
    """Return the program of a job with parameter servers, of which the chief does what is passed, with constants."""
    known = "".join(f"{name} = {value!r}\n" for name, value in {"NUM_SERVERS": 1, **constants}.items())
    return known + SERVED + textwrap.dedent(chief)


@dataclass(frozen=True)
class Ended:
    """How a job ended: code, output, seconds from the fault to the end, the processes of its ranks, and which of them go on."""

    code: int
    stdout: str
    stderr: str
    seconds: float
    pids: tuple[int, ...]
    leftovers: tuple[int, ...]

    @property
    def marked(self) -> list[str]:
        """The lines that ranks wrote about their exceptions."""
        # mpirun's own banner may come first on a busy machine, and ends with a NUL instead of a line
        lines = [line.lstrip("\0") for line in self.stderr.splitlines()]
        return [line for line in lines if line.startswith("[rank ")]

    def check(self, *codes: int) -> None:
        """Check that it ended with one of the codes, soon after the fault that it noted, if any, and left no rank behind."""
        assert self.code in codes, self.stderr
        assert not self.seconds >= LIMIT_SECONDS, self.stderr
        assert not self.leftovers, self.stderr


class Job:
    """A job in an empty folder: the fixture `job`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "pid").mkdir()

    def __call__(
        self,
        num_ranks: int,
        text: str,
        python: Sequence[str] = PYTHON,
        *,
        enough: Callable[[str], bool] = lambda stderr: False,
        meanwhile: Callable[[subprocess.Popen[bytes]], object] = lambda launcher: None,
        **how: Any,
    ) -> Ended:
        """Run a program text on some ranks and say how it ended; what stands before the script, and `how`, is as in `start`.

        It is ended as soon as that is enough which stands on its stderr; `meanwhile` gets the launcher first.
        """

        def attempt() -> Ended:
            with self.start(num_ranks, text, python, **how) as launcher:
                meanwhile(launcher)
                until(lambda: launcher.poll() is not None or enough(self.said("err")), JOB_SECONDS)
                fault, now, pids = self.folder / "fault", time.time(), self.pids()
                if launcher.poll() is not None:  # otherwise the ranks are killed with it
                    until(lambda: not any(map(find, pids)), LIMIT_SECONDS)
                leftovers = () if launcher.poll() is None else tuple(filter(find, pids))
            seconds = now - float(fault.read_text()) if fault.exists() else float("nan")
            return Ended(launcher.returncode, self.said("out"), self.said("err"), seconds, pids, leftovers)

        ended = attempt()
        # Open MPI's launcher itself, before it has started a rank; rare, on a busy machine
        return attempt() if "The PMIx server's listener thread failed to start" in ended.stderr else ended

    def start(
        self,
        num_ranks: int,
        text: str,
        python: Sequence[str] = PYTHON,
        *,
        run: Sequence[str] | None = None,
        survive: bool = False,
        **environ: str,
    ) -> AbstractContextManager[subprocess.Popen[bytes]]:
        """Start it by mpiexec, or with options to `run`, which may be none, by `mpistrat run`; end it in the end."""
        if survive and find_mpi().flavour.name != "Open MPI":
            pytest.skip("of the MPI libraries that are supported only Open MPI survives the loss of ranks")
        (self.folder / "job.py").write_text(PROLOGUE + textwrap.dedent(text))
        if run is None:
            argv, extra = command(num_ranks, [*python, "job.py"], survive=survive)
        else:
            argv, extra = [*TAKES_CTRL_C, *MPISTRAT_RUN, "-n", str(num_ranks), *run, "job.py"], {}
        return running(argv, {**extra, **environ}, self.folder)

    def said(self, name: str) -> str:
        """Return what was printed so far, to ``out`` or to ``err``."""
        return said(self.folder, name)

    def pids(self) -> tuple[int, ...]:
        return tuple(int(path.read_text() or 0) for path in sorted((self.folder / "pid").iterdir()))


@contextmanager
def running(argv: Sequence[str], environ: Mapping[str, str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command in a folder, with further environment; what it prints goes to the files ``out`` and ``err`` there."""
    with (
        (folder / "out").open("wb") as out,
        (folder / "err").open("wb") as err,
        started(argv, stdout=out, stderr=err, env={**os.environ, **environ}, cwd=folder) as process,
    ):
        yield process


def said(folder: Path, *names: str) -> str:
    """Return what was printed, to ``out`` and ``err`` or to one of them."""
    return "".join((folder / name).read_text(errors="replace") for name in names or ("out", "err"))
