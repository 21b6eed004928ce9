"""Processes of this host, as /proc shows them, and the launcher that started this rank: when it has exited, the rank exits too.

A pid is given to another process later; together with the start time it is unique.
"""

from __future__ import annotations

import os
import re
import select
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mpistrat.launch.environment import PROGRAMS, identity

_POLL_SECONDS = 1.0
_EXIT_CODE = 1

_STOPPED, _ENDED = "Tt", "ZXx"

_launcher: Process | None = None


@dataclass(frozen=True)
class Process:
    """A process that existed when it was looked up."""

    pid: int
    parent: int
    started: int  # in clock ticks since the host booted
    name: str  # of its program, cut to 15 characters by the kernel
    is_stopped: bool  # by a signal or a debugger

    @property
    def is_launcher(self) -> bool:
        """Whether its program is an MPI launcher, or one of its daemons."""
        return PROGRAMS.fullmatch(self.name) is not None

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


def every() -> Iterator[Process]:
    """Return all processes of this host, without zombies."""
    return filter(None, (find(int(folder.name)) for folder in Path("/proc").glob("[0-9]*")))


def children(pid: int) -> set[int]:
    """Return the pids of the processes whose parent is this one."""
    return {each.pid for each in every() if each.parent == pid}


def find_launcher(environ: Mapping[str, str], pid: int | None = None) -> Process | None:
    """Return the process that started a rank, by default this one; None if it cannot be found or the process is not a rank.

    It is not always the parent, as in ``mpiexec bash -c "python x.py"``: it is the nearest ancestor that is a launcher, or does
    not itself have the rank's variables, `environ`. Call this before MPI starts: MPI_Init succeeds only while it is alive.
    """
    mine = identity(environ)
    if not mine:
        return None
    for found in ancestors(pid):
        # hydra inside a rank has that one's variables; a daemon of another user, such as slurmstepd, shows none
        if found.is_launcher or identity(found.environment() or {}) != mine:
            # process 1 adopts processes whose parent has exited
            return found if found.pid > 1 and not found.is_gone() else None
    return None


def watch_launcher(launcher: Process, rank: int) -> None:
    """Start a thread that ends this process soon after its launcher has exited.

    The kernel can signal a parent's death (PR_SET_PDEATHSIG), but it signals the death of the *thread* that forked, and
    launchers fork from threads that end early. So the thread polls once a second.
    """
    global _launcher
    _launcher = launcher
    threading.Thread(target=_end_after, args=(launcher, rank), name="mpistrat launcher watch", daemon=True).start()


def watched_launcher() -> Process | None:
    """Return the launcher that `watch_launcher` was given: an ancestor of all ranks of this node."""
    return _launcher


def open_mpi_segments(pid: int) -> set[Path]:
    """Return the files in /dev/shm by which a rank of Open MPI sends to others of its host: only a launcher removes them."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")  # names of files need not be UTF-8
    except OSError:  # it has exited, or belongs to another user
        return set()
    return set(map(Path, re.findall(r"(/dev/shm/sm_segment\.\S+)$", maps, re.MULTILINE)))


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


def _end_after(launcher: Process, rank: int) -> None:
    while not launcher.is_gone():
        time.sleep(_POLL_SECONDS)
    who = f"{launcher.name} (process {launcher.pid}), which started this rank"
    text = f"[rank {rank} on {socket.gethostname()}] {who}, is gone: the rank ends\n"
    with suppress(OSError, ValueError):
        if select.select([], [2], [], 0)[1]:  # the reader of stderr is probably gone as well, and a full pipe would block
            os.write(2, text.encode())
    for path in open_mpi_segments(os.getpid()):
        with suppress(OSError):
            path.unlink(missing_ok=True)
    os._exit(_EXIT_CODE)  # without MPI_Abort, which would need the launcher
