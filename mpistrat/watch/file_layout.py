"""How the file of a rank is laid out: a header, a ring of collectives, and two tables of texts that the ring refers to.

All numbers are unsigned words of 8 bytes in the order of this host. A text is a length and UTF-8.
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
    "RING_RECORDS",
    "RING_START",
    "STARTED_BIT",
    "TEXTS",
    "UNTOLD",
    "VERSION",
    "WORDS",
    "Field",
    "State",
    "Table",
]

MAGIC = int.from_bytes(b"mpistrat", "little")
VERSION = 3

# who takes part in a collective where a text of it would be longer than an entry has room for
UNTOLD, LONGEST_TEXT = "?", 400


class State(IntEnum):
    """What a process said of itself last."""

    RUNNING, ENDED, FAILED = 1, 2, 3


class Field(IntEnum):
    """Which word of the header holds what; times are those of CLOCK_MONOTONIC, in nanoseconds."""

    MAGIC = 0
    VERSION = 1
    STATE = 2
    PID = 3
    STARTED = 4  # ticks since the host started
    NAMESPACE = 5  # in which that pid counts
    RANK = 6
    SIZE = 7
    LOOKED = 8  # when the watching thread last woke
    NOW_AT = 9  # the line that the main thread was at,
    SAMPLED = 10  # and when


# name -> where its text begins in the header, and the bytes it has
TEXTS = {"node": (256, 256), "host": (512, 256), "program": (768, 1024)}
HEADER = 4096

# number, communicator, description, line, entered, left
WORDS = 6
RING_START, RING_RECORDS = HEADER, 4096

# in `left`: it raised. In `line`: it was started before, and the program goes on meanwhile
FAILED_BIT = STARTED_BIT = 1 << 63


class Table:
    """Texts that are overwritten in turn: an entry is its index, two numbers, and a text.

    An index is counted on when an entry is overwritten, so that what referred to the old one finds it gone.

    Parameters
    ----------
    start, entries, entry_bytes : int
        Where in the file, how many, and how long.
    """

    head = struct.Struct("=QQQI")

    def __init__(self, start: int, entries: int, entry_bytes: int) -> None:
        self.start, self.entries, self.entry_bytes = start, entries, entry_bytes
        self.text_bytes = entry_bytes - self.head.size
        self.end = start + entries * entry_bytes

    def offset(self, index: int) -> int:
        """Return where the entry of an index begins."""
        return self.start + index % self.entries * self.entry_bytes

    def write(self, memory: memoryview, index: int, text: bytes, first: int = 0, second: int = 0) -> None:
        """Write an entry; while it is half written it has no index."""
        offset, text = self.offset(index), text[: self.text_bytes]
        self.head.pack_into(memory, offset, 0, 0, 0, 0)
        begin = offset + self.head.size
        memory[begin : begin + len(text)] = text
        self.head.pack_into(memory, offset, index, first, second, len(text))

    def read(self, memory: memoryview, index: int) -> tuple[bytes, int, int] | None:
        """Return the text and the numbers of an entry, or None where it was overwritten."""
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
