"""Run commands with a deadline, each in its own session, all of whose processes are killed at the deadline."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpistrat.launch.openmpi import remove_rendezvous_files

__all__ = ["TIMED_OUT", "kill_session", "run_bounded"]

TIMED_OUT = 124  # as timeout(1) returns


def run_bounded(
    argv: Sequence[str],
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    capture: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run a command with an empty stdin, and kill all its remaining processes when it ends or its deadline passes.

    Parameters
    ----------
    argv : sequence of str
        The command.
    timeout : float
        Seconds that it may take; after that the code is TIMED_OUT, with the output until then.
    env : mapping, optional
        The whole environment; this process's by default.
    cwd : Path, optional
        Where to run it.
    capture : bool
        Whether to return its output instead of printing it.
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
    """Kill every process of a session, which may have ended already."""
    killed = {leader}
    # Not by process group: mpiexec gives each rank its own.
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(int(process.name)) == leader:
                os.kill(int(process.name), signal.SIGKILL)
                killed.add(int(process.name))
    for pid in killed:  # any of them may have been mpiexec
        remove_rendezvous_files(pid, os.environ)
