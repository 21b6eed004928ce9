"""What happened when on this rank: phase, bytes, start, end.

Recording is off until somebody asks for it; an idle timeline costs one attribute look-up per phase.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

__all__ = ["Event", "Timeline", "write_chrome_trace"]


class Event(NamedTuple):
    """One phase that ran on this rank.

    Attributes
    ----------
    name : str
        What ran, for example ``intra reduce_scatter``.
    lane : str
        The row it is drawn in: ``intra``, ``inter``, or ``inter 1`` where several chunks are between nodes.
    start_seconds, end_seconds : float
        Seconds on the clock of `time.perf_counter`.
    nbytes : int
        Bytes of the buffer that the phase worked on.
    """

    name: str
    lane: str
    start_seconds: float
    end_seconds: float
    nbytes: int


class Timeline:
    """A list of events, recorded while `enabled`."""

    def __init__(self) -> None:
        self.enabled = False
        self.events: list[Event] = []
        # perf_counter has no common origin between processes; the wall clock of this moment aligns the ranks of one host
        self.epoch_seconds = time.time() - time.perf_counter()

    def record(self, name: str, lane: str, start_seconds: float, nbytes: int = 0) -> None:
        """Note that something that began at `start_seconds` has ended now."""
        self.events.append(Event(name, lane, start_seconds, time.perf_counter(), nbytes))

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


def write_chrome_trace(path: str | Path, timelines: dict[int, Timeline]) -> None:
    """Write the timelines of some ranks as a Chrome/Perfetto trace: one process per rank, one row per lane.

    Parameters
    ----------
    path : str or Path
        The JSON file to write; open it at chrome://tracing or ui.perfetto.dev.
    timelines : dict
        Rank -> its timeline.
    """
    rows: list[dict[str, object]] = []
    starts = [event.start_seconds + line.epoch_seconds for line in timelines.values() for event in line.events]
    origin = min(starts, default=0.0)
    for rank, timeline in sorted(timelines.items()):
        # the format wants numbers for rows, and names beside them
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
