"""FlightRecorder: the last collectives of this process, in a file that other processes can read, even after it was killed.

File law: nothing here communicates, and `enter` and `leave` together take half a microsecond.
"""

from __future__ import annotations

import atexit
import mmap
import os
import socket
import struct
import sys
import threading
from collections import OrderedDict
from contextlib import suppress
from hashlib import blake2b
from itertools import cycle
from pathlib import Path
from time import monotonic_ns
from types import CodeType, FrameType

from mpistrat.errors import LaunchError
from mpistrat.launch import environment, exit_code, process
from mpistrat.watch import folder, users
from mpistrat.watch.file_layout import (
    CALLS,
    FAILED_BIT,
    FILE_BYTES,
    LINES,
    MAGIC,
    RING_RECORDS,
    RING_START,
    STARTED_BIT,
    TEXTS,
    VERSION,
    WORDS,
    Field,
    State,
    Table,
)

__all__ = ["FlightRecorder", "digest", "encoded_activity", "recorder"]

_MOST_PLACES = 16_384
_ACTIVITY = TEXTS["activity"][0]
_write_entry = struct.Struct("=5Q").pack_into
_frame_at = sys._getframe

_lock = threading.Lock()
_recorder: FlightRecorder | None = None


class FlightRecorder:
    """Records the collectives that this process enters and leaves. One per process: see `recorder`.

    Parameters
    ----------
    path : Path or None
        The file to make; None keeps the record in memory of this process.
    rank, size : int
        The rank of this process, and the number of ranks.

    Attributes
    ----------
    path : Path or None
        The path of the file.
    memory : memoryview
        Its bytes.
    """

    def __init__(self, path: Path | None, rank: int = 0, size: int = 1) -> None:
        self.path = path
        self.memory = memoryview(_anonymous() if path is None else _mapped(path))
        self._words = self.memory.cast("Q")
        # of each record the offset in bytes, and the index of its word `left`
        starts = range(RING_START, RING_START + RING_RECORDS * WORDS * 8, WORDS * 8)
        self._slots = cycle([(start, start // 8 + WORDS - 1) for start in starts])
        self._calls = _Interned(CALLS, self.memory)
        self._lines = _Interned(LINES, self.memory)
        # (id of the code, instruction) -> index of the line, 0 inside this library; codes are kept, so that ids stay unique
        self._places: dict[tuple[int, int], int] = {}
        self._codes: dict[int, CodeType] = {}
        self._introduce(rank, size)

    def intern(
        self, verb: str, op: str, dtype: str, nbytes: int, plan: str, text: str, call_digest: int | None = None, ranks: str = ""
    ) -> int:
        """Return the index of the description of a call, written unless it is among the 256 in the file.

        Parameters
        ----------
        verb, op, dtype, plan : str
            The collective, and its arguments; empty if it has none such.
        nbytes : int
            Bytes that this rank passes.
        text : str
            The call with its arguments, the same on all ranks.
        call_digest : int, optional
            Hash of the call, the same on all ranks; by default that of the text.
        ranks : str
            The ranks of the job that take part, as `spans_text` writes them; empty for all.
        """
        key = "\0".join((verb, op, dtype, plan, ranks, text))
        call_digest = digest(text) if call_digest is None else call_digest
        return self._calls.index((key, nbytes, call_digest), key, nbytes, call_digest)

    def line(self, depth: int = 1) -> int:
        """Return the index of the line of the user's program that makes this call.

        Parameters
        ----------
        depth : int
            The first frame to look at: 1 is the caller, 2 the caller's caller; frames of this library are skipped.
        """
        return self._find_line(_frame_at(depth))

    def enter(self, communicator: int, number: int, index: int, depth: int = 1) -> int:
        """Record that a collective is entered, and return its slot for `leave` or `fail`, one of which must follow.

        Parameters
        ----------
        communicator : int
            Number of the communicator, the same on all ranks.
        number : int
            Number of the collective on this communicator, the same on all ranks.
        index : int
            What `intern` returned for the call.
        depth : int
            The first frame to look at for the user's line: 1 is the caller; frames of this library are skipped, each of which
            costs a tenth of a microsecond.
        """
        frame = _frame_at(depth)
        line = self._places.get((id(frame.f_code), frame.f_lasti)) or self._find_line(frame)
        start, slot = next(self._slots)
        _write_entry(self.memory, start, number, communicator, index, line, monotonic_ns())
        return slot

    def enter_started(self, communicator: int, number: int, index: int, line: int) -> int:
        """Record that an asynchronous collective begins; `line` is where the program started it."""
        start, slot = next(self._slots)
        _write_entry(self.memory, start, number, communicator, index, line | STARTED_BIT, monotonic_ns())
        return slot

    def leave(self, slot: int) -> None:
        """Record that the collective of a slot has returned."""
        self._words[slot] = monotonic_ns()

    def fail(self, slot: int) -> None:
        """Record that the collective of a slot has raised."""
        self._words[slot] = monotonic_ns() | FAILED_BIT

    def set_node(self, name: str) -> None:
        """Record the name of this rank's node."""
        _write_text(self.memory, "node", name)

    def set_place(self, rank: int, size: int) -> None:
        """Record rank and size, as MPI gives them."""
        self._put(Field.SIZE, size)
        self._put(Field.RANK, rank)

    def set_state(self, state: State) -> None:
        """Record the state of this process."""
        self._put(Field.STATE, state)

    def set_activity(self, activity: bytes) -> None:
        """Record what this process is doing beside collectives, as `encoded_activity` returns it."""
        self.memory[_ACTIVITY : _ACTIVITY + len(activity)] = activity

    def note_look(self, frame: FrameType | None) -> None:
        """Record that the watching thread is awake, and the line of a `frame` of the main thread."""
        now = monotonic_ns()
        if frame is not None:
            self._put(Field.NOW_AT, self._lines_of(frame))
            self._put(Field.SAMPLED, now)
        self._put(Field.LOOKED, now)

    def close(self) -> None:
        """Remove the file, and the folder of the job with the last one; later records cannot be read by other processes."""
        if self.path is not None:
            folder.remove(self.path)
            self.path = None

    def leave_to_parent(self) -> None:
        """Record in memory from now on: this is a forked child, and the file is its parent's."""
        self.path = None
        memory = memoryview(_anonymous())
        memory[:] = self.memory
        self.memory = self._calls.memory = self._lines.memory = memory
        self._words = memory.cast("Q")

    def _introduce(self, rank: int, size: int) -> None:
        own = process.find(os.getpid())
        self._put(Field.VERSION, VERSION)
        self._put(Field.PID, os.getpid())
        self._put(Field.STARTED, own.started if own else 0)
        self._put(Field.NAMESPACE, process.pid_namespace())
        self.set_place(rank, size)
        host = socket.gethostname()
        for name, text in (("node", host), ("host", host), ("program", " ".join(sys.argv) or sys.executable)):
            _write_text(self.memory, name, text)
        self.set_state(State.RUNNING)
        self._put(Field.MAGIC, MAGIC)  # written last: where it is, the header is complete

    def _put(self, field: Field, value: int) -> None:
        self._words[field] = value

    def _find_line(self, frame: FrameType | None) -> int:
        """Return the index of the line of the first frame outside this library; 0 if there is none."""
        while frame is not None:
            place = (id(frame.f_code), frame.f_lasti)
            line = self._places.get(place)
            if line is None:
                line = 0 if users.is_ours(frame) else self._lines_of(frame)
                self._remember(place, frame.f_code, line)
            if line:
                return line
            frame = frame.f_back
        return 0

    def _lines_of(self, frame: FrameType) -> int:
        text = f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
        return self._lines.index(text, _end_of(text, LINES.text_bytes))

    def _remember(self, place: tuple[int, int], code: CodeType, line: int) -> None:
        if len(self._places) >= _MOST_PLACES or self._lines.has_overwritten:
            self._places.clear()
            self._codes.clear()
            self._lines.has_overwritten = False
        self._places[place] = line
        self._codes[id(code)] = code


class _Interned:
    """The texts in a table, of which the least recently used one is overwritten."""

    def __init__(self, table: Table, memory: memoryview) -> None:
        self._table, self.memory = table, memory
        self._known: OrderedDict[object, int] = OrderedDict()
        self._lock = threading.Lock()
        self.has_overwritten = False

    def index(self, key: object, text: str, first: int = 0, second: int = 0) -> int:
        """Return the index of a text."""
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
                return known
            # index 0 means none
            index = len(self._known) + self._table.entries
            if len(self._known) == self._table.entries:
                index = self._known.popitem(last=False)[1] + self._table.entries
                self.has_overwritten = True
            self._table.write(self.memory, index, text.encode("utf-8", "backslashreplace"), first, second)
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


def _end_of(text: str, room: int) -> str:
    """Return a text cut at its beginning to at most `room` bytes: the end of a path is what identifies a file."""
    encoded = text.encode("utf-8", "backslashreplace")
    if len(encoded) <= room:
        return text
    return "…" + encoded[len("…".encode()) - room :].decode("utf-8", "ignore")


def encoded_activity(text: str) -> bytes:
    """Return the bytes that `FlightRecorder.set_activity` writes; an empty text clears the activity."""
    return _encoded("activity", text)


def digest(text: str) -> int:
    """Return a hash of a text, of 8 bytes."""
    return int.from_bytes(blake2b(text.encode("utf-8", "backslashreplace"), digest_size=8).digest(), "little")


def _make() -> FlightRecorder:
    os.register_at_fork(after_in_child=_after_fork)
    atexit.register(_close_at_exit)
    with suppress(LaunchError):
        view = environment.detect()
        rank, size = (view.rank or 0, view.size or 1) if view else (0, 1)
        job = folder.job_name()
        for base in folder.bases():
            with suppress(OSError):
                place = folder.make_job(base, job)
                folder.remove_old_jobs(base)
                return FlightRecorder(_free(place / f"rank-{rank}"), rank, size)
    return FlightRecorder(None)


def _free(path: Path) -> Path:
    """Return a path, or another one if a running process has it: then a rank has started this process, with its variables."""
    return path.with_name(f"process-{os.getpid()}") if folder.has_owner(path) else path


def _close_at_exit() -> None:
    """Remove the file of a program that has succeeded; what a failed one did last is kept."""
    if _recorder is not None and exit_code.ending_code() == 0:
        _recorder.close()


def _after_fork() -> None:
    if _recorder is not None:
        _recorder.leave_to_parent()


def _anonymous() -> mmap.mmap:
    return mmap.mmap(-1, FILE_BYTES)


def _mapped(path: Path) -> mmap.mmap:
    """Make a file, replacing an existing one, and map it.

    Raises
    ------
    OSError
        If the file system has no room for it: a write to a mapped page without room would kill the process.
    """
    new = path.with_name(f".new-{os.getpid()}")
    descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, FILE_BYTES)
        mapped = mmap.mmap(descriptor, FILE_BYTES)
        new.replace(path)
    except OSError:
        new.unlink()
        raise
    finally:
        os.close(descriptor)
    return mapped


def _write_text(memory: memoryview, name: str, text: str) -> None:
    start, _ = TEXTS[name]
    encoded = _encoded(name, text)
    memory[start : start + len(encoded)] = encoded


def _encoded(name: str, text: str) -> bytes:
    """Return a text as it stands in the header: its length, then UTF-8."""
    encoded = text.encode("utf-8", "backslashreplace")[: TEXTS[name][1] - 8]
    return len(encoded).to_bytes(8, sys.byteorder) + encoded
