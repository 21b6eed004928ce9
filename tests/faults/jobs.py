"""How a job ended, and what it left behind."""

from __future__ import annotations

import subprocess
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.processes import started, until

# From the fault to the end of a job, which takes a second or two, and more on a busy machine. What
# nothing ends takes longer, or for ever.
LIMIT_SECONDS = 60.0

# Each rank writes its process into a file, and a rank about to fail the time.
PROLOGUE = """
import os, signal, sys, threading, time
from pathlib import Path
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
import numpy as np
import mpistrat
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
    """How a job ended: exit code, output, seconds from the fault to the end, and the processes of its ranks."""

    code: int
    stdout: str
    stderr: str
    seconds: float
    pids: tuple[int, ...]

    @property
    def marked(self) -> list[str]:
        """The lines that ranks wrote about their exceptions."""
        # mpirun's own banner may come first on a busy machine, and ends with a NUL instead of a line
        lines = [line.lstrip("\0") for line in self.stderr.splitlines()]
        return [line for line in lines if line.startswith("[rank ")]

    def check(self, code: int) -> None:
        """Check that the job ended with this code, soon after the fault that it noted, if any, and left no rank behind."""
        assert self.code == code, self.stderr
        assert not self.seconds >= LIMIT_SECONDS, self.stderr
        assert not self.leftovers()

    def leftovers(self) -> list[int]:
        """Return the ranks' processes that do not end."""
        until(lambda: not any(map(_is_running, self.pids)), LIMIT_SECONDS)
        return [pid for pid in self.pids if _is_running(pid)]


Job = Callable[..., Ended]
"""The fixture `job`."""


def ended(done: subprocess.CompletedProcess[str], folder: Path) -> Ended:
    """Gather what a job left in its folder."""
    now = time.time()
    fault = folder / "fault"
    seconds = now - float(fault.read_text()) if fault.exists() else float("nan")
    pids = tuple(int(path.read_text()) for path in sorted((folder / "pid").iterdir()))
    return Ended(done.returncode, done.stdout, done.stderr, seconds, pids)


def run_until(
    enough: Callable[[str], bool], argv: Sequence[str], timeout: float, env: Mapping[str, str], cwd: Path
) -> subprocess.CompletedProcess[str]:
    """Run a command as `run_bounded` does, but no longer than until that is enough which stands on its stderr."""
    out, err = cwd / "stdout", cwd / "stderr"
    with (
        out.open("wb") as stdout,
        err.open("wb") as stderr,
        started(argv, stdout=stdout, stderr=stderr, env=env, cwd=cwd) as process,
    ):
        until(lambda: process.poll() is not None or enough(err.read_text(errors="replace")), timeout)
    return subprocess.CompletedProcess(
        list(argv), process.wait(), out.read_text(errors="replace"), err.read_text(errors="replace")
    )


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
