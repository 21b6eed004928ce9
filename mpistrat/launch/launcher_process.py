"""The launcher process that started this rank: when it has exited, the rank exits too, instead of hanging.

The kernel can signal a parent's death (PR_SET_PDEATHSIG), but it signals the death of the *thread* that forked, and launchers
fork from threads that end early. So a thread of this library polls once a second. The launcher is not always the parent, as in
``mpiexec bash -c "python x.py"``: it is the nearest ancestor that does not itself have the rank's variables.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mpistrat.launch.environment import identity

__all__ = ["LauncherProcess", "ancestors", "find_launcher", "parent_is_gone", "watch", "watched"]

_POLL_SECONDS = 1.0
_EXIT_CODE = 1
_ENDED = ("Z", "X")  # zombie and dead: states of an exited process whose parent has not waited for it yet


@dataclass(frozen=True)
class LauncherProcess:
    """A process, distinguished from a later one with the same pid by its start time.

    Attributes
    ----------
    pid : int
        Process id.
    name : str
        Name of its program, as the kernel gives it: ``prterun``.
    began : str
        Start time, in the kernel's clock ticks.
    """

    pid: int
    name: str
    began: str

    def is_gone(self) -> bool:
        """Return whether it has exited; takes about 20 µs."""
        try:
            stat = _Stat.of(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return True
        except OSError:  # such as too many open files
            return False
        return stat.state in _ENDED or stat.began != self.began


_launcher: LauncherProcess | None = None


def find_launcher(environ: Mapping[str, str]) -> LauncherProcess | None:
    """Return the process that started this rank; None if it cannot be found or this process is not a rank.

    Call it before MPI starts: MPI_Init succeeds only while the launcher is alive.

    Parameters
    ----------
    environ : mapping
        The environment of this process.
    """
    mine = identity(environ)
    if not mine:
        return None
    for stat in ancestors():
        try:
            raw = Path(f"/proc/{stat.pid}/environ").read_bytes()
        except PermissionError:  # a daemon of another user, such as slurmstepd: not a process of this job
            raw = b""
        except OSError:
            return None
        theirs = dict(line.split("=", 1) for line in os.fsdecode(raw).split("\0") if "=" in line)
        if identity(theirs) != mine:
            # process 1 adopts processes whose parent has exited
            return LauncherProcess(stat.pid, stat.name, stat.began) if stat.pid > 1 else None
    return None


def ancestors() -> Iterator[_Stat]:
    """Yield this process's parent, its parent and so on, as far as /proc shows them."""
    pid = os.getppid()
    while pid > 0:
        try:
            stat = _Stat.of(pid)
        except OSError:
            return
        yield stat
        pid = stat.parent


def watch(launcher: LauncherProcess, rank: int) -> None:
    """Start a thread that ends this process soon after its launcher has exited.

    Parameters
    ----------
    launcher : LauncherProcess
        The result of `find_launcher`.
    rank : int
        Rank of this process, for the message.
    """
    global _launcher
    _launcher = launcher
    threading.Thread(target=_poll, args=(launcher, rank), name="mpistrat launcher watch", daemon=True).start()


def watched() -> LauncherProcess | None:
    """Return the launcher that `watch` was given: an ancestor of all ranks of this node."""
    return _launcher


def parent_is_gone() -> bool:
    """Return whether the launcher that `watch` was given has exited; False if there is none."""
    return _launcher is not None and _launcher.is_gone()


def _poll(launcher: LauncherProcess, rank: int) -> None:
    while not launcher.is_gone():
        time.sleep(_POLL_SECONDS)
    _end(
        f"[rank {rank} on {socket.gethostname()}] {launcher.name} (process {launcher.pid}), which started this rank, is gone: "
        "the rank ends\n"
    )


def _end(text: str) -> None:
    """Exit at once, without MPI_Abort, which would need the launcher."""
    with suppress(OSError, ValueError):
        if select.select([], [2], [], 0)[1]:  # the reader of stderr is probably gone as well, and a full pipe would block
            os.write(2, text.encode())
    os._exit(_EXIT_CODE)


@dataclass(frozen=True)
class _Stat:
    """The fields of /proc/PID/stat that are used here."""

    pid: int
    name: str
    state: str
    parent: int
    began: str

    @classmethod
    def of(cls, pid: int) -> _Stat:
        # the name may contain spaces and parentheses
        head, _, tail = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")
        fields = tail.split()
        return cls(pid, head.partition("(")[2], fields[0], int(fields[1]), fields[19])
