"""Commands that must end: each in a process group of its own, killed as a whole at its deadline."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["TIMED_OUT", "run_bounded"]

TIMED_OUT = 124  # as timeout(1) has it


def run_bounded(
    argv: Sequence[str],
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    capture: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run a command with nothing to read, and kill its whole process group at the deadline.

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
        _kill_group(process)
        out, err = process.communicate()
        code, err = TIMED_OUT, f"{err or ''}\nkilled: still running after {timeout:g} s\n"
    finally:
        _kill_group(process)
        process.wait()
    return subprocess.CompletedProcess(list(argv), code, out or "", err or "")


def _kill_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
