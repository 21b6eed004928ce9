"""Every exception of the library, drawn as a tree.

MpistratError
├── LaunchError (RuntimeError)             the launcher and MPI tell different stories
├── SettingError (ValueError)              an MPISTRAT_* variable cannot be read
├── TopologyError (ValueError)             a node shape does not describe these ranks
├── TransportError (RuntimeError)          a transport asked for by name cannot be had
├── InvalidArgumentError (ValueError)      an argument no rank could have used
├── OutOfRangeError (StopIteration)        the data has ended
├── UnsupportedDtypeError (TypeError)      an array no collective can carry
├── Unsuitable (ValueError)                a planner declines a world, and says why
└── CollectiveError (RuntimeError)         something went wrong between ranks
    ├── AgreementError                     ranks made different calls
    ├── DeadlineExceededError (TimeoutError)   ranks did not arrive in time
    └── UnavailableError                   a peer is gone
"""

from __future__ import annotations

__all__ = [
    "AgreementError",
    "CollectiveError",
    "DeadlineExceededError",
    "InvalidArgumentError",
    "LaunchError",
    "MpistratError",
    "OutOfRangeError",
    "SettingError",
    "TopologyError",
    "TransportError",
    "UnavailableError",
    "Unsuitable",
    "UnsupportedDtypeError",
]


class MpistratError(Exception):
    """Base of every exception that this library defines.

    Attributes
    ----------
    raised_everywhere : bool
        True where every rank of the job raises the same error together, so that one traceback tells the story.
    failed_ranks : tuple of int
        The ranks whose own errors have led to this one: their tracebacks tell the story.
    """

    raised_everywhere: bool = False
    failed_ranks: tuple[int, ...] = ()


class LaunchError(MpistratError, RuntimeError):
    """The launcher's variables and MPI disagree, or MPI cannot be started."""


class SettingError(MpistratError, ValueError):
    """An ``MPISTRAT_*`` variable has a value that its type does not accept."""


class TopologyError(MpistratError, ValueError):
    """A node shape is malformed, or does not describe the ranks there are."""


class TransportError(MpistratError, RuntimeError):
    """A transport was asked for by name and cannot be had here."""


class InvalidArgumentError(MpistratError, ValueError):
    """An argument is outside what the call accepts."""


class OutOfRangeError(MpistratError, StopIteration):
    """There is no further element: what ``iterator.get_next()`` raises at the end of the data, on every replica."""


class UnsupportedDtypeError(MpistratError, TypeError):
    """A value is not an array, or has a dtype that the operation is not defined for."""


class Unsuitable(MpistratError, ValueError):  # noqa: N818 - a normal answer of a planner, named as one reads it
    """A planner declines: its algorithm does not apply, because of the reason in the message."""


class CollectiveError(MpistratError, RuntimeError):
    """A collective call failed between ranks."""


class AgreementError(CollectiveError):
    """Ranks made different calls where all must make the same one. Raised on every rank."""

    raised_everywhere = True


class DeadlineExceededError(CollectiveError, TimeoutError):
    """A collective took longer than its deadline; some ranks did not arrive."""


class UnavailableError(CollectiveError):
    """A rank that takes part in a collective is gone."""
