"""RankState: what a rank is doing, as it was found from its record and its process, here or by a rank of its node."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

from mpistrat.text import format_elapsed, parse_spans
from mpistrat.watch.file_layout import UNTOLD, State
from mpistrat.watch.reader import RankFile, Record

__all__ = ["Call", "Key", "RankState", "aged", "decode", "encode", "look"]

Key = tuple[int, int]
"""Which collective: its communicator, and its number there."""

# a watching thread that has not woken for so long is held up
SILENT_SECONDS = 3.0


@dataclass(frozen=True)
class Call:
    """A collective that a rank has entered.

    Attributes
    ----------
    communicator, number : int
        Which one.
    text : str
        The call with its arguments; a long one is cut.
    digest : int
        Tells the whole text from others; 0 where it is not known any more.
    line : str
        The user's line, ``path:line (function)``, or an empty text.
    entered : int
        When, in nanoseconds on the clock of the rank's host: to tell one entry from another.
    entered_seconds_ago : float
        When, before this was found.
    left_seconds_ago : float or None
        When it was left; None while it is inside.
    has_failed, is_started : bool
        Whether it raised; whether the program goes on meanwhile.
    ranks : str
        Which ranks of the job it takes, as text; empty if all, UNTOLD where that is too long: then nobody is waited for.
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
        """Return whether a rank of the job has to come to it."""
        return not self.ranks or rank in _members(self.ranks)

    @property
    def key(self) -> Key:
        """Which collective it is."""
        return self.communicator, self.number


@dataclass(frozen=True)
class RankState:
    """What a rank is doing.

    Attributes
    ----------
    rank : int
        Which rank.
    node : str
        The name of its node, or an empty text where nothing is known of it.
    pid : int
        Its process; 0 where that is not known.
    state : str
        ``in`` a collective; ``out`` of any; ``failed``: its program has raised; ``ended``: its program has ended; ``stopped``:
        a signal or a debugger holds it; ``gone``: its process has ended without a word; ``absent``: its process has not come
        to this library; ``unknown``.
    calls : tuple of Call
        The collectives that it is inside, the last one first, then others that matter: the last, and those that were asked for.
    now_at : str
        The user's line that its main thread was at, ``path:line (function)``, or an empty text.
    seen_seconds_ago : float
        When that was.
    is_silent : bool
        Whether its watching thread is held up: by a call in C that keeps the interpreter to itself, or for want of a core.
    program : str
        What it runs.
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

    @property
    def call(self) -> Call | None:
        """The collective that its program waits in, or else the last that it has entered."""
        inside = [call for call in self.calls if call.left_seconds_ago is None]
        waiting = [call for call in inside if not call.is_started]
        return next(iter(waiting or inside or self.calls), None)

    @property
    def waits_in(self) -> Call | None:
        """The collective that it waits in, its program or what that has started; None where it is in none."""
        call = self.call
        return call if call is not None and call.left_seconds_ago is None and self.state in ("in", "stopped") else None

    def at(self, key: Key) -> Call | None:
        """Return what it called at a number, as far as is known here."""
        return next((call for call in self.calls if call.key == key), None)

    def doing(self) -> str:
        """Return in words what it is doing, and where."""
        return f"{self._condition()}; {self._last()}{self._where()}"

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
    return frozenset() if ranks == UNTOLD else frozenset().union(*parse_spans(ranks))


def look(file: RankFile, wanted: Collection[Key] = ()) -> RankState:
    """Return what a rank of this host is doing; of the collectives that are `wanted` also what it called there."""
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
    )


def aged(state: RankState, seconds: float) -> RankState:
    """Return what was known of a rank some time ago, of which nothing has been heard since."""
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
    """Return states as JSON has them."""
    return [asdict(state) for state in states]


def decode(rows: Iterable[dict[str, Any]]) -> list[RankState]:
    """Return the states that `encode` was given."""
    return [RankState(**{**row, "calls": tuple(Call(**call) for call in row["calls"])}) for row in rows]


def _state(file: RankFile, is_inside: bool) -> tuple[str, bool]:
    """Return the state of a rank, and whether its process is known to be there."""
    said = file.state
    try:
        process = file.process()
    except LookupError:
        process, alive = None, False
    else:
        alive = process is not None
        if process is None and said is State.RUNNING:
            return "gone", alive
    if said is not State.RUNNING:
        return ("ended" if said is State.ENDED else "failed"), alive
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
