"""FlightRecorder: the last collectives of this process, in a file that other processes can read, even after it was killed.

Invariant: nothing here communicates, and `enter` and `leave` together take half a microsecond.
"""

from __future__ import annotations

import gc
import mmap
import os
import site
import socket
import struct
import sys
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import blake2b
from itertools import count, cycle
from pathlib import Path
from time import monotonic_ns
from types import CodeType, FrameType
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from mpistrat import ending
from mpistrat.launch import abort, environment, process
from mpistrat.watch.record import (
    FAILED_BIT,
    HEADER,
    LINES,
    MAGIC,
    NOT_LISTED,
    RANK_PREFIX,
    RECORD,
    RING,
    RING_RECORDS,
    STARTED_BIT,
    VERSION,
    State,
    bases,
    has_owner,
    job_name,
    make_job,
    remove_old_jobs,
    remove_record,
    write_text,
)

_MOST_PLACES = 16_384
write_entry = struct.Struct("=5Q").pack_into
_frame_at = sys._getframe

_NO_COMMUNICATOR = 1 << 63  # begins the numbers of what no communicator counts; those of communicators are lower
_numbers: defaultdict[tuple[str, str], Iterator[int]] = defaultdict(count)

# standard-library modules that may lie on the stack between the program and this library
_BETWEEN = ("threading", "contextlib")

_lock = threading.Lock()
_recorder: FlightRecorder | None = None
_is_collection_paused = False


class FlightRecorder:
    """Records the collectives that this process enters and leaves, in a file or, without a path, in memory of this process.

    One per process: see `recorder`. What `enter` and `leave` do is also written out in `communicator.passing` and
    `Communicator.run_known`.
    """

    def __init__(self, path: Path | None, rank: int = 0, size: int = 1) -> None:
        self.path = path
        self.memory = memoryview(_anonymous() if path is None else _mapped(path))
        # of each record of the ring the offset in bytes, and the index of its last word, `left`
        starts = range(HEADER.itemsize, HEADER.itemsize + RING_RECORDS * RING.itemsize, RING.itemsize)
        self.slots = cycle([(start, (start + RING.itemsize) // 8 - 1) for start in starts])
        self._map()
        self._calls = _Interned(self._record["calls"], self._forget_call)
        self._lines = _Interned(self._record["lines"], self._forget_line)
        # by the ranks that make a call and its digest, the index of its description
        self.indexes: defaultdict[str, dict[int, int]] = defaultdict(dict)
        # (id of the code, instruction) -> index of the line, 0 inside this library; codes are kept, so that ids stay unique
        self.places: dict[tuple[int, int], int] = {}
        self._codes: dict[int, CodeType] = {}
        # another object once somebody may have kept the index of what was overwritten, or of a call that is forgotten
        self.outdated = object()
        self._threads: dict[object, threading.Thread] = {}
        self._introduce(rank, size)

    def intern(self, text: str, nbytes: int = 0, call_digest: int | None = None, ranks: str = "") -> int:
        """Return the index of the description of a call, written unless it is among the 256 in the file.

        Text and digest are the same on all ranks; `ranks`, empty for all, are those that take part, as `spans_text` writes.
        """
        digest = hash_of(text) if call_digest is None else call_digest
        index = self.indexes[ranks][digest] = self._calls.index((ranks, digest), f"{ranks}\0{text}", nbytes, digest)
        return index

    def enter(self, communicator: int, number: int, index: int, started_at: int | None = None) -> int:
        """Record that a collective is entered, and return its slot for `leave` or `fail`, one of which must follow.

        An asynchronous one was `started_at` a line of the program.
        """
        line = self.find_line(_frame_at(1)) if started_at is None else started_at | STARTED_BIT
        start, slot = next(self.slots)
        write_entry(self.memory, start, number, communicator, index, line, monotonic_ns())
        return slot

    def leave(self, slot: int) -> None:
        """Record that the collective of a slot has returned."""
        self.words[slot] = monotonic_ns()

    def fail(self, slot: int) -> None:
        """Record that the collective of a slot has raised."""
        self.words[slot] = monotonic_ns() | FAILED_BIT

    def note(self, **words: object) -> None:
        """Record words and texts of the header, such as the `state` of this process."""
        for name, value in words.items():
            self._header[name] = _encoded(value) if isinstance(value, str) else value

    def note_look(self, frame: FrameType | None) -> None:
        """Record that the watching thread is awake, and the line of a `frame` of the main thread."""
        now = monotonic_ns()
        if frame is not None:
            self._header["now_at"], self._header["sampled"] = self._lines_of(frame), now
        self._header["looked"] = now
        self._count_threads()  # some may have ended

    def note_thread(self, caller: object) -> None:
        """Record that the current thread makes the calls of a `caller` from now on."""
        self._threads[caller] = threading.current_thread()
        self._count_threads()

    def forget_thread(self, caller: object) -> None:
        """Record that a caller makes no more calls."""
        self._threads.pop(caller, None)
        self._count_threads()

    def _count_threads(self) -> None:
        self._header["threads"] = len({thread for thread in list(self._threads.values()) if thread.is_alive()})

    def close(self) -> None:
        """Record that this program has ended, and remove the file once those of the other ranks here have."""
        if self.path is not None:
            self.note(state=State.ENDED)
            remove_record(self.path)
            self.path = None

    def leave_to_parent(self) -> None:
        """Record in memory from now on: this is a forked child, and the file is its parent's."""
        self.path = None
        memory = memoryview(_anonymous())
        memory[:] = self.memory
        self.memory = memory
        self._map()
        self._calls.leave_to_parent(self._record["calls"])
        self._lines.leave_to_parent(self._record["lines"])

    def _map(self) -> None:
        self.words = self.memory.cast("Q")
        self._record: NDArray[Any] = np.ndarray((), RECORD, self.memory)
        self._header: NDArray[Any] = self._record["header"]

    def _introduce(self, rank: int, size: int) -> None:
        own, host, header = process.find(os.getpid()), socket.gethostname(), self._header
        header["version"], header["pid"], header["started"] = VERSION, os.getpid(), own.started if own else 0
        header["namespace"] = process.pid_namespace()
        self.note(node=host, host=host, program=" ".join(sys.argv) or sys.executable)
        self.note(rank=rank, size=size, state=State.RUNNING)
        header["magic"] = MAGIC  # written last: where it is, the header is complete

    def find_line(self, frame: FrameType | None) -> int:
        """Return the index of the line of the first frame outside this library, which makes the call; 0 if there is none.

        Each frame of this library that is skipped costs a tenth of a microsecond.
        """
        while frame is not None:
            place = (id(frame.f_code), frame.f_lasti)
            line = self.places.get(place)
            if line is None:
                line = 0 if _is_ours(frame) else self._lines_of(frame)
                self._remember(place, frame.f_code, line)
            if line:
                return line
            frame = frame.f_back
        return 0

    def _lines_of(self, frame: FrameType) -> int:
        text = f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
        return self._lines.index(text, _end_of(text, LINES["text"].itemsize))

    def _forget_call(self, key: Any) -> None:
        ranks, digest = key
        self.indexes[ranks].pop(digest, None)
        self.outdated = object()

    def _forget_line(self, _: object) -> None:
        self.places.clear()
        self.outdated = object()

    def _remember(self, place: tuple[int, int], code: CodeType, line: int) -> None:
        if max(len(self.places), len(self._codes)) >= _MOST_PLACES:
            self.places.clear()
            self._codes.clear()
        self.places[place] = line
        self._codes[id(code)] = code


class _Interned:
    """The texts in a table, of which the one that was asked for least recently is overwritten: `forget` is told its key."""

    def __init__(self, table: NDArray[Any], forget: Callable[[Any], None]) -> None:
        self._table, self._lock, self._forget = table, threading.Lock(), forget
        self._known: OrderedDict[object, int] = OrderedDict()

    def leave_to_parent(self, table: NDArray[Any]) -> None:
        """Write to another table, and wait for no lock that a thread of the parent held when it was forked."""
        self._table, self._lock = table, threading.Lock()

    def index(self, key: object, text: str, first: int = 0, second: int = 0) -> int:
        """Return the index of a text."""
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
                return known
            # index 0 means none
            index, entries = len(self._known) + len(self._table), len(self._table)
            if len(self._known) == entries:
                oldest, index = self._known.popitem(last=False)
                index += entries
                self._forget(oldest)
            write_text(self._table, index, _encoded(text), first, second)
            self._known[key] = index
            return index


def recorder() -> FlightRecorder:
    """Return the recorder of this process, which is made on first use, even without a launcher."""
    global _recorder
    if _recorder is None:
        with _lock:
            if _recorder is None:
                _recorder = _make()
    return _recorder


@contextmanager
def watched(text: str, members: str = "", among: str = "") -> Iterator[None]:
    """Record a collective that no communicator makes, such as creating a strategy; `members` are its ranks, empty for all.

    It is counted `among` others that these ranks make in one order. A rank that leaves them, because it has given one up, is
    out of step with its peers there; with a name of their own, it is not elsewhere.
    """
    if members == NOT_LISTED:
        yield
        return
    mine = recorder()
    communicator = _NO_COMMUNICATOR | crc32(f"{members} {among}".encode()) if members or among else 0
    index = mine.intern(text, ranks=members)
    caller = object()
    mine.note_thread(caller)
    slot = mine.enter(communicator, next(_numbers[members, among]), index)
    try:
        yield
    except BaseException:
        mine.fail(slot)
        raise
    finally:
        mine.forget_thread(caller)
    mine.leave(slot)


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause the garbage collector while frames of another thread are looked at.

    Before Python 3.12 that may collect garbage, and a finalizer may let the other thread go on, whose frame is gone then.
    """
    global _is_collection_paused
    if sys.version_info < (3, 12) and gc.isenabled():
        _is_collection_paused = True
        gc.disable()
        try:
            yield
        finally:
            gc.enable()
            _is_collection_paused = False
    else:
        yield


def innermost(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the user's program; if everything is installed, the innermost that is not ours."""
    other = None
    while frame is not None:
        if not _is_ours(frame):
            if not _is_installed(frame.f_code.co_filename):
                return frame
            other = other or frame
        frame = frame.f_back
    return other


def _end_of(text: str, room: int) -> str:
    """Return a text cut at its beginning to at most `room` bytes: the end of a path is what identifies a file."""
    cut = _encoded(text)
    if len(cut) <= room:
        return text
    return "…" + cut[len("…".encode()) - room :].decode("utf-8", "ignore")


def hash_of(text: str) -> int:
    """Return a hash of a text, of 8 bytes."""
    return int.from_bytes(blake2b(_encoded(text), digest_size=8).digest(), "little")


def _make() -> FlightRecorder:
    os.register_at_fork(after_in_child=_after_fork)
    rank, size = environment.promised_place()
    for base in bases():
        with suppress(OSError):
            path = make_job(base, job_name()) / f"{RANK_PREFIX}{rank}"
            remove_old_jobs(base)
            # where a running process has it, a rank has started this one, with its variables
            return FlightRecorder(None if has_owner(path) else path, rank, size)
    return FlightRecorder(None)


def _close_at_exit() -> None:
    """Remove the file of a program that has succeeded; what a failed one did last is kept."""
    if _recorder is not None and abort.ending_code() == 0:
        _recorder.close()


ending.at(ending.Stage.CLOSE, _close_at_exit)


def _after_fork() -> None:
    global _is_collection_paused
    if _is_collection_paused:  # by a thread that the child does not have
        gc.enable()
        _is_collection_paused = False
    if _recorder is not None:
        _recorder.leave_to_parent()


def _anonymous() -> mmap.mmap:
    return mmap.mmap(-1, RECORD.itemsize)


def _mapped(path: Path) -> mmap.mmap:
    """Make a file, replacing an existing one, and map it."""
    new = path.with_name(f".new-{os.getpid()}")
    descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, RECORD.itemsize)  # a write to a mapped page without room would kill the process
        mapped = mmap.mmap(descriptor, RECORD.itemsize)
        new.replace(path)
    except OSError:
        new.unlink()
        raise
    finally:
        os.close(descriptor)
    return mapped


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")


def _is_ours(frame: FrameType) -> bool:
    """Return whether a frame belongs to this library; its commands count as programs that use it."""
    name = str(frame.f_globals.get("__name__", ""))
    return name in _BETWEEN or (name.partition(".")[0] == "mpistrat" and not name.startswith("mpistrat.tools."))


@cache
def _is_installed(filename: str) -> bool:
    folders = Path(os.__file__).parent, *site.getsitepackages()
    return filename.startswith(("<frozen", *(f"{folder}/" for folder in folders)))
