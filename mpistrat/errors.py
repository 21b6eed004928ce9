"""The exceptions of the library. Each is also a built-in exception, which a program may catch instead."""

from __future__ import annotations


class MpistratError(Exception):
    """Base of every exception that this library defines.

    Attributes
    ----------
    raised_everywhere : bool
        True where every rank of the job raises the same error at the same point, so that printing one traceback is enough.
    failed_ranks : tuple of int
        The ranks whose own errors caused this one: their tracebacks are the ones to read.
    """

    raised_everywhere: bool = False
    failed_ranks: tuple[int, ...] = ()


class LaunchError(MpistratError, RuntimeError):
    """The launcher and MPI disagree on the number of ranks, or MPI cannot be started."""


class SettingError(MpistratError, ValueError):
    """An ``MPISTRAT_*`` variable has a value that the setting does not accept."""


class TopologyError(MpistratError, ValueError):
    """A node shape is malformed, or does not match the ranks of the job."""


class TransportError(MpistratError, RuntimeError):
    """A transport that was asked for by name is not available here, or one has failed."""


class InvalidArgumentError(MpistratError, ValueError):
    """An argument has a value that the call does not accept."""


class OutOfRangeError(MpistratError, StopIteration):
    """The data has ended: ``iterator.get_next()`` raises this on every replica."""


class UnsupportedDtypeError(MpistratError, TypeError):
    """A value is not an array, or the operation is not defined for its dtype."""


class CancelledError(MpistratError, RuntimeError):
    """A function that was scheduled has not run: another one failed before it, or the strategy was closed."""


class CheckpointError(MpistratError, OSError):
    """A checkpoint cannot be written, read, or restored to the objects of this program. Raised on every rank."""

    raised_everywhere = True


class CollectiveError(MpistratError, RuntimeError):
    """A collective failed between ranks.

    Attributes
    ----------
    calls : tuple of str
        The different calls that ranks made, where they have compared them.
    """

    calls: tuple[str, ...] = ()


class AgreementError(CollectiveError):
    """Ranks made different calls where all must make the same one. Raised on every rank."""

    raised_everywhere = True


class DeadlineExceededError(CollectiveError, TimeoutError):
    """A collective did not finish within its deadline; some ranks may not have entered it."""


class UnavailableError(CollectiveError):
    """A rank of a collective has exited, or has left it with an error; or a server, the chief, or all workers are lost."""


__all__ = sorted(name for name, found in vars().items() if isinstance(found, type))  # noqa: PLE0605 - no name is written twice
