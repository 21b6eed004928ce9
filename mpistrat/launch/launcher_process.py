"""The process of the launcher that started this rank: where it is gone, the rank ends too, instead of waiting for ever.

The kernel can signal a parent's death (PR_SET_PDEATHSIG), but it signals the death of the *thread* that forked, and launchers
fork from threads that end early. So a thread of this library looks each second. The launcher is not always the parent, as in
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

_LOOK_SECONDS = 1.0
_EXIT_CODE = 1
_ENDED = ("Z", "X")  # states of a process that nobody has waited for yet


@dataclass(frozen=True)
class LauncherProcess:
    """A process, told apart from a later one of the same number by when it began.

    Attributes
    ----------
    pid : int
        Its number.
    name : str
        What the kernel calls its program: ``prterun``.
    began : str
        When it was started, in the kernel's clock.
    """

    pid: int
    name: str
    began: str

    def is_gone(self) -> bool:
        """Return whether it has ended; costs some 20 us."""
        try:
            stat = _Stat.of(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return True
        except OSError:  # such as too many open files
            return False
        return stat.state in _ENDED or stat.began != self.began


_launcher: LauncherProcess | None = None


def find_launcher(environ: Mapping[str, str]) -> LauncherProcess | None:
    """Return the process that started this rank; None where it cannot be seen or this process is not a rank.

    To be called before MPI starts, which proves that the launcher lived until then.

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
        except PermissionError:  # the daemon of another user, as slurmstepd: no process of the rank
            raw = b""
        except OSError:
            return None
        theirs = dict(line.split("=", 1) for line in os.fsdecode(raw).split("\0") if "=" in line)
        if identity(theirs) != mine:
            # the first process of a container or a host adopts those whose parent has ended
            return LauncherProcess(stat.pid, stat.name, stat.began) if stat.pid > 1 else None
    return None


def ancestors() -> Iterator[_Stat]:
    """Yield this process's parent, its parent and so on, as far as they can be seen."""
    pid = os.getppid()
    while pid > 0:
        try:
            stat = _Stat.of(pid)
        except OSError:
            return
        yield stat
        pid = stat.parent


def watch(launcher: LauncherProcess, rank: int) -> None:
    """Have a thread end this process soon after its launcher has.

    Parameters
    ----------
    launcher : LauncherProcess
        What `find_launcher` found.
    rank : int
        Of this process, for what it says then.
    """
    global _launcher
    _launcher = launcher
    threading.Thread(target=_look_each_second, args=(launcher, rank), name="mpistrat launcher watch", daemon=True).start()


def watched() -> LauncherProcess | None:
    """Return the launcher that `watch` was given: an ancestor of all ranks of this node."""
    return _launcher


def parent_is_gone() -> bool:
    """Return whether the launcher that `watch` was given has ended; False where there is none to watch."""
    return _launcher is not None and _launcher.is_gone()


def _look_each_second(launcher: LauncherProcess, rank: int) -> None:
    while not launcher.is_gone():
        time.sleep(_LOOK_SECONDS)
    _end(
        f"[rank {rank} on {socket.gethostname()}] {launcher.name} (process {launcher.pid}), which started this rank, is gone: "
        "the rank ends\n"
    )


def _end(text: str) -> None:
    """End at once, without MPI, which would ask the launcher."""
    with suppress(OSError, ValueError):
        if select.select([], [2], [], 0)[1]:  # who read it is probably gone as well
            os.write(2, text.encode())
    os._exit(_EXIT_CODE)


@dataclass(frozen=True)
class _Stat:
    """What the kernel says of a process."""

    pid: int
    name: str
    state: str
    parent: int
    began: str

    @classmethod
    def of(cls, pid: int) -> _Stat:
        # the name is the program's own choice, spaces and parentheses included
        head, _, tail = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")
        fields = tail.split()
        return cls(pid, head.partition("(")[2], fields[0], int(fields[1]), fields[19])
