"""The trace of a whole job, for MPISTRAT_TIMELINE, written when all ranks have ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpistrat import timeline
from mpistrat.timeline import Timeline, TimelineEvent
from mpistrat.watch.reader import RankFile

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["write_merged"]

_LANE = "collectives"


def write_merged(comm: MPI.Intracomm, own: RankFile) -> None:
    """Write the trace on rank 0. A collective call, after all programs have ended.

    Parameters
    ----------
    comm : Intracomm
        All ranks of the job.
    own : RankFile
        The record of this rank, whose last collectives become a row of the trace.
    """
    gathered = comm.gather(_own_timeline(own))
    if gathered is not None:
        timeline.write_trace(dict(enumerate(gathered)))


def _own_timeline(own: RankFile) -> Timeline:
    whole = timeline.merged()
    records = [record for record in reversed(own.records()) if record.left]
    # both clocks are CLOCK_MONOTONIC
    calls = [
        TimelineEvent(record.call.text, _LANE, record.entered / 1e9, record.left / 1e9, record.call.nbytes)
        for record in records
        if not record.is_started
    ]
    whole.events = [*calls, *whole.events]
    return whole
