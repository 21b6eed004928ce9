"""The record of a rank: a file with a header, a ring buffer of collectives, and two tables of texts that the ring refers to.

`FlightRecorder` writes it; `RankFile` reads it, while the rank runs or after it has ended. Times are nanoseconds of
CLOCK_MONOTONIC, and texts are UTF-8. Each user has a private folder, in it one for each job, with a file for each rank.
"""

from __future__ import annotations

import mmap
import os
import re
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpistrat.launch import environment, process
from mpistrat.launch.environment import MOST_RANKS
from mpistrat.text import parse_spans

MAGIC = int.from_bytes(b"mpistrat", "little")
VERSION = 7

# the ranks of a collective, if their list is too long for an entry of the table
NOT_LISTED, LONGEST_TEXT = "?", 400

Key = tuple[int, int]
"""A collective: its communicator, and its number there."""


class State(IntEnum):
    """The last state that a process has recorded; KILLED is what ``mpistrat run`` writes for one that a signal has ended."""

    RUNNING, ENDED, FAILED, KILLED = 1, 2, 3, 4


# `started`: of the process, in clock ticks since the host booted; `namespace`: of its pid; `looked`: when the watching thread
# last woke; `now_at`, `sampled`: the line at which the main thread was seen last, and when; `threads`: how many make calls;
# `awaited`: whether the main thread waits for what was started, so that the program does not go on meanwhile
_OF_RANK = ("magic", "version", "state", "pid", "started", "namespace", "rank", "size")
_OF_THREADS = ("looked", "now_at", "sampled", "threads", "awaited")
_TEXTS = {"node": "S256", "host": "S256", "program": "S1024", "activity": "S512"}
HEADER = np.dtype([*((name, "u8") for name in (*_OF_RANK, *_OF_THREADS)), *_TEXTS.items()])
RING = np.dtype([(name, "u8") for name in ("number", "communicator", "text", "line", "entered", "left")])
# an entry that overwrites another one gets a new index, so that references to the old one are recognised as stale
_ENTRY = [("index", "u8"), ("first", "u8"), ("second", "u8")]
CALLS, LINES = np.dtype([*_ENTRY, ("text", "S1000")]), np.dtype([*_ENTRY, ("text", "S232")])
RING_RECORDS = 4096
RECORD = np.dtype([("header", HEADER), ("ring", RING, RING_RECORDS), ("calls", CALLS, 256), ("lines", LINES, 512)])
"""The file."""

# in `left`: the collective raised. In `line`: it is asynchronous, and the program goes on meanwhile
FAILED_BIT = STARTED_BIT = 1 << 63

OVERWRITTEN = "(its description was overwritten)"


def write_text(table: NDArray[Any], index: int, text: bytes, first: int = 0, second: int = 0) -> None:
    """Write a text of a table, cut to its length, and two numbers; its index is 0 until it is complete."""
    entry = table[index % len(table)]
    entry["index"] = 0
    entry["first"], entry["second"], entry["text"] = first, second, text
    entry["index"] = index


def read_text(table: NDArray[Any], index: int) -> tuple[str, int, int] | None:
    """Return a text of a table and its numbers; None if it was overwritten."""
    entry = table[index % len(table)]
    found, first, second, text = entry.item()
    if not index or found != index or entry["index"] != index:
        return None
    return text.decode(errors="replace"), first, second


@dataclass(frozen=True)
class RecordedCall:
    """A collective that a rank has entered, as its record shows it."""

    communicator: int
    number: int
    text: str  # the call with its arguments; a long one is cut
    digest: int  # of the whole text; 0 if it was overwritten
    line: str  # the user's, `path:line (function)`, or empty
    entered: int  # on the clock of its host: distinguishes two entries of the same collective
    entered_seconds_ago: float  # before the record was read
    left_seconds_ago: float | None  # likewise; None while the rank is inside
    has_failed: bool = False
    is_started: bool = False  # it is asynchronous, so that the program goes on meanwhile
    ranks: str = ""  # that take part; empty for all, NOT_LISTED if the list is too long: then no rank counts as missing
    nbytes: int = 0  # that the rank passes

    def takes(self, rank: int) -> bool:
        """Return whether a rank of the job takes part."""
        return not self.ranks or rank in _members(self.ranks)

    @property
    def key(self) -> Key:
        return self.communicator, self.number

    @property
    def place(self) -> str:
        """Its text and the user's line."""
        return self.text + (f" at {self.line}" if self.line else "")


class RankFile:
    """The record of a rank, read from its bytes; a ValueError if they are no record, of another version, or damaged."""

    def __init__(self, memory: memoryview) -> None:
        if len(memory) < RECORD.itemsize:
            raise ValueError(_NO_RECORD)
        self._record: NDArray[Any] = np.ndarray((), RECORD, memory)
        self._header: NDArray[Any] = self._record["header"]
        self._ring: NDArray[Any] = self._record["ring"]
        if self._header["magic"] != MAGIC or self._header["version"] != VERSION:
            raise ValueError(_NO_RECORD)
        if not self.rank < self.size <= MOST_RANKS or int(self._header["state"]) not in {*State}:
            raise ValueError(f"a damaged record: rank {self.rank} of {self.size}, state {self._header['state']}")

    @classmethod
    def open(cls, path: Path) -> RankFile:
        """Map a file; reads return its present contents. Raise OSError or ValueError if it is no record file."""
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            return cls(memoryview(mmap.mmap(descriptor, RECORD.itemsize, prot=mmap.PROT_READ)))
        finally:
            os.close(descriptor)

    @property
    def rank(self) -> int:
        return int(self._header["rank"])

    @property
    def size(self) -> int:
        return int(self._header["size"])

    @property
    def pid(self) -> int:
        return int(self._header["pid"])

    @property
    def state(self) -> State:
        return State(int(self._header["state"]))

    def word(self, name: str) -> int:
        """Return a word of its header, such as ``looked`` or ``threads``."""
        return int(self._header[name])

    @property
    def now_at(self) -> tuple[str, int]:
        """The line at which its main thread was seen last, and when; empty if never."""
        return self._line(int(self._header["now_at"])), int(self._header["sampled"])

    def text(self, name: str) -> str:
        """Return its ``node``, ``host``, ``program`` or ``activity``."""
        found: bytes = self._header[name].item()
        return found.decode(errors="replace")

    def process(self) -> process.Process | None:
        """Return its process; None if that has exited. Raise LookupError if it runs in another container."""
        return _owner(self._header)

    def last(self) -> RecordedCall | None:
        """Return the collective that it has entered last; None before the first."""
        newest = int(self._ring["entered"].argmax())
        return self._call(newest, time.monotonic_ns()) if self._ring["entered"][newest] else None

    def inside(self) -> list[RecordedCall]:
        """Return the collectives that it is inside, the last one first."""
        # a slot that is being reused still has `left` of the collective before
        return self._calls(self._ring["entered"] > self._ring["left"] & np.uint64(FAILED_BIT - 1))

    def calls(self) -> list[RecordedCall]:
        """Return all collectives that are still recorded, the last one first."""
        return self._calls(self._ring["entered"] > 0)

    def find(self, key: Key) -> list[RecordedCall]:
        """Return the call of a collective and those refused before it, the last one first; [] if all are overwritten."""
        ring, (communicator, number) = self._ring, key
        return self._calls((ring["number"] == number) & (ring["communicator"] == communicator) & (ring["entered"] > 0))

    def _calls(self, chosen: NDArray[np.bool_]) -> list[RecordedCall]:
        now = time.monotonic_ns()
        return sorted((self._call(row, now) for row in np.flatnonzero(chosen).tolist()), key=lambda call: -call.entered)

    def _call(self, row: int, now: int) -> RecordedCall:
        number, communicator, index, line, entered, left = self._ring[row].item()
        has_failed, left = bool(left & FAILED_BIT), left & ~FAILED_BIT
        has_left = left >= entered
        description, nbytes, digest = read_text(self._record["calls"], index) or (f"\0{OVERWRITTEN}", 0, 0)
        ranks, _, text = description.partition("\0")
        return RecordedCall(
            communicator,
            number,
            text,
            digest,
            self._line(line & ~STARTED_BIT),
            entered,
            (now - entered) / 1e9,
            (now - left) / 1e9 if has_left else None,
            has_failed and has_left,
            bool(line & STARTED_BIT) and (has_left or not self._header["awaited"]),
            ranks,
            nbytes,
        )

    def _line(self, index: int) -> str:
        found = read_text(self._record["lines"], index)
        return found[0] if found else ""


_NO_RECORD = f"not the record of a rank by mpistrat, version {VERSION} of the format"


def seconds_since(moment: int) -> float:
    """Return how many seconds ago something was, from nanoseconds of CLOCK_MONOTONIC."""
    return max(0.0, (time.monotonic_ns() - moment) / 1e9)


@lru_cache(256)
def _members(ranks: str) -> frozenset[int]:
    """Return the ranks of a text; none if they are not listed, or the record is damaged."""
    try:
        spans = [] if ranks == NOT_LISTED else parse_spans(ranks)
    except ValueError:
        return frozenset()
    return frozenset().union(*spans) if all(span.stop <= MOST_RANKS for span in spans) else frozenset()


# records of killed jobs are kept for this long, up to this size, and up to this share of the file system
KEEP_SECONDS, KEEP_BYTES, KEEP_SHARE = 24 * 3600.0, 32 << 20, 1 / 16
RANK_PREFIX = "rank-"
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


def job_folders() -> list[Path]:
    """Return the folders of this user's jobs, including ended ones; first that in which a rank has begun to record last."""
    found = list[tuple[int, Path]]()
    for base in bases():
        with suppress(OSError):
            _check_private(base)
            for path in base.iterdir():
                with suppress(FileNotFoundError):  # it has just ended
                    if stat.S_ISDIR((status := path.lstat()).st_mode):
                        found.append((status.st_mtime_ns, path))
    return [path for _, path in sorted(found, reverse=True)]


def files_of(job: Path, prefix: str) -> list[Path]:
    """Return the files in the folder of a job whose names begin so; none if that is gone, or goes now: `glob` would raise."""
    with suppress(OSError):
        return sorted(job.glob(f"{prefix}*"))
    return []


def remove_record(file: Path) -> None:
    """Remove the record of a process that has ended, once no other one of the job runs here: they see that it will not come.

    With it those of others that have ended, and with the last one all else, and the folder unless a rank that starts writes to
    it.
    """
    with suppress(OSError, IndexError):  # where one is damaged, all go with those of killed jobs
        others = [path for path in _records([*file.parent.iterdir()]) if path != file]
        states = {path: np.fromfile(path, HEADER, 1)[0]["state"] for path in others}
        if any(state == State.RUNNING and has_owner(path) for path, state in states.items()):
            return
        for path in (file, *(path for path, state in states.items() if state == State.ENDED)):
            path.unlink(missing_ok=True)
        left = list(file.parent.iterdir())
        if not _records(left):
            for path in left:
                if not path.name.startswith("."):
                    path.unlink()
            file.parent.rmdir()


def mark_killed(pid: int) -> tuple[int, str] | None:
    """Write to its record that a process was killed; return its rank and the name of its job, or None if it has no record."""
    for job in job_folders():  # the last first: pids are reused
        for path in files_of(job, RANK_PREFIX):
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
        header = np.fromfile(path, HEADER, 1)[0]  # that of another version begins alike, and its job may be running
        return _owner(header) is not None
    except (OSError, IndexError):
        return False
    except LookupError:  # one from before a boot has looked in the future
        return 0 <= time.monotonic_ns() - int(header["looked"]) < KEEP_SECONDS * 1e9


def _owner(header: NDArray[Any]) -> process.Process | None:
    """Return the process that writes a record; None if it has exited. Raise LookupError if it runs in another container."""
    if int(header["namespace"]) != process.pid_namespace():
        raise LookupError(f"process {header['pid']} is in another container")
    found = process.find(int(header["pid"]))
    return found if found is not None and found.started == int(header["started"]) else None


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
    return [path for path in files if path.name.startswith(RANK_PREFIX)]


def _safe(name: str) -> str:
    host = socket.gethostname().partition(".")[0]
    return re.sub(r"[^\w.@+-]", "_", name.replace(f"-{host}-", "-"))[:150]


def _check_private(folder: Path) -> None:
    """Raise OSError unless a path is a folder that only this user can access."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(f"{folder} is not a private folder of this user (mode 0700)")
