"""Processes that a rank forks or starts: they are not ranks, and end without affecting the job.

A forked child has a copy of its parent's MPI in memory, with its connections: if it finalized MPI at exit it would tell the
launcher that the parent had. A program that a rank starts inherits the launcher's variables: a rank marks its environment with
its pid, and a process that finds the mark of another pid, for the same rank of the same job, forgets them.
"""

from __future__ import annotations

import atexit
import os
import sys
import zlib
from collections.abc import Mapping, MutableMapping
from itertools import takewhile

from mpistrat import settings
from mpistrat.errors import LaunchError
from mpistrat.launch import abort, openmpi
from mpistrat.launch.environment import identity, without_launcher
from mpistrat.launch.process import ancestors
from mpistrat.logger import logger

# the mark: the pid of the rank, and a checksum of the variables that identify rank and job
VARIABLE = "MPISTRAT_RANK_PID"

_is_child = False


def mark(environ: MutableMapping[str, str]) -> None:
    """Mark what this rank forks from now on, and, in the environment that they inherit, the programs that it starts."""
    os.register_at_fork(after_in_child=_begin_child)
    if checksum := _checksum(environ):
        environ[VARIABLE] = f"{os.getpid()}:{checksum}"


def forget_launcher(environ: MutableMapping[str, str]) -> None:
    """Remove the launcher's variables if this process has inherited them from a rank, and log that.

    Raises LaunchError if this process has started MPI with them already.
    """
    pid, _, checksum = environ.get(VARIABLE, "").partition(":")
    if not pid.isdigit() or int(pid) == os.getpid() or checksum != _checksum(environ) or _is_launched_by(int(pid)):
        return
    who = f"process {os.getpid()} was started by a rank (process {pid}), whose launcher's variables it has inherited"
    if "mpi4py.MPI" in sys.modules:
        raise LaunchError(
            f"{who}, and has started MPI with them. Import mpistrat and make the strategy before mpi4py.MPI is imported, or "
            f"unset them when you start the process: {', '.join(identity(environ))}."
        )
    kept = without_launcher(environ)
    for name in [name for name in environ if name not in kept or name in (VARIABLE, settings.VIRTUAL_NODES.name)]:
        del environ[name]
    openmpi.remove_parameters(environ)
    logger.warning(f"{who}; it is not a rank, and computes alone.")


def _checksum(environ: Mapping[str, str]) -> str:
    place = identity(environ)
    return f"{zlib.crc32(repr(sorted(place.items())).encode()):08x}" if place else ""


def _is_launched_by(pid: int) -> bool:
    """Return whether a launcher is between this process and an ancestor: hydra gives its first rank equal variables."""
    chain = list(takewhile(lambda found: found.pid != pid, ancestors()))
    return any(found.is_launcher for found in chain) and chain[-1].parent == pid


def _begin_child() -> None:
    global _is_child
    if not _is_child:
        _is_child = True
        # registered last, so called first: the exit handlers of the parent must not run in the child
        atexit.register(_end_child)


def _end_child() -> None:
    abort.flush_output()
    os._exit(abort.ending_code())
