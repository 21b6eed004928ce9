"""The communicator over all ranks of the job, for functions that are called without one."""

from __future__ import annotations

from functools import cache

from mpistrat.communicator.communicator import Communicator
from mpistrat.launch import bootstrap

__all__ = ["job_communicator"]


@cache
def job_communicator() -> Communicator:
    """Return the communicator over all ranks of the job; the first call makes it, and is a collective one."""
    return Communicator(bootstrap.start())
