"""The folders of record files: a private one per user, in it one per job, with a file per rank."""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from mpistrat.launch import environment, process
from mpistrat.watch.record import HEADER, RECORD, State

# records of killed jobs are kept for this long, up to this size, and up to this share of the file system
KEEP_SECONDS, KEEP_BYTES, KEEP_SHARE = 24 * 3600.0, 32 << 20, 1 / 16
RANK = "rank-"
"""How the names of records begin; other files of a job are notices, and what is being written."""


def bases() -> list[Path]:
    """Return the places for the folder of this user, the best one first; it need not exist."""
    places = dict.fromkeys([Path("/dev/shm"), Path(tempfile.gettempdir())])
    return [place / f"mpistrat-{os.getuid()}" for place in places if place.is_dir()]


def make_job(base: Path, job: str) -> Path:
    """Make the folder of a job, unless another rank has, and return it; an OSError if another user can write to it."""
    for folder in (base, base / job):
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        _check_private(folder)
    return base / job


def jobs() -> Iterator[Path]:
    """Yield the folders of this user's jobs, including ended ones."""
    for base in bases():
        with suppress(OSError):
            _check_private(base)
            yield from sorted(path for path in base.iterdir() if path.is_dir() and not path.is_symlink())


def remove(file: Path) -> None:
    """Remove the record of a process; with the last one all else, and the folder unless a rank that starts writes to it."""
    with suppress(OSError):
        file.unlink()
        left = list(file.parent.iterdir())
        if not _records(left):
            for path in left:
                if not path.name.startswith("."):
                    path.unlink()
            file.parent.rmdir()


def mark_killed(pid: int) -> tuple[int, str] | None:
    """Write to its record that a process was killed; return its rank and the name of its job, or None if it has no record."""
    for job in sorted(jobs(), key=lambda job: job.stat().st_mtime, reverse=True):  # pids are reused
        for path in sorted(job.glob(f"{RANK}*")):
            with suppress(OSError, IndexError):
                header = np.fromfile(path, HEADER, 1)[0]
                if header["pid"] == pid and header["state"] == State.RUNNING:
                    np.memmap(path, HEADER, "r+", shape=1)["state"] = State.KILLED
                    return int(header["rank"]), job.name
    return None


def remove_old_jobs(base: Path) -> None:
    """Remove the records of killed jobs: after a day, or when later ones need the room."""
    left = []
    with suppress(OSError):
        for job in base.iterdir():
            with suppress(OSError):
                files = list(job.iterdir())
                if not any(has_owner(path) for path in _records(files)):
                    left.append((job.stat().st_mtime, job, files))
    total, oldest, most = 0, time.time() - KEEP_SECONDS, min(KEEP_BYTES, KEEP_SHARE * shutil.disk_usage(base).total)
    for changed, job, files in sorted(left, reverse=True):
        total += RECORD.itemsize * len(_records(files))
        if changed < oldest or total > most:
            with suppress(OSError):
                for path in files:
                    path.unlink()
                job.rmdir()


def has_owner(path: Path) -> bool:
    """Return whether the process that writes a record exists, or runs in another container, where that cannot be known."""
    try:
        header = np.fromfile(path, HEADER, 1)[0]
        owner = process.find(int(header["pid"]))
        if header["namespace"] != process.pid_namespace():
            # one from before a boot has looked in the future
            return 0 <= time.monotonic_ns() - int(header["looked"]) < KEEP_SECONDS * 1e9
        return owner is not None and owner.started == header["started"]
    except (OSError, IndexError):
        return False


def job_name(environ: Mapping[str, str] | None = None, pid: int | None = None) -> str:
    """Return a name that the ranks of a job on this node find alike, without communication, and no other job has."""
    environ, pid = os.environ if environ is None else environ, os.getpid() if pid is None else pid
    own, launcher = process.find(pid), environment.launcher_of(environ)
    if own is None or launcher is None:
        return _safe(f"process-{pid}-{own.started if own else 0}")
    starter = process.find_launcher(environ, pid)
    if starter is not None and not starter.is_launcher and starter.environment() is None:
        starter = None  # a daemon of another user may start each rank by a process of its own
    step = f"slurm-{environ['SLURM_JOB_ID']}.{environ.get('SLURM_STEP_ID', '')}" if environ.get("SLURM_JOB_ID") else ""
    name = environ.get("PMIX_NAMESPACE") or step or launcher.rank.partition("_")[0].lower()
    return _safe(f"{name}-{starter.pid}-{starter.started}" if starter else name)


def _records(files: Sequence[Path]) -> list[Path]:
    return [path for path in files if path.name.startswith(RANK)]


def _safe(name: str) -> str:
    host = socket.gethostname().partition(".")[0]
    return re.sub(r"[^\w.@+-]", "_", name.replace(f"-{host}-", "-"))[:150]


def _check_private(folder: Path) -> None:
    """Raise OSError unless a path is a folder that only this user can access."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(f"{folder} is not a private folder of this user (mode 0700)")
