"""One run of one experiment: what it may use, and on what, when and by which command it ran."""

import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mpistrat
from mpistrat.launch.mpiexec import command, find_mpi
from tests.hosts.lab import Lab
from tests.processes import run_bounded

PEERS = Path(__file__).parent / "peers"
_LIMIT_SECONDS = 600.0
CACHE = Path.home() / ".cache" / "mpistrat" / "benchmarks"
_INSTALL_SECONDS = 1800
# What pip installs for each. Open MPI is measured with the interpreter that runs the benchmarks: it is what starts ours.
REQUIREMENTS = {
    "mpich": ("mpi4py", "numpy", "mpich"),
    "torch": ("torch==2.13.0", "numpy"),
    "tensorflow": ("tensorflow-cpu==2.21.0",),
}


class Session:
    """What an experiment is handed: the peers' virtual environments, and the versions of what took part, to which it adds."""

    def __init__(self, name: str, quick: bool, peers: Path, only: Sequence[str] = ()) -> None:
        self.name, self.quick, self.only, self.commit = name, quick, only, _commit()
        self.environments = Environments(peers, self.say)
        mpi = find_mpi()
        self.versions = {
            "mpistrat": mpistrat.__version__,
            "Python": platform.python_version(),
            "NumPy": importlib.metadata.version("numpy"),
            mpi.flavour.name: mpi.version,
        }
        self._started = time.perf_counter()
        self._date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()

    def say(self, text: str) -> None:
        print(f"{self.name} {time.perf_counter() - self._started:6.1f} s: {text}", flush=True)

    def add(self, table: list[list[str]], row: list[str]) -> None:
        table.append(row)
        self.say(", ".join(row))

    def circumstances(self) -> str:
        """Return when, by what and on what this was measured."""
        chosen = "".join(f" --only {part}" for part in self.only)
        command_line = f"python -m tests.benchmarks {self.name}{chosen}{' --quick' * self.quick}"
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        missing = "".join(f"; without {name} ({reason})" for name, reason in self.environments.missing.items())
        return f"{self._date}, commit {self.commit}, {command_line}; {_machine()}; {versions}{missing}"


class Environments:
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
        for argv in (
            [sys.executable, "-m", "venv", "--clear", str(home)],
            [str(home / "bin" / "pip"), "install", "--quiet", *REQUIREMENTS[name]],
        ):
            try:
                done = subprocess.run(argv, capture_output=True, text=True, timeout=_INSTALL_SECONDS)
            except subprocess.TimeoutExpired:
                self.missing[name] = f"not installed within {_INSTALL_SECONDS} s"
                return
            if done.returncode:
                self.missing[name] = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
                self._say(f"{name} is left out: {self.missing[name]}")
                return
        (home / "complete").touch()


def answers(program: Sequence[str], environ: Mapping[str, str]) -> list[Any]:
    """Return the lines of JSON that a program prints, with further environment."""
    return _lines_of(run_bounded([*program], _LIMIT_SECONDS, {**os.environ, **environ}))


def answers_of(num_ranks: int, script: str, *arguments: str, lab: Lab | None = None, **env: str) -> list[Any]:
    """Return what a program of this many ranks, one of the folder ``peers``, prints, here or in a lab."""
    program = [sys.executable, str(PEERS / script), *arguments]
    if lab is not None:
        return _lines_of(lab.run(num_ranks, "block", program, timeout=_LIMIT_SECONDS, env=env))
    argv, variables = command(num_ranks, program)
    return answers(argv, {**variables, **env})


def _lines_of(done: subprocess.CompletedProcess[str]) -> list[Any]:
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, done.args))} failed: {done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _machine() -> str:
    model = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    kernel = ".".join(platform.release().split(".")[:2])
    return f"{model[1] if model else platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB, Linux {kernel}"


def _commit() -> str:
    """Return the commit of this checkout, and whether the code differs from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=Path(__file__).parents[2], capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--", "mpistrat", "tests")
    return f"{git('rev-parse', '--short', 'HEAD')}{' with changes' if changed else ''}"
