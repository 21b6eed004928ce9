"""Timeline: the phases that ran on this rank, with bytes, start and end, and the trace file made of them.

Recording is off unless MPISTRAT_TIMELINE or a caller turns it on. A timeline that is off costs one attribute look-up per phase.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from mpistrat import ending, settings
from mpistrat.logger import logger

_kept: list[Timeline] = []
_writes_as: int | None = 0


class TimelineEvent(NamedTuple):
    """One phase that ran on this rank."""

    name: str  # for example ``intra reduce_scatter``
    lane: str  # the row it is drawn in: ``intra``, ``inter``, or ``inter 1`` if several chunks are under way between nodes
    start_seconds: float  # on the clock of `time.perf_counter`
    end_seconds: float
    nbytes: int  # of the buffer that the phase worked on


class Timeline:
    """A list of events, recorded while `enabled`: from the beginning if MPISTRAT_TIMELINE is set."""

    def __init__(self) -> None:
        self.enabled = bool(settings.TIMELINE.read())
        if self.enabled:
            if not _kept:
                ending.at(ending.Stage.CLOSE, _write_alone)
            _kept.append(self)
        self.events: list[TimelineEvent] = []
        # perf_counter has no common origin between processes; the wall clock of this moment aligns the ranks of one host
        self.epoch_seconds = time.time() - time.perf_counter()

    def record(self, name: str, lane: str, start_seconds: float, nbytes: int = 0) -> None:
        """Record an event that began at `start_seconds` and ends now."""
        self.events.append(TimelineEvent(name, lane, start_seconds, time.perf_counter(), nbytes))

    def busy_seconds(self, lanes: Iterable[str]) -> float:
        """Return the seconds during which at least one of the `lanes` was busy; ``inter`` stands for ``inter 0`` as well."""
        wanted = set(lanes)
        counted = [event for event in self.events if event.lane.partition(" ")[0] in wanted]
        spans = sorted((event.start_seconds, event.end_seconds) for event in counted)
        total, reached = 0.0, float("-inf")
        for start, end in spans:
            total += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        return total


def merged() -> Timeline:
    """Return one timeline with the events of all timelines that MPISTRAT_TIMELINE has enabled."""
    whole = Timeline.__new__(Timeline)
    whole.enabled, whole.events, whole.epoch_seconds = False, [], time.time() - time.perf_counter()
    for timeline in _kept:
        whole.events += timeline.events
    return whole


def write_at_exit_as(rank: int | None) -> None:
    """Write a trace of this process at exit, as this rank of its job; None: the caller writes the trace of all ranks."""
    global _writes_as
    _writes_as = rank


def _write_alone() -> None:
    if _writes_as is not None:
        write_trace({_writes_as: merged()})


def write_trace(timelines: dict[int, Timeline]) -> None:
    """Write the file that MPISTRAT_TIMELINE names, or for a rank alone one beside it; if that fails, log why.

    At exit nobody could catch an exception.
    """
    path, first = Path(settings.TIMELINE.read()), min(timelines)
    path = path.with_name(f"{path.stem}-{first}{path.suffix}") if first else path
    try:
        write_chrome_trace(path, timelines)
    except OSError as error:
        logger.error(f"{settings.TIMELINE.name}={path} cannot be written: {error.strerror}")


def write_chrome_trace(path: str | Path, timelines: dict[int, Timeline]) -> None:
    """Write the timelines of some ranks as a Chrome/Perfetto trace: one process per rank, one row per lane."""
    rows: list[dict[str, object]] = []
    starts = [event.start_seconds + line.epoch_seconds for line in timelines.values() for event in line.events]
    origin = min(starts, default=0.0)
    for rank, timeline in sorted(timelines.items()):
        # the trace format identifies rows by numbers, and names them in separate events
        lanes = {lane: row for row, lane in enumerate(dict.fromkeys(event.lane for event in timeline.events))}
        rows.append(_name("process_name", rank, 0, f"rank {rank}"))
        rows += [_name("thread_name", rank, row, lane) for lane, row in lanes.items()]
        rows += [
            {
                "name": event.name,
                "ph": "X",
                "pid": rank,
                "tid": lanes[event.lane],
                "ts": (event.start_seconds + timeline.epoch_seconds - origin) * 1e6,
                "dur": (event.end_seconds - event.start_seconds) * 1e6,
                "args": {"bytes": event.nbytes},
            }
            for event in timeline.events
        ]
    Path(path).write_text(json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"}))


def _name(what: str, rank: int, row: int, name: str) -> dict[str, object]:
    return {"name": what, "ph": "M", "pid": rank, "tid": row, "args": {"name": name}}
