"""RankState: what a rank is doing, from its record and its process, read here or by a rank of its node."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

from mpistrat.text import format_elapsed, parse_spans
from mpistrat.watch.file_layout import NOT_LISTED, State
from mpistrat.watch.reader import RankFile, Record

__all__ = ["Call", "Key", "RankState", "aged", "decode", "encode", "look"]

Key = tuple[int, int]
"""A collective: its communicator, and its number there."""

# a watching thread that has not woken for this long is blocked
SILENT_SECONDS = 3.0


@dataclass(frozen=True)
class Call:
    """A collective that a rank has entered.

    Attributes
    ----------
    communicator, number : int
        Its key.
    text : str
        The call with its arguments; a long one is cut.
    digest : int
        Hash of the whole text; 0 if it was overwritten.
    line : str
        The user's line, ``path:line (function)``, or an empty string.
    entered : int
        When, in nanoseconds of the host's clock: distinguishes two entries of the same collective.
    entered_seconds_ago : float
        How long before the record was read.
    left_seconds_ago : float or None
        When it was left, likewise; None while the rank is inside.
    has_failed, is_started : bool
        Whether it raised; whether it is asynchronous, so that the program goes on meanwhile.
    ranks : str
        The ranks that take part, as text; empty for all, NOT_LISTED if the list is too long: then no rank counts as missing.
    """

    communicator: int
    number: int
    text: str
    digest: int
    line: str
    entered: int
    entered_seconds_ago: float
    left_seconds_ago: float | None
    has_failed: bool = False
    is_started: bool = False
    ranks: str = ""

    def takes(self, rank: int) -> bool:
        """Return whether a rank of the job takes part."""
        return not self.ranks or rank in _members(self.ranks)

    @property
    def key(self) -> Key:
        """The collective."""
        return self.communicator, self.number


@dataclass(frozen=True)
class RankState:
    """What a rank is doing.

    Attributes
    ----------
    rank : int
        The rank.
    node : str
        The name of its node, or an empty string if unknown.
    pid : int
        Its process id; 0 if unknown.
    state : str
        ``in`` a collective; ``out`` of any; ``failed``: its program has raised; ``ended``: its program has ended; ``stopped``:
        a signal or a debugger holds it; ``gone``: its process was killed; ``absent``: its process has not called this library
        yet; ``unknown``.
    calls : tuple of Call
        The collectives that it is inside, the last one first; then the last one left, and those that were looked up.
    now_at : str
        The line at which its main thread was seen, ``path:line (function)``, or an empty string.
    seen_seconds_ago : float
        When that was.
    is_silent : bool
        Whether its watching thread is blocked: a call in C holds the interpreter lock, or no core is free.
    program : str
        Its command line.
    activity : str
        What it is doing beside collectives, such as a task of a job with parameter servers; empty where there is no such thing.
    """

    rank: int
    node: str = ""
    pid: int = 0
    state: str = "unknown"
    calls: tuple[Call, ...] = ()
    now_at: str = ""
    seen_seconds_ago: float = 0.0
    is_silent: bool = False
    program: str = ""
    activity: str = ""

    @property
    def call(self) -> Call | None:
        """The collective that its program waits in, else the last one that it has entered."""
        inside = [call for call in self.calls if call.left_seconds_ago is None]
        waiting = [call for call in inside if not call.is_started]
        return next(iter(waiting or inside or self.calls), None)

    @property
    def waits_in(self) -> Call | None:
        """The collective that it waits in, also an asynchronous one; None if it is in none."""
        call = self.call
        return call if call is not None and call.left_seconds_ago is None and self.state in ("in", "stopped") else None

    def at(self, key: Key) -> Call | None:
        """Return its call of a collective, if that was looked up and entered."""
        return next((call for call in self.calls if call.key == key), None)

    def doing(self) -> str:
        """Return a description of what it is doing, and where."""
        return f"{self._condition()}; {self.activity or self._last()}{self._where()}"

    def _condition(self) -> str:
        words = {
            "in": "alive",
            "out": "alive",
            "failed": "its program has raised an error",
            "ended": "its program has ended",
            "stopped": "stopped (by a signal or a debugger)",
            "gone": "its process is gone",
            "absent": "alive, and has made no strategy yet",
            "unknown": "does not answer",
        }
        silent = ", but its Python does not run (a call in C keeps it, or no core is free)" if self.is_silent else ""
        return words[self.state] + silent

    def _last(self) -> str:
        call = self.call
        if call is None:
            return "no collective yet" if self.state != "unknown" else "nothing is known of it"
        if call.left_seconds_ago is None:
            since = format_elapsed(call.entered_seconds_ago)
            return f"in collective {call.number}, {call.text}, since {since}" + (f", from {call.line}" if call.line else "")
        outcome = "failed" if call.has_failed else "ended"
        place = f" at {call.line}" if call.line else ""
        return f"last collective {call.number}, {call.text}{place}, {outcome} {format_elapsed(call.left_seconds_ago)} ago"

    def _where(self) -> str:
        if not self.now_at or self.state == "ended":
            return ""
        if self.state in ("in", "out") and not self.is_silent:
            return f"; now at {self.now_at}"
        return f"; last seen {format_elapsed(self.seen_seconds_ago)} ago at {self.now_at}"


@lru_cache(256)
def _members(ranks: str) -> frozenset[int]:
    return frozenset() if ranks == NOT_LISTED else frozenset().union(*parse_spans(ranks))


def look(file: RankFile, wanted: Collection[Key] = ()) -> RankState:
    """Return the state of a rank of this host, with its calls of the `wanted` collectives."""
    now = time.monotonic_ns()
    inside = file.inside()
    last = file.last()
    found = {record.entered: record for record in [*inside, *([last] if last else [])]}
    for key in wanted:
        record = file.find(*key)
        if record is not None:
            found.setdefault(record.entered, record)
    line, sampled = file.now_at
    state, alive = _state(file, bool(inside))
    return RankState(
        file.rank,
        file.text("node"),
        file.pid,
        state,
        tuple(_call(record, now) for record in found.values()),
        line,
        (now - sampled) / 1e9,
        alive and state != "stopped" and 0 < file.looked < now - SILENT_SECONDS * 1e9,
        file.text("program"),
        file.text("activity") if state in ("in", "out", "stopped", "gone") else "",
    )


def aged(state: RankState, seconds: float) -> RankState:
    """Return a state from some time ago, of a rank that has not answered since."""
    calls = [
        replace(
            call,
            entered_seconds_ago=call.entered_seconds_ago + seconds,
            left_seconds_ago=None if call.left_seconds_ago is None else call.left_seconds_ago + seconds,
        )
        for call in state.calls
    ]
    return replace(state, state="unknown", calls=tuple(calls), seen_seconds_ago=state.seen_seconds_ago + seconds)


def encode(states: Iterable[RankState]) -> list[dict[str, Any]]:
    """Return states for JSON."""
    return [asdict(state) for state in states]


def decode(rows: Iterable[dict[str, Any]]) -> list[RankState]:
    """Return states from what `encode` returned."""
    return [RankState(**{**row, "calls": tuple(Call(**call) for call in row["calls"])}) for row in rows]


def _state(file: RankFile, is_inside: bool) -> tuple[str, bool]:
    """Return the state of a rank, and whether its process is known to exist."""
    recorded = file.state
    try:
        process = file.process()
    except LookupError:
        process, alive = None, False
    else:
        alive = process is not None
        if process is None and recorded is State.RUNNING:
            return "gone", alive
    if recorded is not State.RUNNING:
        return ("ended" if recorded is State.ENDED else "failed"), alive
    if process is not None and process.is_stopped:
        return "stopped", alive
    return ("in" if is_inside else "out"), alive


def _call(record: Record, now: int) -> Call:
    return Call(
        record.communicator,
        record.number,
        record.call.text,
        record.call.digest,
        record.line,
        record.entered,
        (now - record.entered) / 1e9,
        (now - record.left) / 1e9 if record.left else None,
        record.has_failed,
        record.is_started,
        record.call.ranks,
    )
