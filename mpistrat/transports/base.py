"""Transport: the verbs of one group, as operations that are bound once and run many times.

As with MPI 4's persistent collectives, binding does all the planning: a verb is given its buffer and returns an
`Operation`; running it allocates nothing.

File law: an operation does not block. ``run()`` returns a generator that yields WAITING wherever it would have to wait and
WORKED after each piece of work, so that one thread can advance several operations, and every wait has its deadline in one
place (`drive`).
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mpistrat.arrays import Array
from mpistrat.device.base import Device
from mpistrat.errors import DeadlineExceededError
from mpistrat.groups.group import Group
from mpistrat.reduction import ReduceOp

__all__ = ["WAITING", "WORKED", "Operation", "Part", "Steps", "Transport", "address", "drive", "give_way", "leave_to_peers"]

Steps = Iterator[bool]
WAITING, WORKED = False, True

# a yield that takes longer has let another process run on this core, perhaps beside an idle one: a rank that sleeps is woken
# where there is room, while ranks that only yield to each other may share a core for long
_SHARED_CORE_SECONDS = 20e-6
_SLEEP_SECONDS = 1e-6
# a small call ends within so many turns, and sooner than the shortest sleep
_SHORT_WAITS = 64
_POLLS_PER_CLOCK = 256

_left_to_peers: list[object] = []


@dataclass(frozen=True)
class Part:
    """Where elements [start, stop) of a result lie.

    Attributes
    ----------
    start, stop : int
        The elements, counted in the buffer that the operation was bound to.
    addends : tuple of ndarray
        One array: the result. Several: whoever reads the result folds them, in this order, on the way.
    """

    start: int
    stop: int
    addends: tuple[Array, ...]


@dataclass(frozen=True)
class Operation:
    """A verb bound to its buffer.

    Attributes
    ----------
    run : callable
        Starts the operation and returns its steps. A collective call: all ranks of the group run their operations in
        one order.
    parts : list of Part
        Where the result can be read once the steps are through, until this rank calls `Transport.release`.
    scratch_bytes : int
        Memory of its own, beside the buffer.
    """

    run: Callable[[], Steps]
    parts: list[Part]
    scratch_bytes: int = 0


class Transport(ABC):
    """Moves bytes between the ranks of one group.

    Parameters
    ----------
    group : Group
        The ranks to join; the transport sends on its communicator and on nothing else.
    """

    name: ClassVar[str]
    device: Device | None = None
    """The GPU whose memory the verbs work on; None: they work on memory of the host."""

    def __init__(self, group: Group) -> None:
        self.group = group

    @classmethod
    @abstractmethod
    def probe(cls, group: Group) -> str:
        """Return why this transport cannot serve the group, or an empty text where it can. A collective call."""

    @abstractmethod
    def allocate(self, nbytes: int) -> Array:
        """Return `nbytes` of memory (uint8) that the verbs work on fastest; some work on no other. A collective call."""

    @abstractmethod
    def all_reduce(self, buffer: Array, op: ReduceOp, channel: int = 0) -> Operation:
        """Bind: combine the buffers of all ranks; every rank gets the result.

        Parameters
        ----------
        buffer : ndarray
            One-dimensional and contiguous, of one dtype and length on all ranks; worked on in place.
        op : ReduceOp
            How to combine; MEAN combines as SUM.
        channel : int
            Operations between nodes that are bound to different channels may be under way together. See `tag_of`.
        """

    @abstractmethod
    def reduce_scatter(self, buffer: Array, bounds: Sequence[int], op: ReduceOp) -> Operation:
        """Bind: combine the buffers; rank r gets elements ``bounds[r]:bounds[r + 1]``, in place. The rest is undefined."""

    @abstractmethod
    def all_gather(self, buffer: Array, bounds: Sequence[int]) -> Operation:
        """Bind: every rank gets elements ``bounds[r]:bounds[r + 1]`` of each rank r."""

    @abstractmethod
    def reduce(self, buffer: Array, op: ReduceOp, root: int = 0) -> Operation:
        """Bind: combine the buffers; `root` gets the result in place. The buffers of the others are undefined."""

    @abstractmethod
    def broadcast(self, buffer: Array, root: int = 0) -> Operation:
        """Bind: every rank gets the buffer of `root`."""

    def refusal(self, dtype: np.dtype[Any], op: ReduceOp) -> str:
        """Return why such values cannot be combined, or an empty text; binding a verb to them raises TransportError."""
        return ""

    def release(self) -> int:
        """Tell the peers that this rank has read every result so far; return a mark for `fence`."""
        return 0

    def fence(self, mark: int) -> Steps:
        """Wait until all peers have passed the release that returned `mark` here, so that memory can be written again."""
        return iter(())

    @property
    def scratch_bytes(self) -> int:
        """The memory that its operations share, beside what `allocate` returned."""
        return 0

    def close(self) -> None:  # noqa: B027 - most transports have nothing to give back
        """Give back what `allocate` made. A collective call."""

    def dispose(self) -> None:
        """Give back everything; the transport cannot be used any more. A collective call."""
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.group!r})"


def drive(
    steps: Steps,
    what: Callable[[], str],
    timeout_seconds: float = 0.0,
    overdue: Callable[[], DeadlineExceededError] | None = None,
    rest: Callable[[int], None] | None = None,
    look: Callable[[], None] | None = None,
) -> None:
    """Advance `steps` to the end, giving the core away whenever they wait.

    Parameters
    ----------
    steps : iterator
        What to advance.
    what : callable
        Says, for the error, what is being waited for.
    timeout_seconds : float
        Deadline in seconds from now; 0 means none.
    overdue : callable, optional
        Returns the error to raise once the deadline has passed; by default it says what did not end.
    rest : callable, optional
        Called with how often in a row the steps waited before, to give the core away; by default just for a moment.
    look : callable, optional
        Called now and then while the steps wait; it raises if they will not end.

    Raises
    ------
    DeadlineExceededError
        If the deadline passes first.
    """
    give = give_way if rest is None else rest
    polls_per_clock = _POLLS_PER_CLOCK if rest is None else 1
    polls = waits = 0
    deadline = time.monotonic() + timeout_seconds if timeout_seconds else 0.0
    for worked in steps:
        if worked:
            waits = 0
            continue
        give(waits)
        waits += 1
        polls += 1
        if polls % polls_per_clock:
            continue
        try:
            if look is not None:
                look()
            if deadline and time.monotonic() > deadline:
                raise (
                    DeadlineExceededError(f"{what()} did not end within {timeout_seconds:g} s; not all ranks have arrived")
                    if overdue is None
                    else overdue()
                )
        except BaseException:
            if isinstance(steps, Generator):
                steps.close()  # what is cut off here must not go on later
            raise


def give_way(waits: int = 0) -> None:
    """Let another process have the core, however often there was nothing to do; sleep where it is shared."""
    before = time.perf_counter()
    os.sched_yield()
    if time.perf_counter() - before > _SHARED_CORE_SECONDS:
        time.sleep(_SLEEP_SECONDS)


def address(array: Array) -> int:
    """Return where the array's memory begins."""
    return int(array.__array_interface__["data"][0])


def leave_to_peers(memory: object) -> None:
    """Never free what a failed collective worked on: a peer that is late may still read and write it."""
    _left_to_peers.append(memory)
