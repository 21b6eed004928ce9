"""Commands that must end: each in a session of its own, whose processes are killed to the last one at its deadline."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpistrat.launch.openmpi import remove_rendezvous_files

__all__ = ["TIMED_OUT", "kill_session", "run_bounded"]

TIMED_OUT = 124  # as timeout(1) has it


def run_bounded(
    argv: Sequence[str],
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    capture: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run a command with nothing to read, and leave none of its processes behind, at the latest at the deadline.

    Parameters
    ----------
    argv : sequence of str
        The command.
    timeout : float
        Seconds it may take; one that takes longer returns TIMED_OUT, with what it has printed until then.
    env : mapping, optional
        The whole environment; this process's by default.
    cwd : Path, optional
        Where to run it.
    capture : bool
        Whether to return what it prints rather than to show it.
    """
    pipe = subprocess.PIPE if capture else None
    process = subprocess.Popen(
        list(argv),
        stdin=subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        text=True,
        errors="replace",
        env=env,
        cwd=cwd,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
        code = process.returncode
    except subprocess.TimeoutExpired:
        kill_session(process.pid)
        out, err = process.communicate()
        code, err = TIMED_OUT, f"{err or ''}\nkilled: still running after {timeout:g} s\n"
    finally:
        kill_session(process.pid)
        process.wait()
    return subprocess.CompletedProcess(list(argv), code, out or "", err or "")


def kill_session(leader: int) -> None:
    """Kill every process of a session, which may be over already."""
    killed = {leader}
    # Not by process group: mpiexec gives each of its ranks one of its own.
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(int(process.name)) == leader:
                os.kill(int(process.name), signal.SIGKILL)
                killed.add(int(process.name))
    for pid in killed:  # any of them may have been mpiexec
        remove_rendezvous_files(pid, os.environ)
