"""A communicator with mpi4py's methods, whose collectives are those of `mpistrat.Communicator`.

Invariant: importing the package does not start MPI.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpistrat.communicator.options import CommunicationOptions

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpistrat.mpi4py.intracomm import WrappedIntracomm

__all__ = ["wrap"]


def wrap(comm: MPI.Intracomm, options: CommunicationOptions | None = None) -> WrappedIntracomm:
    """Return a communicator of mpi4py that makes its collectives hierarchically. A collective call.

    It is `comm` itself in all else: an ``MPI.Intracomm`` (a ``Cartcomm`` where `comm` is one), equal to it, with all its
    methods and attributes. ``Allreduce``, ``Iallreduce``, ``Reduce_scatter_block``, ``Allgather``, ``Bcast`` and ``Barrier``
    are made by a `mpistrat.Communicator` of these ranks, which compares them. They take what mpi4py takes; a reduction that
    is not SUM, PROD, MIN or MAX of numbers is made by MPI. Communicators that are made of it, by ``Split``, ``Dup``,
    ``Create_cart`` and so on, are wrapped too, with the same options.

    Parameters
    ----------
    comm : MPI.Intracomm
        Any ranks of the job.
    options : CommunicationOptions, optional
        Of all its collectives; the same on all ranks.

    Raises
    ------
    InvalidArgumentError, AgreementError, DeadlineExceededError, LaunchError, TopologyError, TransportError
        As `mpistrat.Communicator`.
    """
    from mpistrat.mpi4py.intracomm import wrapped

    found = wrapped(comm, options)
    found.open()
    return found
