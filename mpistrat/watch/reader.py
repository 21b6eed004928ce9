"""RankFile: read the record of a rank, while it runs or after it has ended."""

from __future__ import annotations

import mmap
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mpistrat.launch import process
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
)

__all__ = ["Description", "RankFile", "Record", "seconds_since"]

OVERWRITTEN = "(its description was overwritten)"
_RING = slice(RING_START, RING_START + RING_RECORDS * WORDS * 8)


@dataclass(frozen=True)
class Description:
    """The arguments of a collective.

    `ranks` are its ranks, empty for all; `digest` is the hash of the whole text, and `text` the beginning of it if it is long.
    """

    verb: str = ""
    op: str = ""
    dtype: str = ""
    nbytes: int = 0
    plan: str = ""
    ranks: str = ""
    text: str = OVERWRITTEN
    digest: int = 0


@dataclass(frozen=True)
class Record:
    """A collective that a rank has entered.

    Attributes
    ----------
    number, communicator : int
        As for `FlightRecorder.enter`.
    call : Description
        Its arguments.
    line : str
        The user's line, ``path:line (function)``, or an empty string.
    entered, left : int
        Nanoseconds of CLOCK_MONOTONIC; `left` is 0 while the rank is inside.
    has_failed : bool
        Whether it raised.
    is_started : bool
        Whether it is asynchronous: the program goes on meanwhile.
    """

    number: int
    communicator: int
    call: Description
    line: str
    entered: int
    left: int
    has_failed: bool
    is_started: bool


class RankFile:
    """The record file of a rank.

    Parameters
    ----------
    memory : memoryview
        Its bytes.

    Raises
    ------
    ValueError
        If it is not a record file, or has another version.
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        if len(memory) < FILE_BYTES or self._word(Field.MAGIC) != MAGIC or self._word(Field.VERSION) != VERSION:
            raise ValueError(f"not the record of a rank by mpistrat, version {VERSION} of the format")
        self._ring: NDArray[np.uint64] = np.frombuffer(memory[_RING], np.uint64).reshape(RING_RECORDS, WORDS)

    @classmethod
    def open(cls, path: Path) -> RankFile:
        """Open a file; reads return its present contents.

        Raises
        ------
        OSError, ValueError
            If it does not exist, or is not a record file.
        """
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
        """When its watching thread last woke, in nanoseconds of CLOCK_MONOTONIC; 0 before the first time."""
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
        """Return its process; None if that has exited.

        Raises
        ------
        LookupError
            If that cannot be known, because it runs in another container.
        """
        if self._word(Field.NAMESPACE) != process.pid_namespace():
            raise LookupError(f"process {self.pid} is in another container")
        found = process.find(self.pid)
        return found if found is not None and found.started == self._word(Field.STARTED) else None

    def last(self) -> Record | None:
        """Return the collective that it has entered last; None before the first."""
        newest = int(self._ring[:, 4].argmax())
        return self._record(newest) if self._ring[newest, 4] else None

    def inside(self) -> list[Record]:
        """Return the collectives that it is inside, the last one first."""
        # a slot that is being reused still has `left` of the collective before
        entered, left = self._ring[:, 4], self._ring[:, 5] & np.uint64(FAILED_BIT - 1)
        return self._records(np.flatnonzero(entered > left))

    def records(self) -> list[Record]:
        """Return all collectives that are still recorded, the last one first."""
        return self._records(np.flatnonzero(self._ring[:, 4]))

    def find(self, communicator: int, number: int) -> Record | None:
        """Return a collective by its number; None if it was not entered, or was overwritten."""
        ring = self._ring
        found = self._records(np.flatnonzero((ring[:, 0] == number) & (ring[:, 1] == communicator) & (ring[:, 4] > 0)))
        return found[0] if found else None

    def _records(self, rows: NDArray[np.intp]) -> list[Record]:
        return sorted(map(self._record, rows.tolist()), key=lambda record: -record.entered)

    def _record(self, row: int) -> Record:
        number, communicator, index, line, entered, left = self._ring[row].tolist()
        has_failed, left = bool(left & FAILED_BIT), left & ~FAILED_BIT
        return Record(
            number,
            communicator,
            self._description(index),
            self._line(line & ~STARTED_BIT),
            entered,
            left if left >= entered else 0,
            has_failed and left >= entered,
            bool(line & STARTED_BIT),
        )

    def _description(self, index: int) -> Description:
        found = CALLS.read(self._memory, index)
        if found is None:
            return Description()
        encoded, nbytes, digest = found
        parts = encoded.decode(errors="replace").split("\0", 5)
        if len(parts) < 6:
            return Description()
        verb, op, dtype, plan, ranks, text = parts
        return Description(verb, op, dtype, nbytes, plan, ranks, text, digest)

    def _line(self, index: int) -> str:
        found = LINES.read(self._memory, index)
        return found[0].decode(errors="replace") if found else ""

    def _word(self, field: Field) -> int:
        return int.from_bytes(self._memory[8 * field : 8 * field + 8], sys.byteorder)


def seconds_since(moment: int) -> float:
    """Return how many seconds ago something was, from nanoseconds of CLOCK_MONOTONIC."""
    return max(0.0, (time.monotonic_ns() - moment) / 1e9)
