"""A real SLURM cluster on one machine: slurmctld on a login host, slurmd on each node, all hosts of a lab."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.hosts import lab
from tests.processes import run_bounded, until

_NUM_GPUS = 8
_TOOLS = {**lab.TOOLS, "slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client", "munged": "munge"}
# SLURM's pmix plugin opens libpmix.so, without a version: only the development package has that name.
_LIBPMIX = ("/usr/lib/*/pmix*/lib/libpmix.so", "/usr/lib/*/libpmix.so", "/usr/lib64/libpmix.so")
_PAUSE_SECONDS = 0.25  # each look starts several processes
_ENDED = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "PREEMPTED")


class ClusterError(RuntimeError):
    """The cluster did not come up, or refused a job."""


def missing() -> str:
    """Return why a cluster cannot be had here and what to install, or an empty text."""
    reason = lab.missing(_TOOLS)
    if not reason and not any(any(Path("/").glob(pattern[1:])) for pattern in _LIBPMIX):
        reason = "missing Debian packages; apt-get install libpmix-dev"
    return reason


class Cluster:
    """A cluster that is up as long as this object is open."""

    def __init__(self, num_nodes: int = 2) -> None:
        self.nodes = tuple(f"node{number}" for number in range(num_nodes))
        self._lab = lab.Lab(("login", *self.nodes), rate="unlimited")
        self.folder = self._lab.folder
        self._daemons: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Cluster:  # noqa: PYI034 - Self is newer than Python 3.10
        self._configure()
        self._lab.__enter__()
        try:
            self._start_daemons()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the cluster."""
        self._lab.close()
        for daemon in self._daemons:
            daemon.wait()

    def run(
        self, argv: Sequence[str], timeout: float = 60, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the login host, as a user would."""
        command = ["env", f"--chdir={cwd or Path.cwd()}", *argv]
        return run_bounded(self._lab.on("login", command), timeout, self._environment(**(env or {})))

    def submit(self, argv: Sequence[str], cwd: Path, env: Mapping[str, str] | None = None) -> int:
        """Submit a batch job with ``sbatch`` and these arguments, and return its number."""
        done = self.run(["sbatch", "--parsable", *argv], cwd=cwd, env=env)
        if done.returncode:
            raise ClusterError(f"sbatch {shlex.join(argv)}: {done.stderr}")
        return int(done.stdout)

    def wait(self, job: int, timeout: float = 120) -> str:
        """Wait until a job, or each task of an array, has ended, and return its state (``COMPLETED``, ``FAILED``, …).

        `sbatch --wait` would look every 8 s only.
        """
        if not until(lambda: self.state(job) in _ENDED, timeout, _PAUSE_SECONDS):
            state = self.state(job)
            self.run(["scancel", str(job)])
            raise ClusterError(f"job {job} is still {state} after {timeout:g} s\n{self.logs()}")
        return self.state(job)

    def restart(self, *jobs: int) -> None:
        """Start jobs at once that were put back into the queue; SLURM would let them wait for two minutes."""
        if not until(lambda: all(self.state(job) == "PENDING" for job in jobs) and self._is_idle(), 60, _PAUSE_SECONDS):
            raise ClusterError(f"jobs {jobs} are {[*map(self.state, jobs)]}, not back in the queue\n{self.logs()}")
        time.sleep(6.0)  # for a while after their end SLURM revokes their credentials, and ends steps of the same number
        for job in jobs:
            done = self.run(["scontrol", "update", f"jobid={job}", "StartTime=now"])
            if done.returncode:
                raise ClusterError(f"scontrol update of job {job}: {done.stderr}")

    def cancel_all(self) -> None:
        """Cancel every job that has not ended, and wait until the nodes are idle."""
        if self.run(["squeue", "--noheader", "--states=PENDING,RUNNING,SUSPENDED"]).stdout:
            self.run(["scancel", "--user=root"])
            if not until(self._is_idle, 60, _PAUSE_SECONDS):
                raise ClusterError(f"jobs were cancelled, and the nodes are not idle\n{self.logs()}")

    def state(self, job: int) -> str:
        """Return the state of a job now."""
        text = self.run(["scontrol", "show", "job", str(job)]).stdout
        states = re.findall(r"JobState=(\w+)", text)  # of an array several
        return min(states, key=lambda state: state in _ENDED, default="UNKNOWN")

    def logs(self, lines: int = 20) -> str:
        """Return the end of each daemon's log."""
        paths = sorted(self.folder.glob("*.log"))
        return "\n".join(f"== {path.name}\n" + "\n".join(path.read_text().splitlines()[-lines:]) for path in paths)

    def _configure(self) -> None:
        for name in ("state", *(f"{kind}.{node}" for kind in ("spool", "tmp") for node in self.nodes)):
            (self.folder / name).mkdir()
        words = {"folder": self.folder, "nodes": ",".join(self.nodes), "gpus": _NUM_GPUS}
        (self.folder / "slurm.conf").write_text((Path(__file__).parent / "slurm.conf.in").read_text().format(**words))
        # Not gpus: SLURM asks only for character devices whose names end in numbers. These are /dev/null, once more each.
        gpus = [self.folder / f"gpu{number}" for number in range(_NUM_GPUS)]
        for gpu in gpus:
            run_bounded(["mknod", str(gpu), "c", "1", "3"], 10)
        lines = [f"Name=gpu File={self.folder}/gpu[0-{_NUM_GPUS - 1}] Flags=nvidia_gpu_env"]
        (self.folder / "gres.conf").write_text("\n".join(["AutoDetect=off", *lines]) + "\n")
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)

    def _start_daemons(self) -> None:
        files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={self.folder}/munge.{end}" for option, end in files.items()]
        self._daemon("login", ["munged", "--foreground", "--force", *options])
        if not until((self.folder / "munge.socket").exists, 20):
            raise ClusterError(f"munged did not start\n{self.logs()}")
        self._daemon("login", ["slurmctld", "-D"])
        for node in self.nodes:
            self._daemon(node, ["slurmd", "-D", "-N", node])
        if not until(self._is_idle, 40, _PAUSE_SECONDS):
            raise ClusterError(f"the nodes are not idle\n{self.logs()}")

    def _daemon(self, host: str, argv: Sequence[str]) -> None:
        with (self.folder / f"{host}.{argv[0]}.log").open("w") as log:
            self._daemons.append(self._lab.start(host, ["env", f"SLURM_CONF={self.folder}/slurm.conf", *argv], log))

    def _is_idle(self) -> bool:
        idle = self.run(["sinfo", "--noheader", "--Node", "--partition=main", "--states=idle", "--format=%N"])
        return idle.stdout.split() == list(self.nodes)

    def _environment(self, **extra: str) -> dict[str, str]:
        return self._lab.environment(SLURM_CONF=f"{self.folder}/slurm.conf", **extra)
