"""The peers' virtual environments, outside the checkout, made when they are first needed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

CACHE = Path.home() / ".cache" / "mpistrat" / "benchmarks"
_INSTALL_SECONDS = 1800

# What pip installs for each. Open MPI is measured with the interpreter that runs the benchmarks: it is what starts ours.
REQUIREMENTS = {
    "mpich": ("mpi4py", "numpy", "mpich"),
    "torch": ("torch==2.13.0", "numpy"),
    "tensorflow": ("tensorflow-cpu==2.21.0",),
}


class Environments:
    """Virtual environments in one folder."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.missing: dict[str, str] = {}  # those that were asked for and cannot be had, and why
        self._folder, self._say = folder.expanduser().absolute(), say

    def python(self, name: str) -> str:
        """Return the interpreter of an environment, which is made first if need be; an empty text if it cannot be had."""
        home = self._folder / name
        if name not in self.missing and not (home / "complete").exists():
            self._make(name, home)
        return "" if name in self.missing else str(home / "bin" / "python")

    def _make(self, name: str, home: Path) -> None:
        self._say(f"installing {' '.join(REQUIREMENTS[name])} to {home}")
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(home)],
            [str(home / "bin" / "pip"), "install", "--quiet", *REQUIREMENTS[name]],
        ):
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_SECONDS)
            except subprocess.TimeoutExpired:
                self.missing[name] = f"not installed within {_INSTALL_SECONDS} s"
                return
            if done.returncode:
                self.missing[name] = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
                self._say(f"{name} is left out: {self.missing[name]}")
                return
        (home / "complete").touch()
