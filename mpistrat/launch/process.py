"""Processes of this host, as /proc shows them: which program one is, whether it still exists, and what started it.

A pid is given to another process later; together with the start time it is unique.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["Process", "ancestors", "find", "pid_namespace"]

_STOPPED, _ENDED = "Tt", "ZXx"
# programs that start ranks, and daemons between them and the ranks; the kernel cuts names to 15 characters
_LAUNCHERS = re.compile(
    r"(mpiexec|mpirun)(\.hydra|\.openmpi|\.mpich|_rsh)?|hydra_\w+|mpispawn|prte|prterun|prted|orterun|orted|"
    r"srun|slurmstepd|aprun|palsd?"
)


@dataclass(frozen=True)
class Process:
    """A process that existed when it was looked up.

    Attributes
    ----------
    pid, parent : int
        Its process id and that of its parent.
    started : int
        Start time, in clock ticks since the host booted.
    name : str
        Name of its program, cut to 15 characters by the kernel: ``prterun``.
    is_stopped : bool
        Whether a signal or a debugger has stopped it.
    """

    pid: int
    parent: int
    started: int
    name: str
    is_stopped: bool

    @property
    def is_launcher(self) -> bool:
        """Whether its program is an MPI launcher, or one of its daemons."""
        return _LAUNCHERS.fullmatch(self.name) is not None

    def is_gone(self) -> bool:
        """Return whether it has exited; takes about 20 µs."""
        try:
            now = _read(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return True
        except OSError:  # such as too many open files
            return False
        return now is None or now.started != self.started

    def environment(self) -> dict[str, str] | None:
        """Return the variables that it was started with; None if it has exited or belongs to another user."""
        try:
            data = Path(f"/proc/{self.pid}/environ").read_bytes()
        except OSError:
            return None
        entries = (entry.partition("=") for entry in os.fsdecode(data).split("\0"))
        return {name: value for name, equals, value in entries if equals}


def find(pid: int) -> Process | None:
    """Return the process with this pid; None if there is none, or only a zombie."""
    try:
        return _read(pid)
    except OSError:
        return None


def ancestors(pid: int | None = None) -> Iterator[Process]:
    """Yield the parent of a process, its parent and so on, as far as /proc shows them; of this process by default."""
    found = find(os.getpid() if pid is None else pid)
    while found is not None and (found := find(found.parent)) is not None:
        yield found


@cache
def pid_namespace() -> int:
    """Return the namespace that pids are counted in, which differs between containers; 0 if that is not known."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def _read(pid: int) -> Process | None:
    # the name may contain spaces and parentheses
    head, _, tail = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")
    fields = tail.split()
    if fields[0] in _ENDED:
        return None
    return Process(pid, int(fields[1]), int(fields[19]), head.partition("(")[2], fields[0] in _STOPPED)
