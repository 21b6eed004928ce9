"""Transport: the verbs of one group, as operations that are bound once and run many times.

As with MPI 4's persistent collectives, binding does all the planning: a verb is given its buffer and returns an
`Operation`; running it allocates nothing.

File law: an operation does not block. ``run()`` returns steps, so that one thread can advance several operations, and every
wait has its deadline in one place (`steps.drive`). What a transport can do beside the verbs its attributes say: nobody
asks which transport it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mpistrat.arrays import Array
from mpistrat.device.abstract import Device
from mpistrat.groups.group import Group
from mpistrat.reduction import Fold, ReduceOp
from mpistrat.transports.flat_arrays import FlatArrays
from mpistrat.transports.steps import Steps
from mpistrat.transports.window import NodeWindow

__all__ = ["Operation", "Part", "Transport"]


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
    window: NodeWindow | None = None
    """In which ranks of a node meet; None where they share no memory."""
    combines_arrays: ClassVar[bool] = False
    """Whether `all_reduce_between` combines arrays of the caller."""
    peers_read: ClassVar[bool] = False
    """Whether peers read the memory of this rank by themselves, so that it must be ready when they are told so."""

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

    def all_reduce_between(self, arrays: FlatArrays, fold: Fold) -> Steps:
        """Combine arrays of the caller of all ranks, without a buffer; where `combines_arrays` says so. A collective call.

        Parameters
        ----------
        arrays : FlatArrays
            As many, and as long, on all ranks.
        fold : Fold
            How to combine.
        """
        raise NotImplementedError(f"{self.name} works on buffers")

    def at_once(self, op: ReduceOp, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Callable[[Array, Array | None], Array]:
        """Return what combines one array of the caller and returns the target: a new array where that is None.

        For arrays of one shape and dtype, where `combines_arrays` says so; it is a collective call.
        """
        raise NotImplementedError(f"{self.name} works on buffers")

    def refusal(self, dtype: np.dtype[Any], op: ReduceOp) -> str:
        """Return why such values cannot be combined, or an empty text; binding a verb to them raises TransportError."""
        return ""

    def release(self) -> int:
        """Tell the peers that this rank has read every result so far; return a mark for `fence`."""
        return 0

    def fence(self, mark: int) -> Steps:
        """Wait until all peers have passed the release that returned `mark` here, so that memory can be written again."""
        return iter(())

    def settle(self) -> Steps:
        """Wait until all that was enqueued on a device has ended, where operations end earlier."""
        return iter(())

    def abort(self, reason: str) -> None:  # noqa: B027 - most transports wait for nothing that their peers must end
        """Give up what is under way and would wait for peers for ever. The peers must do likewise."""

    @property
    def scratch_bytes(self) -> int:
        """The memory that its operations share, beside what `allocate` returned: of the kind that the verbs work on."""
        return 0

    @property
    def pinned_bytes(self) -> int:
        """The memory of the host that memory of a device is copied through."""
        return 0

    def close(self) -> None:  # noqa: B027 - most transports have nothing to give back
        """Give back what `allocate` made. A collective call."""

    def dispose(self) -> None:
        """Give back everything; the transport cannot be used any more. A collective call."""
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.group!r})"
