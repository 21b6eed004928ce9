"""Programs that a rank starts in a subprocess: they inherit the launcher's variables, but are not ranks.

A rank marks its environment with its pid. A process that finds the mark of another pid, for the same rank of the same job, has
inherited the launcher's variables from that rank.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Mapping, MutableMapping
from itertools import takewhile

from mpistrat import settings
from mpistrat.errors import LaunchError
from mpistrat.launch import openmpi
from mpistrat.launch.environment import identity, without_launcher
from mpistrat.launch.process import ancestors
from mpistrat.logger import logger

__all__ = ["VARIABLE", "forget_launcher", "mark"]

VARIABLE = "MPISTRAT_RANK_PID"
"""The mark: the pid of the rank, and a checksum of the variables that identify rank and job."""


def mark(environ: MutableMapping[str, str]) -> None:
    """Mark the environment for processes that this rank starts, which are not ranks. Without a launcher nothing is done.

    Parameters
    ----------
    environ : mapping
        The environment of this process, which they inherit.
    """
    if checksum := _checksum(environ):
        environ[VARIABLE] = f"{os.getpid()}:{checksum}"


def forget_launcher(environ: MutableMapping[str, str]) -> None:
    """Remove the launcher's variables if this process has inherited them from a rank, and log that.

    Parameters
    ----------
    environ : mapping
        The environment of this process.

    Raises
    ------
    LaunchError
        If this process has started MPI with them already.
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
    """Return whether a launcher is between this process and one of its ancestors.

    Such a launcher may give its first rank the very variables that its own rank has: hydra does.
    """
    chain = list(takewhile(lambda found: found.pid != pid, ancestors()))
    return any(found.is_launcher for found in chain) and chain[-1].parent == pid
