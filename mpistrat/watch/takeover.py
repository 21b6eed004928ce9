"""Takeover: the program is stuck in a call in C, so the watching thread prints its error and ends the job."""

from __future__ import annotations

import time
from types import FrameType, TracebackType

from mpistrat import settings
from mpistrat.errors import CollectiveError
from mpistrat.launch import abort
from mpistrat.launch.exception_text import format_exception
from mpistrat.watch.reader import RankFile

__all__ = ["end_job", "traceback_of"]

# the time that other ranks have to print theirs
OTHERS_SECONDS = 1.0


def end_job(error: CollectiveError, frame: FrameType | None, own: RankFile) -> None:
    """Print an error with the traceback of the program, and end the job, unless MPISTRAT_ABORT is off."""
    label = f"rank {own.rank} on {own.text('host')}"
    abort.say(format_exception(error.with_traceback(traceback_of(frame)), label))
    if settings.ABORT.read():
        from mpi4py import MPI

        time.sleep(OTHERS_SECONDS)
        MPI.COMM_WORLD.Abort(1)


def traceback_of(frame: FrameType | None) -> TracebackType | None:
    """Return the traceback of an uncaught exception raised in a frame."""
    trace: TracebackType | None = None
    while frame is not None:
        trace = TracebackType(trace, frame, frame.f_lasti, frame.f_lineno)
        frame = frame.f_back
    return trace
