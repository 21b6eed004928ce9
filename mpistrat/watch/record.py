"""The record of a rank: a file with a header, a ring buffer of collectives, and two tables of texts that the ring refers to.

`FlightRecorder` writes it; `RankFile` reads it, while the rank runs or after it has ended. All numbers are unsigned words of 8
bytes in the byte order of this host; times are nanoseconds of CLOCK_MONOTONIC. A text is its length, then UTF-8.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import time
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mpistrat.launch import process
from mpistrat.launch.environment import MOST_RANKS
from mpistrat.text import parse_spans

MAGIC = int.from_bytes(b"mpistrat", "little")
VERSION = 4

# the ranks of a collective, if their list is too long for an entry of the table
NOT_LISTED, LONGEST_TEXT = "?", 400

Key = tuple[int, int]
"""A collective: its communicator, and its number there."""


class State(IntEnum):
    """The last state that a process has recorded; KILLED is what ``mpistrat run`` writes for one that a signal has ended."""

    RUNNING, ENDED, FAILED, KILLED = 1, 2, 3, 4


class Field(IntEnum):
    """The words of the header."""

    MAGIC = 0
    VERSION = 1
    STATE = 2
    PID = 3
    STARTED = 4  # start time of the process, in clock ticks since the host booted
    NAMESPACE = 5  # the namespace of that pid
    RANK = 6
    SIZE = 7
    LOOKED = 8  # when the watching thread last woke
    NOW_AT = 9  # the line at which the main thread was seen last,
    SAMPLED = 10  # and when


# name -> offset of its text in the header, and its room in bytes
TEXTS = {"node": (256, 256), "host": (512, 256), "program": (768, 1024), "activity": (1792, 512)}

# number, communicator, description, line, entered, left
WORDS, LINE_WORD = 6, 3
RING_START, RING_RECORDS = 4096, 4096

# in `left`: the collective raised. In `line`: it is asynchronous, and the program goes on meanwhile
FAILED_BIT = STARTED_BIT = 1 << 63

OVERWRITTEN = "(its description was overwritten)"


class Table:
    """A ring of texts: an entry is its index, two numbers, and a text.

    An entry that overwrites another one gets a new index, so that references to the old one are recognised as stale.
    """

    head = struct.Struct("=QQQI")

    def __init__(self, start: int, entries: int, entry_bytes: int) -> None:
        self.start, self.entries, self.entry_bytes = start, entries, entry_bytes
        self.text_bytes = entry_bytes - self.head.size
        self.end = start + entries * entry_bytes

    def write(self, memory: memoryview, index: int, text: bytes, first: int = 0, second: int = 0) -> None:
        """Write an entry; its index is 0 until it is complete."""
        offset, text = self._offset(index), text[: self.text_bytes]
        self.head.pack_into(memory, offset, 0, 0, 0, 0)
        begin = offset + self.head.size
        memory[begin : begin + len(text)] = text
        self.head.pack_into(memory, offset, index, first, second, len(text))

    def read(self, memory: memoryview, index: int) -> tuple[str, int, int] | None:
        """Return the text and the numbers of an entry; None if it was overwritten."""
        offset = self._offset(index)
        found, first, second, length = self.head.unpack_from(memory, offset)
        begin = offset + self.head.size
        text = bytes(memory[begin : begin + min(length, self.text_bytes)])
        if found != index or not index or self.head.unpack_from(memory, offset)[0] != index:
            return None
        return text.decode(errors="replace"), first, second

    def _offset(self, index: int) -> int:
        return self.start + index % self.entries * self.entry_bytes


CALLS = Table(RING_START + RING_RECORDS * WORDS * 8, 256, 1024)
LINES = Table(CALLS.end, 512, 256)
FILE_BYTES = LINES.end
_RING = slice(RING_START, CALLS.start)


@dataclass(frozen=True)
class Call:
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
        """The collective."""
        return self.communicator, self.number

    @property
    def place(self) -> str:
        """Its text and the user's line."""
        return self.text + (f" at {self.line}" if self.line else "")


class RankFile:
    """The record of a rank, read from its bytes.

    Raises
    ------
    ValueError
        If it is not a record file, has another version, or is damaged.
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        if len(memory) < FILE_BYTES or self._word(Field.MAGIC) != MAGIC or self._word(Field.VERSION) != VERSION:
            raise ValueError(f"not the record of a rank by mpistrat, version {VERSION} of the format")
        if not self.rank < self.size <= MOST_RANKS or self._word(Field.STATE) not in {*State}:
            raise ValueError(f"a damaged record: rank {self.rank} of {self.size}, state {self._word(Field.STATE)}")
        self._ring: NDArray[np.uint64] = np.frombuffer(memory[_RING], np.uint64).reshape(RING_RECORDS, WORDS)

    @classmethod
    def open(cls, path: Path) -> RankFile:
        """Map a file; reads return its present contents. Raise OSError or ValueError if it is no record file."""
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            return cls(memoryview(mmap.mmap(descriptor, FILE_BYTES, prot=mmap.PROT_READ)))
        finally:
            os.close(descriptor)

    @property
    def rank(self) -> int:
        """The rank."""
        return self._word(Field.RANK)

    @property
    def size(self) -> int:
        """The number of ranks of its job."""
        return self._word(Field.SIZE)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._word(Field.PID)

    @property
    def state(self) -> State:
        """The last state that it has recorded."""
        return State(self._word(Field.STATE))

    @property
    def looked(self) -> int:
        """When its watching thread last woke; 0 before the first time."""
        return self._word(Field.LOOKED)

    @property
    def now_at(self) -> tuple[str, int]:
        """The line at which its main thread was seen last, and when; empty if never."""
        return self._line(self._word(Field.NOW_AT)), self._word(Field.SAMPLED)

    def text(self, name: str) -> str:
        """Return its ``node``, ``host``, ``program`` or ``activity``."""
        start, room = TEXTS[name]
        length = min(int.from_bytes(self._memory[start : start + 8], sys.byteorder), room - 8)
        return bytes(self._memory[start + 8 : start + 8 + length]).decode(errors="replace")

    def process(self) -> process.Process | None:
        """Return its process; None if that has exited. Raise LookupError if it runs in another container."""
        if self._word(Field.NAMESPACE) != process.pid_namespace():
            raise LookupError(f"process {self.pid} is in another container")
        found = process.find(self.pid)
        return found if found is not None and found.started == self._word(Field.STARTED) else None

    def last(self) -> Call | None:
        """Return the collective that it has entered last; None before the first."""
        newest = int(self._ring[:, 4].argmax())
        return self._call(newest, time.monotonic_ns()) if self._ring[newest, 4] else None

    def inside(self) -> list[Call]:
        """Return the collectives that it is inside, the last one first."""
        # a slot that is being reused still has `left` of the collective before
        entered, left = self._ring[:, 4], self._ring[:, 5] & np.uint64(FAILED_BIT - 1)
        return self._calls(np.flatnonzero(entered > left))

    def calls(self) -> list[Call]:
        """Return all collectives that are still recorded, the last one first."""
        return self._calls(np.flatnonzero(self._ring[:, 4]))

    def find(self, key: Key) -> list[Call]:
        """Return the call of a collective and those refused before it, the last one first; [] if all are overwritten."""
        ring, (communicator, number) = self._ring, key
        return self._calls(np.flatnonzero((ring[:, 0] == number) & (ring[:, 1] == communicator) & (ring[:, 4] > 0)))

    def _calls(self, rows: NDArray[np.intp]) -> list[Call]:
        now = time.monotonic_ns()
        return sorted((self._call(row, now) for row in rows.tolist()), key=lambda call: -call.entered)

    def _call(self, row: int, now: int) -> Call:
        number, communicator, index, line, entered, left = self._ring[row].tolist()
        has_failed, left = bool(left & FAILED_BIT), left & ~FAILED_BIT
        has_left = left >= entered
        description, nbytes, digest = CALLS.read(self._memory, index) or (f"\0{OVERWRITTEN}", 0, 0)
        ranks, _, text = description.partition("\0")
        return Call(
            communicator,
            number,
            text,
            digest,
            self._line(line & ~STARTED_BIT),
            entered,
            (now - entered) / 1e9,
            (now - left) / 1e9 if has_left else None,
            has_failed and has_left,
            bool(line & STARTED_BIT),
            ranks,
            nbytes,
        )

    def _line(self, index: int) -> str:
        found = LINES.read(self._memory, index)
        return found[0] if found else ""

    def _word(self, field: Field) -> int:
        return int.from_bytes(self._memory[8 * field : 8 * field + 8], sys.byteorder)


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
