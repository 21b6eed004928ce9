"""Build the hierarchy of groups for a communicator, after its ranks have compared their arguments."""

from __future__ import annotations

from mpistrat import settings
from mpistrat.algorithms.choose import Measured
from mpistrat.communicator.options import CommunicationOptions, check_options
from mpistrat.errors import InvalidArgumentError
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.groups.rendezvous import rendezvous
from mpistrat.launch import bootstrap
from mpistrat.lazy import MPI


def build_hierarchy(comm: MPI.Intracomm, options: CommunicationOptions | None, measured: Measured | None) -> Hierarchy:
    """Return the hierarchy of groups over the ranks of `comm`, which is duplicated. A collective call."""
    check_comm(comm)
    bootstrap.start()  # which raises if MPI is finalized, before it is asked anything
    with rendezvous("Communicator", rendezvous_seconds(options), comm) as job:
        given = "" if measured is None else f", measured={measured}"
        job.agree(f"Communicator(options={options}{given})", lambda: check_options(options))
        return Hierarchy(job.comm, job.world)


def rendezvous_seconds(options: object) -> float:
    """Return how many seconds ranks wait for each other while a communicator is made; 0 means forever."""
    if isinstance(options, CommunicationOptions) and options.timeout_seconds is not None:
        return options.timeout_seconds
    return settings.TIMEOUT_SECONDS.read_or_default()


def check_comm(comm: object) -> None:
    """Check that it is an intracommunicator."""
    if comm == MPI.COMM_NULL:
        raise InvalidArgumentError(
            "a Communicator is made by the ranks that are in it; this rank got MPI.COMM_NULL, so it is not among them.\n"
            "    incorrect:  comm = mpistrat.Communicator(sub)\n"
            "    correct:    if sub != MPI.COMM_NULL: comm = mpistrat.Communicator(sub)"
        )
    if not isinstance(comm, MPI.Intracomm):
        raise InvalidArgumentError(
            f"a Communicator is made of an intracommunicator, such as MPI.COMM_WORLD; got {type(comm).__name__}"
        )
