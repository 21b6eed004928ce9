"""Transport: the collectives of one group, as operations that are bound once and run many times.

As with MPI 4's persistent collectives, binding does all the planning: a verb takes a buffer and returns an `Operation`, which
allocates nothing when it runs.

Invariant: an operation does not block. ``run()`` returns steps, so that one thread can advance several operations, and
deadlines are checked in one place (`steps.drive`). Callers look at a transport's attributes, never at its class; only
`execution.select`, which makes it, knows that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np

from mpistrat.arrays import Array
from mpistrat.device.cuda import Device, DeviceArray
from mpistrat.device.kernels import Segment
from mpistrat.groups.group import Group
from mpistrat.reduction import Fold, ReduceOp
from mpistrat.steps import Steps, one_by_one
from mpistrat.transports.window import NodeWindow


class SegmentCache:
    """The segments of ranges of a list of arrays, by their sizes alone; `blocks` is what a transport has made of them."""

    def __init__(self, find: Callable[[int, int], Sequence[Segment]]) -> None:
        self.find = find
        self.blocks: Any = None


class FlatArrays:
    """The caller's arrays, C-contiguous, one-dimensional and of one dtype; sources and targets may be the same.

    `count` elements of them are combined: all, or those of a range.
    """

    def __init__(self, sources: Sequence[Array], targets: Sequence[Array], count: int, segments: SegmentCache) -> None:
        self.sources, self.targets, self.count, self.segments = sources, targets, count, segments
        self.dtype = targets[0].dtype
        self.nbytes = count * self.dtype.itemsize


@dataclass(frozen=True)
class Part:
    """The memory of elements [start, stop) of a result, by their index in the buffer that the operation is bound to."""

    start: int
    stop: int
    addends: tuple[Array, ...]  # one: the result; several: its reader folds them, in this order


@dataclass(frozen=True)
class Operation:
    """A verb bound to its buffer.

    ``run()`` starts it and returns its steps. A collective call: all ranks of the group run their operations in the same order.
    """

    run: Callable[[], Steps]
    parts: list[Part]
    """Memory of the result after the last step; valid until this rank calls `Transport.release`. Between nodes all of it is in
    the buffer, as the next phase works on that."""
    scratch_bytes: int = 0  # its own memory, besides the buffer


def in_turn(parts: list[Part], *acts: Callable[[], Steps], scratch_bytes: int = 0) -> Operation:
    """Return the operation of several acts, one after the other."""
    return Operation(partial(one_by_one, acts), parts, scratch_bytes)


class Transport(ABC):
    """Moves bytes between the ranks of one group, on the group's communicator only."""

    name: ClassVar[str]
    device: Device | None = None
    """The GPU whose memory the verbs work on; None for host memory."""
    window: NodeWindow | None = None
    """The shared memory of the ranks of a node; None if they share none."""
    compares_calls: bool = False
    """Whether messages or barriers of different calls never match; calls over other transports are compared afterwards."""
    has_channels: bool = False
    """Whether operations on different channels may begin in any order: if not, all ranks must begin them in the same one."""

    def __init__(self, group: Group) -> None:
        self.group = group

    @classmethod
    def probe(cls, group: Group) -> str:
        """Return why this transport cannot serve the group, as far as this rank can tell alone, or an empty text."""
        return ""

    def allocate(self, nbytes: int) -> Array:
        """Return `nbytes` of memory (uint8) that the verbs work on fastest; some accept only this. A collective call.

        Every rank asks for the same size, once until `close`. If one has too little, all raise TransportError.
        """
        return np.empty(nbytes, np.uint8)

    @abstractmethod
    def all_reduce(self, buffer: Array, op: ReduceOp, channel: int = 0) -> Operation:
        """Bind: combine the buffers of all ranks; every rank gets the result, between nodes in the buffer itself.

        A buffer is one-dimensional and contiguous, of one dtype and length on all ranks, and worked on in place. MEAN combines
        as SUM. Operations between nodes on different channels may be in flight at the same time.
        """

    @abstractmethod
    def reduce_scatter(self, buffer: Array, bounds: Sequence[int], op: ReduceOp) -> Operation:
        """Bind: combine the buffers; rank r gets elements ``bounds[r]:bounds[r + 1]``, in place. The rest is undefined."""

    @abstractmethod
    def all_gather(self, buffer: Array, bounds: Sequence[int]) -> Operation:
        """Bind: every rank gets elements ``bounds[r]:bounds[r + 1]`` of each rank r."""

    def refusal(self, dtype: np.dtype[Any], op: ReduceOp) -> str:
        """Return why such values cannot be combined, or an empty text; binding a verb to them raises TransportError."""
        return ""

    @property
    def label(self) -> str:
        """Its name, and by what it works if there is a choice, the same on all ranks of the group."""
        return self.name

    def release(self) -> int:
        """Announce that this rank has read every result so far; return how often it has done so, for `fence`."""
        return 0

    def fence(self, number: int) -> Steps:
        """Wait until all peers have called `release` `number` times: then memory can be written again."""
        return iter(())

    @property
    def scratch_bytes(self) -> int:
        """The memory that its operations share, besides what `allocate` returned; host or device memory, as the verbs use."""
        return 0

    def close(self) -> None:  # noqa: B027 - most transports have nothing to free
        """Free what `allocate` returned. A collective call."""

    def dispose(self) -> None:
        """Free everything; the transport cannot be used any more. A collective call."""
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.group!r})"

    # what only some transports can do, as these attributes say

    combines_arrays: bool = False
    adds_in_order: ClassVar[bool] = False

    def all_reduce_arrays(self, arrays: FlatArrays, fold: Fold) -> Steps:
        """Combine the caller's arrays without a buffer, if `combines_arrays` is true. A collective call.

        Their number and sizes are the same on all ranks.
        """
        raise NotImplementedError(f"{self.name} works on buffers")

    def all_reduce_in_order(self, buffer: Array, op: ReduceOp) -> Operation:
        """Bind `all_reduce`, if `adds_in_order` is true: the bits of the result depend on values and the ranks' order alone."""
        return self.all_reduce(buffer, op)


class Watched(NamedTuple):
    """What a thread asks that looks after operations which end when they are enqueued, and whom it tells."""

    must_wait: Callable[[], bool]  # whether the present one is to end when it is done all the same
    ends: Callable[[], float]  # when the deadline of the present one passes, on the clock of time.monotonic; 0: it has none
    peer_has_aborted: Callable[[], bool]  # whether what is under way will not end
    tell_peers: Callable[[], None]  # that this rank has aborted it
    has_raised: Callable[[], bool]  # whether the program has got an error of a collective


class DeviceTransport(Transport):
    """A transport of the memory of GPUs: of the present one, unless another `device` is given."""

    device: Device
    peers_read: bool = False
    """Whether peers read this rank's memory by themselves, so that copies to it must have completed before a barrier."""
    combines_halves: ClassVar[bool] = False
    """Whether 16-bit floats are combined in their own dtype."""
    has_windows: bool = False
    """Whether `allocate` returns memory of NCCL in windows, which MPI may not be able to send."""

    def __init__(self, group: Group, device: Device | None = None) -> None:
        super().__init__(group)
        self.device = device or Device()

    def allocate(self, nbytes: int) -> DeviceArray:
        """Return memory of the device."""
        return self.device.allocate(nbytes)

    @property
    def pinned_bytes(self) -> int:
        """The pinned host memory through which device memory is staged."""
        return 0

    # for those whose operations end when they are enqueued, and whose kernels wait for peers

    def watch(self, watched: Watched) -> None:
        """Let operations end, from now on, when they are enqueued, if they can."""

    def raise_failure(self, grace_seconds: float = 0.0) -> None:
        """Raise TransportError if what was enqueued has been aborted; other ranks have so long to say why they gave up."""

    def settle(self) -> Steps:
        """Wait until all that was enqueued has ended, if operations end before that."""
        return iter(())

    def abort(self, reason: str) -> None:
        """Abort operations that would wait forever for peers. The peers must abort theirs too."""
