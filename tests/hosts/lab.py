"""Several hosts on one machine: network namespaces with their own names and shaped links.

Every host has its own network, host name, shared memory and boot id; a switch joins them, and a token bucket shapes what
each host sends. All of it lives in namespaces without names below one process, which the kernel ends together with the
process that asked for the lab: nothing outside is touched, any number of labs run side by side, and none outlives a crash.
"""

from __future__ import annotations

import contextlib
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpistrat.launch.mpiexec import find_mpi
from tests.processes import run_bounded, until

_HERE = Path(__file__).parent
_SUBNET = "10.77.31"  # exists only inside the lab's namespaces
# what a lab runs, and the Debian packages that have it
TOOLS = {"ip": "iproute2", "tc": "iproute2", "hostname": "hostname"}
TOOLS |= dict.fromkeys(("unshare", "nsenter", "setpriv"), "util-linux")


class LabError(RuntimeError):
    """The lab could not be brought up, or a command in it failed."""


def missing(tools: Mapping[str, str] = TOOLS) -> str:
    """Return why a lab cannot be had here and what to install, or an empty text."""
    reasons = []
    if os.geteuid() != 0:
        reasons.append("needs root (network namespaces); run the tests as root")
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    packages = sorted({package for tool, package in tools.items() if shutil.which(tool, path=path) is None})
    if packages:
        reasons.append(f"missing Debian packages; apt-get install {' '.join(packages)}")
    return "; ".join(reasons)


class Lab:
    """Hosts that are up as long as this object is open: so many, or of these names; `rate` and `burst` are as ``tc`` has them.

    What each may send can be ``unlimited`` too; the burst is the size of the token bucket.
    """

    def __init__(self, hosts: int | Sequence[str] = 4, rate: str = "1gbit", burst: str = "256kb") -> None:
        self.hosts = tuple(f"node{number}" for number in range(hosts)) if isinstance(hosts, int) else tuple(hosts)
        self.folder = Path(tempfile.mkdtemp(prefix="mpistrat-lab-"))
        self.rate, self._burst = rate, burst
        self._switch: subprocess.Popen[bytes] | None = None
        self._first = 0

    def __enter__(self) -> Lab:  # noqa: PYI034 - Self is newer than Python 3.10
        self.folder.chmod(0o755)
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--mount", "--pid", "--fork", "--kill-child"]
        command += ["--mount-proc", str(_HERE / "switch"), str(self.folder), _SUBNET, self.rate, self._burst, *self.hosts]
        with (self.folder / "log").open("wb") as log:
            self._switch = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=_environment()
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process of the lab; its namespaces, links and mounts go with them."""
        if self._switch is not None:
            # The kernel ends all processes of a PID namespace before it reports the end of the first.
            os.kill(self._first or self._switch.pid, signal.SIGKILL)
            self._switch.wait()
            self._switch = None
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def agent(self) -> str:
        """What a launcher is to use as its remote shell."""
        return str(_HERE / "enter")

    def on(self, host: str, argv: Sequence[str]) -> list[str]:
        """Return the command that runs `argv` on a host; its environment needs LAB_FOLDER, as `environment` has it."""
        outside = ["nsenter", "--target", str(self._first), "--pid", "--mount", "--net", f"--wd={Path.cwd()}"]
        return [*outside, str(_HERE / "enter"), host, f"exec {shlex.join(argv)}"]

    def environment(self, **extra: str) -> dict[str, str]:
        """Return the environment for commands in the lab."""
        return {**_environment(), "LAB_FOLDER": str(self.folder), **extra}

    def start(self, host: str, argv: Sequence[str], stdout: Any, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start a command on a host, in a session of its own and with nothing to read; it ends with the lab if not before."""
        streams = {"stdin": subprocess.DEVNULL, "stdout": stdout, "stderr": stdout, "text": True}
        return subprocess.Popen(self.on(host, argv), env=self.environment(**(env or {})), start_new_session=True, **streams)

    def output(self, host: str, argv: Sequence[str], timeout: float = 30) -> str:
        """Run a command on a host and return what it prints; it must succeed."""
        done = run_bounded(self.on(host, argv), timeout, self.environment())
        if done.returncode:
            raise LabError(f"{host}: {shlex.join(argv)} ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    def run(
        self, num_ranks: int, placement: str, argv: Sequence[str], timeout: float = 120, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run an MPI program with Open MPI's mpirun, started on the first host; `env` is more environment of the ranks."""
        command, variables = self.mpirun(num_ranks, placement, argv)
        environ = self.environment(**{**variables, **(env or {})})
        return run_bounded(self.on(self.hosts[0], command), timeout, environ)

    def mpirun(self, num_ranks: int, placement: str, argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """Return the command that starts a program with Open MPI's mpirun on the first host, and the variables it needs."""
        # what a job that failed leaves of its sockets must not meet the next one
        own = Path(tempfile.mkdtemp(prefix="job", dir=self.folder))
        hostfile = own / "hostfile"
        hostfile.write_text("".join(f"{host}\n" for host in self.host_of_each_rank(num_ranks, placement)))
        options = ["--hostfile", str(hostfile), "--map-by", "seq:OVERSUBSCRIBE", "--bind-to", "none"]
        return [_mpirun(), *options, "-n", str(num_ranks), *argv], {"PRTE_MCA_prte_tmpdir_base": str(own), **_OPEN_MPI}

    def host_of_each_rank(self, num_ranks: int, placement: str) -> list[str]:
        """Return the host of each rank.

        A placement is ``block`` (consecutive ranks share a host), ``cyclic`` (they sit on different hosts), ``random`` (a
        shuffle, always the same) or the number of ranks on each host, such as ``3+1+2+2``.
        """
        cyclic = [self.hosts[rank % len(self.hosts)] for rank in range(num_ranks)]
        if placement == "cyclic":
            return cyclic
        block = sorted(cyclic, key=self.hosts.index)
        if placement == "random":
            random.Random(num_ranks).shuffle(block)
        if placement in ("block", "random"):
            return block
        counts = [int(count) for count in placement.split("+")]
        assert sum(counts) == num_ranks, f"{placement!r} is not a placement of {num_ranks} ranks"
        return [host for host, count in zip(self.hosts, counts, strict=True) for _ in range(count)]

    def bytes_sent(self) -> dict[str, int]:
        """Return the bytes each host has put on its link so far."""
        return {host: parse_bytes_sent(self.output(host, ["cat", "/proc/self/net/dev"])) for host in self.hosts}

    def goodput_bits(self, rounds: int = 3, seconds: float = 1.5) -> float:
        """Measure what two hosts move between each other, both ways at once: payload bits per second and direction.

        The best of several rounds counts: it is the link that is asked for, not what else the machine is doing.
        """
        return max(self._stream_both_ways(seconds) for _ in range(rounds))

    def _stream_both_ways(self, seconds: float) -> float:
        program = [sys.executable, str(_HERE / "programs" / "goodput.py")]
        with contextlib.ExitStack() as stack:
            sides = [
                stack.enter_context(self.start(host, [*program, role, self.hosts[0], str(seconds)], subprocess.PIPE))
                for host, role in zip(self.hosts[:2], ("listen", "connect"), strict=True)
            ]
            texts = [side.communicate(timeout=seconds + 30)[0] for side in sides]
        return min(float(text) for text in texts)

    def _wait_until_ready(self) -> None:
        assert self._switch is not None
        switch = self._switch
        until(lambda: (self.folder / "ready").exists() or switch.poll() is not None, 20)
        if not (self.folder / "ready").exists():
            raise LabError(f"the lab did not come up: {(self.folder / 'log').read_text()}")
        self._first = int(Path(f"/proc/{switch.pid}/task/{switch.pid}/children").read_text())


_OPEN_MPI = {
    "PRTE_MCA_plm_ssh_agent": str(_HERE / "enter"),
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    # Keep messages between hosts on the links: UCX would recognise the one kernel below, and go round them.
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,sm,tcp",
    "OMPI_MCA_osc": "^ucx",
    # Ranks outnumber cores.
    "OMPI_MCA_mpi_yield_when_idle": "1",
}


def parse_bytes_sent(net_dev: str) -> int:
    """Return the bytes that a host has put on its link, from the text of ``/proc/net/dev``."""
    [line] = [line for line in net_dev.splitlines() if line.strip().startswith("eth0:")]
    return int(line.partition(":")[2].split()[8])


def _mpirun() -> str:
    mpi = find_mpi()
    if mpi.flavour.name != "Open MPI" or mpi.version.startswith("4"):
        raise LabError(f"the lab starts ranks with Open MPI 5's mpirun; mpi4py loads {mpi.flavour.name} {mpi.version} here")
    return mpi.mpiexec


def _environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}
