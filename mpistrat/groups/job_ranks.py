"""Which ranks of the job a communicator has, as numbers and as the flight recorder writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpistrat.text import spans_text
from mpistrat.watch.file_layout import LONGEST_TEXT, NOT_LISTED

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["job_ranks_of", "members_text"]


def job_ranks_of(comm: MPI.Intracomm) -> tuple[int, ...]:
    """Return the ranks in COMM_WORLD of the members of a communicator, in its order."""
    from mpi4py import MPI

    own, job = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    ranks = own.Translate_ranks(None, job)
    own.Free()
    job.Free()
    return tuple(ranks)


def members_text(job_ranks: Sequence[int]) -> str:
    """Return ranks of the job as text, "0-2 5": empty if they are all, NOT_LISTED if the text is too long."""
    from mpi4py import MPI

    if len(job_ranks) == MPI.COMM_WORLD.Get_size():
        return ""
    text = spans_text(sorted(job_ranks))
    return text if len(text) <= LONGEST_TEXT else NOT_LISTED
