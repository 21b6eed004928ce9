"""Layout of a rank's record file: a header, a ring buffer of collectives, and two tables of texts that the ring refers to.

All numbers are unsigned words of 8 bytes in the byte order of this host. A text is its length, then UTF-8.
"""

from __future__ import annotations

import struct
from enum import IntEnum

__all__ = [
    "CALLS",
    "FAILED_BIT",
    "FILE_BYTES",
    "HEADER",
    "LINES",
    "LONGEST_TEXT",
    "MAGIC",
    "NOT_LISTED",
    "RING_RECORDS",
    "RING_START",
    "STARTED_BIT",
    "TEXTS",
    "VERSION",
    "WORDS",
    "Field",
    "State",
    "Table",
]

MAGIC = int.from_bytes(b"mpistrat", "little")
VERSION = 3

# the ranks of a collective, if their list is too long for an entry of the table
NOT_LISTED, LONGEST_TEXT = "?", 400


class State(IntEnum):
    """The last state that a process has recorded."""

    RUNNING, ENDED, FAILED = 1, 2, 3


class Field(IntEnum):
    """The words of the header; times are nanoseconds of CLOCK_MONOTONIC."""

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
HEADER = 4096

# number, communicator, description, line, entered, left
WORDS = 6
RING_START, RING_RECORDS = HEADER, 4096

# in `left`: the collective raised. In `line`: it is asynchronous, and the program goes on meanwhile
FAILED_BIT = STARTED_BIT = 1 << 63


class Table:
    """A ring of texts: an entry is its index, two numbers, and a text.

    An entry that overwrites another one gets a new index, so that references to the old one are recognised as stale.

    Parameters
    ----------
    start, entries, entry_bytes : int
        Offset in the file, number of entries, and bytes of each.
    """

    head = struct.Struct("=QQQI")

    def __init__(self, start: int, entries: int, entry_bytes: int) -> None:
        self.start, self.entries, self.entry_bytes = start, entries, entry_bytes
        self.text_bytes = entry_bytes - self.head.size
        self.end = start + entries * entry_bytes

    def offset(self, index: int) -> int:
        """Return the offset of an entry."""
        return self.start + index % self.entries * self.entry_bytes

    def write(self, memory: memoryview, index: int, text: bytes, first: int = 0, second: int = 0) -> None:
        """Write an entry; its index is 0 until it is complete."""
        offset, text = self.offset(index), text[: self.text_bytes]
        self.head.pack_into(memory, offset, 0, 0, 0, 0)
        begin = offset + self.head.size
        memory[begin : begin + len(text)] = text
        self.head.pack_into(memory, offset, index, first, second, len(text))

    def read(self, memory: memoryview, index: int) -> tuple[bytes, int, int] | None:
        """Return the text and the numbers of an entry; None if it was overwritten."""
        offset = self.offset(index)
        found, first, second, length = self.head.unpack_from(memory, offset)
        begin = offset + self.head.size
        text = bytes(memory[begin : begin + min(length, self.text_bytes)])
        if found != index or not index or self.head.unpack_from(memory, offset)[0] != index:
            return None
        return text, first, second


CALLS = Table(RING_START + RING_RECORDS * WORDS * 8, 256, 1024)
LINES = Table(CALLS.end, 512, 256)
FILE_BYTES = LINES.end
