"""Hostfiles: which hosts mpiexec starts ranks on. Checked before it starts, whose own messages are long and late."""

from __future__ import annotations

import re
from pathlib import Path

from mpistrat.errors import InvalidArgumentError

__all__ = ["check_hostfile"]

_SLOTS_OF_OPEN_MPI = re.compile(r"\s(?:max[-_])?slots\s*=")
_SLOTS_OF_HYDRA = re.compile(r"^[^\s\[\]:]+:\d+")


def check_hostfile(path: Path, mpi: str, slots: str) -> None:
    """Check that a file names hosts, in the form that an mpiexec reads.

    Parameters
    ----------
    path : Path
        The file.
    mpi : str
        Name of the MPI: Open MPI has a form of its own.
    slots : str
        How it writes that a host has 4 slots.

    Raises
    ------
    InvalidArgumentError
        If it cannot be read, names no host, or is written for another mpiexec; says the line.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text"
        raise InvalidArgumentError(f"--hostfile {path} cannot be read: {reason}") from None
    hosts = {number: text for number, line in enumerate(lines, 1) if (text := line.partition("#")[0].strip())}
    if not hosts:
        raise InvalidArgumentError(f"--hostfile {path} names no host; a line is {slots!r} for four ranks there")
    foreign = _SLOTS_OF_HYDRA if mpi == "Open MPI" else _SLOTS_OF_OPEN_MPI
    for number, text in hosts.items():
        if foreign.search(text):
            raise InvalidArgumentError(
                f"--hostfile {path}, line {number}: {text!r} is not how {mpi} counts slots; four on a host are {slots!r}"
            )
