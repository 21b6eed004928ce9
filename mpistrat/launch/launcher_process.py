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
from collections.abc import Mapping
from contextlib import suppress

from mpistrat.launch.environment import identity
from mpistrat.launch.process import Process, ancestors

__all__ = ["find_launcher", "watch", "watched"]

_POLL_SECONDS = 1.0
_EXIT_CODE = 1

_launcher: Process | None = None


def find_launcher(environ: Mapping[str, str]) -> Process | None:
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
    for found in ancestors():
        # a daemon of another user, such as slurmstepd, shows no variables; it is not a process of this job
        if identity(found.environment() or {}) != mine:
            # process 1 adopts processes whose parent has exited
            return found if found.pid > 1 and not found.is_gone() else None
    return None


def watch(launcher: Process, rank: int) -> None:
    """Start a thread that ends this process soon after its launcher has exited.

    Parameters
    ----------
    launcher : Process
        The result of `find_launcher`.
    rank : int
        Rank of this process, for the message.
    """
    global _launcher
    _launcher = launcher
    threading.Thread(target=_poll, args=(launcher, rank), name="mpistrat launcher watch", daemon=True).start()


def watched() -> Process | None:
    """Return the launcher that `watch` was given: an ancestor of all ranks of this node."""
    return _launcher


def _poll(launcher: Process, rank: int) -> None:
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
