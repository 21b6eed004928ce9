"""Rendezvous: all ranks wait for each other when a strategy or resolver is created, and agree that each of them can create it.

Invariant: only the rendezvous itself waits for ranks that have not arrived, and it has a deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from mpistrat.errors import DeadlineExceededError
from mpistrat.groups.agreement import Agreement, wait_for
from mpistrat.groups.group import Group, job_ranks_of
from mpistrat.groups.hierarchy import members_text
from mpistrat.launch import bootstrap
from mpistrat.lazy import MPI
from mpistrat.topology.discover import check_gpu_assignment, discover
from mpistrat.topology.world import World
from mpistrat.watch import watcher
from mpistrat.watch.recorder import watched

T = TypeVar("T")


class Rendezvous:
    """The ranks that take part in a rendezvous, which frees their `comm` when it ends, and their topology."""

    def __init__(self, group: Group, world: World) -> None:
        self._agreement = Agreement(group)
        self.comm, self.rank, self.world = group.comm, group.rank, world

    def agree(self, call: str, check: Callable[[], T]) -> T:
        """Return the result of `check` after all ranks have made the same call and none has raised. A collective call.

        `check` must not communicate. If it raises on one rank, the others raise an AgreementError.
        """
        try:
            result = check()
        except Exception as error:
            self._agreement.check(call, error)
            raise
        self._agreement.check(call)
        return result


@contextmanager
def rendezvous(call: str, timeout_seconds: float = 0.0, comm: MPI.Intracomm | None = None) -> Iterator[Rendezvous]:
    """Start MPI, wait for all ranks (of `comm`), and discover their nodes and devices.

    A collective call, as is leaving the context. The watchers of several hosts are connected only where all ranks of the job
    take part.
    """
    early = watcher.start()  # before MPI, because MPI_Init waits for all ranks, too
    if early is not None:
        early.begin()
    members = "" if comm is None else members_text(job_ranks_of(comm))
    with watched(call, members):
        world = bootstrap.start()
        group = Group(_own(comm or world, call, timeout_seconds), "world")
        try:
            watching = watcher.start(group.size) if group.size == world.Get_size() else None
            if watching is not None and not watching.has_joined:
                watching.join(_own(world, call, timeout_seconds))
            check_gpu_assignment(group.comm)
            found = discover(group.comm)
            watcher.introduce(found.place(group.rank).node.name)
            yield Rendezvous(group, found)
        finally:
            group.close()


def _own(comm: MPI.Intracomm, call: str, timeout_seconds: float) -> MPI.Intracomm:
    """Return a duplicate of a communicator, which completes when all ranks have called this."""
    own, request = comm.Idup()
    deadline = time.monotonic() + (timeout_seconds or float("inf"))

    def check() -> None:
        if time.monotonic() > deadline:
            raise DeadlineExceededError(
                f"rank {MPI.COMM_WORLD.Get_rank()}: timeout waiting for the cluster: after {timeout_seconds} s some of the "
                f"{comm.Get_size()} ranks had not entered {call}. Either they do not make this call, or they need longer: "
                "increase CommunicationOptions(timeout_seconds=…) or MPISTRAT_TIMEOUT_SECONDS"
            )

    wait_for(request, check)
    return MPI.Intracomm(own)  # the duplicate of a subclass, such as those of `mpistrat.mpi4py`, is one too
