"""Processes of this host, as /proc shows them: whether it is still the one that was seen, and who started it.

A number of a process is given out again; together with the time of its start it is not.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["Process", "find", "pid_namespace"]

_STOPPED, _ENDED = "Tt", "ZXx"


@dataclass(frozen=True)
class Process:
    """A process that is there.

    Attributes
    ----------
    pid, parent : int
        Its number and that of its parent.
    started : int
        When it started, in ticks since the host did.
    name : str
        Its program, cut to 15 characters by the kernel.
    is_stopped : bool
        Whether a signal or a debugger holds it.
    """

    pid: int
    parent: int
    started: int
    name: str
    is_stopped: bool

    def environment(self) -> dict[str, str] | None:
        """Return the variables that it was started with, or None where it is another user's."""
        try:
            data = Path(f"/proc/{self.pid}/environ").read_bytes()
        except OSError:
            return None
        entries = (entry.partition("=") for entry in os.fsdecode(data).split("\0"))
        return {name: value for name, equals, value in entries if equals}


def find(pid: int) -> Process | None:
    """Return a process, or None where there is none of that number, or only what its parent has not taken notice of."""
    try:
        head, _, rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")
    except OSError:
        return None
    fields = rest.split()
    if fields[0] in _ENDED:
        return None
    return Process(pid, int(fields[1]), int(fields[19]), head.partition("(")[2], fields[0] in _STOPPED)


@cache
def pid_namespace() -> int:
    """Return which numbers of processes mean something here: containers count their own; 0 where that is not known."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0
