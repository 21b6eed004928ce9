"""RankState: what a rank is doing, from its record and its process; the ranks of a job on this host; and reports of ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mpistrat.launch import environment, process
from mpistrat.text import format_elapsed, ranks_text
from mpistrat.watch.record import RANK_PREFIX, Key, RankFile, RecordedCall, State, job_name

# a watching thread that has not woken for this long is blocked
SILENT_SECONDS = 3.0
_MOST_MISSING = 16  # that have a line each in a report


@dataclass(frozen=True)
class RankState:
    """What a rank is doing.

    Its `state` is ``in`` a collective; ``out`` of any; ``failed``: its program has raised; ``ended``: its program has ended;
    ``stopped``: a signal or a debugger holds it; ``killed``: a signal has ended its process; ``gone``: it has ended without a
    word, like the others when mpiexec ends the job; ``absent``: its process has not called this library yet; ``unknown``.
    """

    rank: int
    node: str = ""
    pid: int = 0
    state: str = "unknown"
    # those that it is inside, the last one first; the last one left; those that were looked up
    calls: tuple[RecordedCall, ...] = ()
    now_at: str = ""  # the line at which its main thread was seen
    seen_seconds_ago: float = 0.0
    is_silent: bool = False  # its watching thread is blocked: a call in C holds the interpreter lock, or no core is free
    program: str = ""
    has_threads: bool = False  # several make collective calls: where one waits, another one may come to what others wait in
    activity: str = ""  # what it is doing beside collectives, such as a task of a job with parameter servers

    @property
    def call(self) -> RecordedCall | None:
        """The collective that its program waits in, else the last one that it has entered."""
        inside = [call for call in self.calls if call.left_seconds_ago is None]
        waiting = [call for call in inside if not call.is_started]
        return next(iter(waiting or inside or self.calls), None)

    @property
    def waits_in(self) -> RecordedCall | None:
        """The collective that it waits in, also an asynchronous one; None if it is in none."""
        call = self.call
        return call if call is not None and call.left_seconds_ago is None and self.state in ("in", "stopped") else None

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
            "killed": "a signal has ended its process",
            "gone": "its process is gone",
            "absent": "alive, and has made no strategy yet",
            "unknown": "does not answer",
        }
        silent = ", but its Python does not run (a call in C keeps it, or no core is free)" if self.is_silent else ""
        return words[self.state] + silent

    def _last(self) -> str:
        call = self.call
        if call is None:
            return "no collective yet" if self.state != "unknown" else "mpistrat doctor on its host shows what it does"
        if call.left_seconds_ago is None:
            since = format_elapsed(call.entered_seconds_ago)
            return f"in collective {call.number}, {call.text}, since {since}" + (f", from {call.line}" if call.line else "")
        outcome = "failed" if call.has_failed else "ended"
        return f"last collective {call.number}, {call.place}, {outcome} {format_elapsed(call.left_seconds_ago)} ago"

    def _where(self) -> str:
        if not self.now_at or self.state == "ended":
            return ""
        if self.state in ("in", "out") and not self.is_silent:
            return f"; now at {self.now_at}"
        return f"; last seen {format_elapsed(self.seen_seconds_ago)} ago at {self.now_at}"


class Neighbours:
    """Reads the record files of a job; `own` is that of this process, which exists even if the folder does not."""

    def __init__(self, job: Path, own: RankFile | None = None) -> None:
        self.job, self._own = job, own
        self._files: dict[str, tuple[int, RankFile]] = {}

    def files(self) -> list[RankFile]:
        """Return the files of the ranks of this host, in rank order."""
        found: dict[str, tuple[int, RankFile]] = {}
        with suppress(OSError):
            for entry in os.scandir(self.job):
                if not entry.name.startswith(RANK_PREFIX):
                    continue
                known = self._files.get(entry.name)
                with suppress(OSError, ValueError):
                    same = known is not None and known[0] == entry.inode()
                    found[entry.name] = known if known and same else (entry.inode(), RankFile.open(Path(entry.path)))
        # a rank that has ended removes its file; its last contents stay mapped. Another thread may look, too
        every = self._files = self._files | found
        files = {file.rank: file for _, file in every.values()}
        if self._own is not None:
            files[self._own.rank] = self._own
        return [files[rank] for rank in sorted(files)]

    def states(self, wanted: Iterable[Key] = (), expected: Iterable[int] = ()) -> tuple[list[RankState], set[Key]]:
        """Return the states of the ranks of this host, and the keys that were looked up: those they wait in, and `wanted`.

        `expected` ranks that have no file are searched for among all processes.
        """
        files = self.files()
        keys = {*wanted}.union(call.key for file in files for call in file.inside())
        missing = {*expected} - {file.rank for file in files}
        return [*(look(file, keys) for file in files), *(_absent(self.job, missing) if missing else [])], keys


def look(file: RankFile, wanted: Collection[Key] = ()) -> RankState:
    """Return the state of a rank of this host, with its calls of the `wanted` collectives."""
    now, inside = time.monotonic_ns(), file.inside()
    found: dict[int, RecordedCall] = {}
    for call in [*inside, file.last(), *(call for key in wanted for call in file.find(key))]:
        if call is not None:
            found.setdefault(call.entered, call)
    line, sampled = file.now_at
    state, alive = _state(file, bool(inside))
    return RankState(
        file.rank,
        file.text("node"),
        file.pid,
        state,
        tuple(found.values()),
        line,
        (now - sampled) / 1e9,
        alive and state != "stopped" and 0 < file.word("looked") < now - SILENT_SECONDS * 1e9,
        file.text("program"),
        file.word("threads") > 1,
        file.text("activity") if state in ("in", "out", "stopped", "gone", "killed") else "",
    )


def entered(states: Iterable[RankState], key: Key) -> dict[int, RecordedCall]:
    """Return the call of each rank that has come to a collective, by rank.

    Calls that a rank refuses take no number: the record of what all have refused says nothing of the call that comes next.
    """
    found = {state.rank: [call for call in state.calls if call.key == key] for state in states}
    refused = {rank: sum(call.has_failed for call in calls) for rank, calls in found.items()}
    before = min((refused[rank] for rank, calls in found.items() if calls and calls[0].left_seconds_ago is None), default=0)
    return {rank: calls[0] for rank, calls in found.items() if calls and not (calls[0].has_failed and refused[rank] <= before)}


def encode(states: Iterable[RankState]) -> list[dict[str, Any]]:
    """Return states for JSON."""
    return [asdict(state) for state in states]


def decode(rows: Iterable[dict[str, Any]]) -> list[RankState]:
    return [RankState(**{**row, "calls": tuple(RecordedCall(**call) for call in row["calls"])}) for row in rows]


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
        return recorded.name.lower(), alive
    if process is not None and process.is_stopped:
        return "stopped", alive
    return ("in" if is_inside else "out"), alive


def _absent(job: Path, ranks: Collection[int]) -> list[RankState]:
    """Return the processes of this host that were started as these ranks of the job, and have no record file.

    They are found by their launcher's variables; of several the newest counts, because a wrapper script precedes the program.
    """
    found: dict[int, process.Process] = {}
    for seen in process.every():
        variables = seen.environment() or {}
        launcher = environment.launcher_of(variables)
        text = variables[launcher.rank] if launcher else ""
        if not text.isdecimal() or int(text) not in ranks or job_name(variables, seen.pid) != job.name:
            continue
        before = found.get(int(text))
        if before is None or (before.started, before.pid) < (seen.started, seen.pid):
            found[int(text)] = seen
    node = os.uname().nodename
    return [
        RankState(rank, node, seen.pid, "stopped" if seen.is_stopped else "absent", program=_program(seen.pid))
        for rank, seen in sorted(found.items())
    ]


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def stall_report(own: RankState, states: Sequence[RankState]) -> str:
    """Return the report of a rank that waits; in all `states` the collective that it waits in was looked up."""
    waiting = own.waits_in
    assert waiting is not None, "only a rank that waits has a report"
    calls = entered(states, waiting.key)
    came = [(state, calls[state.rank]) for state in states if state.rank in calls]
    missing = [state for state in states if waiting.takes(state.rank) and state.rank not in calls]
    failed = [state for state, call in came if call.has_failed]
    inside = [state for state, call in came if call.left_seconds_ago is None]
    held = [state for state in inside if state.state not in ("in", "out") or state.is_silent]
    lines = [
        f"rank {own.rank} ({own.node}) has waited {format_elapsed(waiting.entered_seconds_ago)} in collective "
        f"{waiting.number}, {waiting.text}",
        *_in_it(came),
        *_each("missing", missing),
        *_each("failed in it", failed),
        *_each("in it, but not running", held),
    ]
    if not (missing or failed):
        lines.append("  no rank is missing: all ranks are in the collective, but it does not complete")
    lines.append(
        "  The job waits on. `mpistrat doctor` on any of its hosts shows this at any time; MPISTRAT_TIMEOUT_SECONDS ends "
        "such a wait with an error; MPISTRAT_STALL_SECONDS=0 turns this report off."
    )
    return "\n".join(lines)


def end_report(own: RankState, waited_seconds: float, states: Sequence[RankState]) -> str:
    """Return the report of a rank whose program has ended, while others go on."""
    ended = [state.rank for state in states if state.state == "ended"]
    return "\n".join(
        [
            f"the program of rank {own.rank} ({own.node}) has ended {format_elapsed(waited_seconds)} ago; the job goes on",
            f"  ended: {ranks_text(ended)}",
            *_each("not ended", [state for state in states if state.state != "ended"]),
            "  MPISTRAT_STALL_SECONDS=0 turns this report off.",
        ]
    )


def others_report(rank: int, states: Sequence[RankState]) -> str:
    """Return what the other ranks do, a line for each, for a rank that waits outside of collectives."""
    return "\n".join(_each("meanwhile", [state for state in states if state.rank != rank]))


def _each(what: str, states: Sequence[RankState]) -> list[str]:
    """Return a line for each rank, and one for all beyond the first 16."""
    lines = [f"  {what}: {_who(state)}: {state.doing()}" for state in states[:_MOST_MISSING]]
    more = [state.rank for state in states[_MOST_MISSING:]]
    return [*lines, f"  {what}, too: {ranks_text(more)}"] if more else lines


def _in_it(came: Sequence[tuple[RankState, RecordedCall]]) -> list[str]:
    groups: dict[tuple[str, str, bool], list[tuple[RankState, RecordedCall]]] = {}
    for state, call in came:
        if call.has_failed:
            continue
        groups.setdefault((call.text, call.line, call.left_seconds_ago is not None), []).append((state, call))
    lines = []
    for (text, line, has_left), members in groups.items():
        ranks = ranks_text([state.rank for state, _ in members])
        nodes = ", ".join(dict.fromkeys(state.node for state, _ in members))
        since = format_elapsed(max(call.entered_seconds_ago for _, call in members))
        what = "has left it" if has_left else "in it"
        different = f", as {text}" if len({call.text for _, call in came}) > 1 else ""
        lines.append(f"  {what}: {ranks} ({nodes}), since {since}{different}" + (f", from {line}" if line else ""))
    return lines


def _who(state: RankState) -> str:
    place = ", ".join([*([state.node] if state.node else []), *([f"pid {state.pid}"] if state.pid else [])])
    return f"rank {state.rank} ({place})" if place else f"rank {state.rank}"
