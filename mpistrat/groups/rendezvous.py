"""Rendezvous: all ranks of the job come together while a strategy or resolver is made, and learn whether each of them can.

File law: nothing here waits for ranks that have not come, but the rendezvous itself, and that has its deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, TypeVar

from mpistrat.errors import DeadlineExceededError
from mpistrat.groups.agreement import Agreement, pause
from mpistrat.groups.group import Group
from mpistrat.launch import bootstrap
from mpistrat.topology.discover import discover
from mpistrat.topology.gpu_assignment import check_gpu_assignment
from mpistrat.topology.world import World
from mpistrat.watch import watcher
from mpistrat.watch.watched import watched

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Rendezvous", "rendezvous"]

T = TypeVar("T")


class Rendezvous:
    """What the ranks have in common while they meet.

    Attributes
    ----------
    comm : MPI.Intracomm
        All ranks that meet; freed when the rendezvous ends.
    world : World
        Which rank sits where.
    rank : int
        This rank.
    """

    def __init__(self, group: Group, world: World) -> None:
        self._agreement = Agreement(group)
        self.comm, self.rank, self.world = group.comm, group.rank, world

    def agree(self, call: str, check: Callable[[], T]) -> T:
        """Return what `check` returns here, once all ranks have made the same call and none refuses it. A collective call.

        Parameters
        ----------
        call : str
            Describes the call with its arguments, in the same words on all ranks.
        check : callable
            Raises where this rank cannot make the call; it must not communicate.

        Raises
        ------
        Exception
            What `check` raised, on the rank where it did.
        AgreementError
            On all others then, and on all ranks where the calls differ.
        """
        error: Exception | None = None
        try:
            result = check()
        except Exception as refused:
            error = refused
        self._agreement.check(call, error)
        return result


@contextmanager
def rendezvous(call: str, timeout_seconds: float = 0.0, comm: MPI.Intracomm | None = None) -> Iterator[Rendezvous]:
    """Start MPI, wait until all ranks have come, and find out which sits where, on what. A collective call, as is leaving it.

    Where only some ranks of the job meet, hosts do not begin to tell each other what their ranks wait for: it takes all.

    Parameters
    ----------
    call : str
        What the ranks meet for, for errors.
    timeout_seconds : float
        How long to wait for the others; 0 means for ever.
    comm : MPI.Intracomm, optional
        The ranks that meet; by default all of the job.

    Raises
    ------
    LaunchError, TopologyError
        As `bootstrap.start`, `topology.discover` and `topology.check_gpu_assignment`.
    DeadlineExceededError
        If not all ranks come in time.
    """
    early = watcher.start()  # before MPI, which waits for ranks that have not come, too
    if early is not None:
        early.begin()
    with nullcontext() if comm is not None and _is_part(comm) else watched(call):
        world = bootstrap.start()
        group = Group(_own(comm or world, call, timeout_seconds), "world", tuple(range((comm or world).Get_size())))
        try:
            if group.size == world.Get_size():
                _watch(world, call, timeout_seconds)
            check_gpu_assignment(group.comm)
            found = discover(group.comm)
            watcher.introduce(found.nodes[found.place(group.rank).node_index].name)
            yield Rendezvous(group, found)
        finally:
            group.close()


def _is_part(comm: MPI.Intracomm) -> bool:
    """Return whether a communicator has but some ranks of the job."""
    from mpi4py import MPI

    return comm.Get_size() < MPI.COMM_WORLD.Get_size()


def _watch(world: MPI.Intracomm, call: str, timeout_seconds: float) -> None:
    """Have the watchers of all ranks talk to each other; all have met."""
    found = watcher.start(world.Get_size())
    if found is not None and not found.has_joined:
        found.join(_own(world, call, timeout_seconds))


def _own(comm: MPI.Intracomm, call: str, timeout_seconds: float) -> MPI.Intracomm:
    """Return a duplicate of a communicator; it comes to be when all ranks have asked for it."""
    own, request = comm.Idup()
    began = time.monotonic()
    deadline = began + (timeout_seconds or float("inf"))
    watching = watcher.watcher()
    while not request.Test():
        if watching is not None:
            watching.raise_verdict()
        if time.monotonic() > deadline:
            raise DeadlineExceededError(
                f"rank {comm.Get_rank()}: timeout waiting for the cluster: after {timeout_seconds} s some of the "
                f"{comm.Get_size()} ranks had not come to {call}. Either they do not make this call, or they need longer: "
                "raise CommunicationOptions(timeout_seconds=…) or MPISTRAT_TIMEOUT_SECONDS"
            )
        pause(began)
    return own
