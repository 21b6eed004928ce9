"""cuda_aware: a ring, or fewer and longer steps, over Isend and Irecv of device memory, summed by the device.

`ring` and `halving` have the schedules. Small arrays are gathered and summed by every rank, in the order of the ranks.

MPI moves bytes between GPUs and does nothing else: its own reductions of device memory run on the host's processor, where
they work at all.

Invariant: MPI knows no streams. What is sent has been written, which the host has seen by an event; what was received is read
by work that is put on a stream afterwards. MPI gets address, count and datatype, never an array: it would sum the bytes of a
bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat import settings
from mpistrat.device.abstract import Device, DeviceArray, Event, Stream, address
from mpistrat.device.binding import bound_device
from mpistrat.device.cuda import CudaDevice
from mpistrat.device.kernels import PACKET_BYTES, THREADS, fold_into_kernel, fold_kernel
from mpistrat.errors import DeadlineExceededError, TransportError
from mpistrat.groups.agreement import bcast_or_raise
from mpistrat.groups.group import Group, keep_alive_for_peers
from mpistrat.launch.cuda_awareness import find_verdict
from mpistrat.reduction import ReduceOp
from mpistrat.transports.base import Operation, Part, Transport
from mpistrat.transports.halving import Halving, Round
from mpistrat.transports.ring import Ring
from mpistrat.transports.steps import WAITING, WORKED, Steps, drive, until

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["CudaAwareTransport", "segment_bytes"]

# MPI matches each message, and registers its memory where it must; UCX pipelines memory of NVIDIA GPUs in fragments of 4 MiB
SEGMENT_BYTES = 1 << 22
SMALL_SEGMENT_BYTES = 1 << 20
SEGMENTS_OF_A_PART = 4  # if they are not too small: one is summed while others are sent
RECEIVES_AHEAD = 4

_FIRST_COUNT = 1 << 12
_FIRST_SECONDS = 60.0


class CudaAwareTransport(Transport):
    """All verbs on device memory, for an MPI that takes it.

    ``schedule(num_bytes)`` returns ``ring``, ``halving`` or ``gather``, the same on all ranks; what does not fit in the memory
    of the ring's segments goes by the ring.
    """

    name = "cuda_aware"

    def __init__(
        self,
        group: Group,
        device: Device | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        schedule: Callable[[int], str] = lambda num_bytes: "ring",
    ) -> None:
        super().__init__(group)
        self.device = self._device = device or CudaDevice()
        self._stream = self._device.stream()
        self._segment_bytes, self._schedule = segment_bytes, schedule
        self._receive_buffers: dict[int, DeviceArray] = {}

    @classmethod
    def probe(cls, group: Group) -> str:
        """Return why MPI is not used on device memory, or an empty text: its build says so, or a first sum was wrong."""
        verdict = bcast_or_raise(group.comm, find_verdict)
        return cls(group, bound_device()).first_exchange() if verdict.is_aware else verdict.reason

    def first_exchange(self) -> str:
        """Return what was wrong with a first sum of known values, or an empty text. A collective call.

        Raises
        ------
        TransportError
            On all ranks of the group, if it did not end within a minute on one of them, or one has no memory for it.
        """
        try:
            is_right, failure = self._sums_rightly(), ""
        except (DeadlineExceededError, TransportError) as error:
            is_right, failure = False, str(error)
        answers = self.group.comm.allgather((is_right, failure))
        failure = next((text for _, text in answers if text), "")
        if failure:  # what is under way would be taken for messages of others
            raise TransportError(f"{self.group.name}: {failure}; {settings.MPI_GPU.name}=off goes through memory of the host")
        return "" if all(right for right, _ in answers) else "a first sum of device memory gave wrong values"

    def allocate(self, nbytes: int) -> DeviceArray:
        """Return memory of the device."""
        return self._device.allocate(nbytes)

    def all_reduce(self, buffer: DeviceArray, op: ReduceOp, channel: int = 0) -> Operation:
        """Bind a ring, recursive halving and doubling, or a sum of what is gathered, by the number of bytes."""
        size, receive_bytes = self.group.size, RECEIVES_AHEAD * self._segment_bytes
        schedule = self._schedule(buffer.nbytes) if buffer.size else "ring"
        # what is received in a round is aligned
        if schedule == "halving" and buffer.nbytes + size.bit_length() * PACKET_BYTES <= receive_bytes:
            return self._halving(buffer, op, channel)
        if schedule == "gather" and size * _stride(buffer) <= receive_bytes:
            return self._gathered(buffer, op, channel)
        ring = Ring.all_reduce(self.group.rank, size, buffer.size, self._limit(buffer, -(-buffer.size // size)))
        return self._operation(buffer, ring, op, channel)

    def reduce_scatter(self, buffer: DeviceArray, bounds: Sequence[int], op: ReduceOp) -> Operation:
        """Bind the first half of the ring, shifted so that rank r ends with part r."""
        ring = Ring.reduce_scatter(self.group.rank, self.group.size, bounds, self._limit(buffer, _longest(bounds)))
        return self._operation(buffer, ring, op)

    def all_gather(self, buffer: DeviceArray, bounds: Sequence[int]) -> Operation:
        """Bind the second half of the ring."""
        ring = Ring.all_gather(self.group.rank, self.group.size, bounds, self._limit(buffer, _longest(bounds)))
        return self._operation(buffer, ring, ReduceOp.SUM)

    @property
    def scratch_bytes(self) -> int:
        """The memory in which segments are received: as many for each channel as are received ahead."""
        return sum(memory.nbytes for memory in self._receive_buffers.values())

    def _sums_rightly(self) -> bool:
        rank, size = self.group.rank, self.group.size
        values = np.arange(_FIRST_COUNT, dtype=np.int32)
        with self._device.activate():
            buffer = self.allocate(values.nbytes).view(np.int32)
            self._device.put(buffer, values + rank)
            drive(self.all_reduce(buffer, ReduceOp.SUM).run(), lambda: "the first exchange of device memory", _FIRST_SECONDS)
            return np.array_equal(self._device.get(buffer), values * size + sum(range(size)))

    def _limit(self, buffer: DeviceArray, longest_part: int) -> int:
        """Return the elements of the longest segment, if a part has up to `longest_part` of them."""
        itemsize = int(buffer.dtype.itemsize)
        longest = segment_bytes(longest_part * itemsize, self._segment_bytes)
        return min(longest, self.group.settings[settings.MAX_MESSAGE_BYTES]) // itemsize

    def _halving(self, buffer: DeviceArray, op: ReduceOp, channel: int) -> Operation:
        limit = self.group.settings[settings.MAX_MESSAGE_BYTES] // int(buffer.dtype.itemsize)
        halving = Halving.all_reduce(self.group.rank, self.group.size, buffer.size, limit)
        kernel, received = fold_into_kernel(buffer.dtype, op), self._receive_buffer(channel)
        bound = _DeviceRounds(self.group, self._device, self._stream, buffer, halving.rounds, kernel, received, channel)
        return Operation(bound.run, [Part(0, buffer.size, (buffer,))])

    def _gathered(self, buffer: DeviceArray, op: ReduceOp, channel: int) -> Operation:
        """Bind: gather the buffers of all ranks, and fold them in the order of the ranks: all get the same bits."""
        rank, size, stride, received = self.group.rank, self.group.size, _stride(buffer), self._receive_buffer(channel)
        limit = self.group.settings[settings.MAX_MESSAGE_BYTES]
        halving = Halving.all_gather(rank, size, range(0, (size + 1) * stride, stride), limit)
        bound = _DeviceRounds(self.group, self._device, self._stream, received, halving.rounds, "", received, channel)
        kernel, table = fold_kernel(buffer.dtype, op), self._device.allocate(8 * size)
        self._device.prepare(kernel)
        self._device.put(table, np.array([address(received) + peer * stride for peer in range(size)], np.uint64).view(np.uint8))
        num_blocks = _num_blocks(buffer.size, int(buffer.dtype.itemsize))
        in_order = np.int32(0), max(buffer.size, 1), 0  # from rank 0 on, in one part
        arguments = (address(table), np.int32(size), 0, address(buffer), buffer.size, *in_order)

        def run() -> Steps:
            self._device.current_stream().copy(address(received) + rank * stride, address(buffer), buffer.nbytes)
            yield from bound.run()
            self._stream.launch(kernel, num_blocks, arguments)
            yield from until(self._stream.record())

        return Operation(run, [Part(0, buffer.size, (buffer,))], table.nbytes)

    def _receive_buffer(self, channel: int) -> DeviceArray:
        """Return where the messages of a channel land, whose operations run one after the other."""
        if channel not in self._receive_buffers:
            self._receive_buffers[channel] = self._device.allocate(RECEIVES_AHEAD * self._segment_bytes)
        return self._receive_buffers[channel]

    def _operation(self, buffer: DeviceArray, ring: Ring, op: ReduceOp, channel: int = 0) -> Operation:
        bound = _DeviceRing(self.group, self._device, self._stream, buffer, ring, op, self._receive_buffer(channel), channel)
        return Operation(bound.run, [Part(0, buffer.size, (buffer,))])


def segment_bytes(part_bytes: int, longest: int = SEGMENT_BYTES) -> int:
    """Return the bytes of the segments that a part is sent in: large ones of a large part, several of a part of middle size."""
    return min(longest, max(SMALL_SEGMENT_BYTES, -(-part_bytes // SEGMENTS_OF_A_PART)))


class _DeviceRing:
    """A ring bound to its buffer."""

    def __init__(
        self,
        group: Group,
        device: Device,
        stream: Stream,
        buffer: DeviceArray,
        ring: Ring,
        op: ReduceOp,
        received: DeviceArray,
        channel: int,
    ) -> None:
        self._comm, self._call, self._channel, self._device, self._stream = group.comm, group.call, channel, device, stream
        self._left, self._right = (group.rank - 1) % group.size, (group.rank + 1) % group.size
        self._memory = (buffer, received)  # held as long as MPI may write there
        self._segments, self._sent_before = ring.segments, ring.sent_before()
        itemsize, start = int(buffer.dtype.itemsize), address(buffer)
        slot_bytes = received.nbytes // RECEIVES_AHEAD
        self._sends = [_message(start, part, itemsize) for part in ring.sends]
        self._receives: list[list[Any]] = []
        self._folds: list[tuple[str, int, tuple[Any, ...]] | None] = []
        kernel = fold_into_kernel(buffer.dtype, op) if any(ring.reduces) else ""
        if kernel:
            device.prepare(kernel)
        for index, (target, reduces) in enumerate(zip(ring.targets, ring.reduces, strict=True)):
            if not reduces:
                self._receives.append(_message(start, target, itemsize))
                self._folds.append(None)
                continue
            count, slot = target.stop - target.start, address(received) + index % RECEIVES_AHEAD * slot_bytes
            self._receives.append(_message(slot, slice(0, count), itemsize))
            num_blocks = _num_blocks(count, itemsize)
            self._folds.append((kernel, num_blocks, (start + target.start * itemsize, slot, count)) if count else None)

    def run(self) -> Steps:
        count = len(self._sends)
        if not count:
            return
        # the buffer is written, and nobody reads what will be overwritten
        yield from until(self._device.current_stream().record())
        self._tag = self._call.tag(self._channel)
        sent: list[MPI.Request] = []
        arriving: list[MPI.Request] = []
        folding: list[Event | None] = []  # of each message that has arrived, until it is there
        passed_on = 0
        try:
            sent.extend(self._comm.Isend(message, self._right, self._tag) for message in self._sends[: self._segments])
            while passed_on < count:
                worked = self._receive_ahead(arriving, sent, passed_on)
                if len(folding) < len(arriving) and arriving[len(folding)].Test():
                    folding.append(self._fold(len(folding)))
                    worked = True
                if passed_on < len(folding) and _is_over(folding[passed_on]):
                    if passed_on + self._segments < count:
                        sent.append(self._comm.Isend(self._sends[passed_on + self._segments], self._right, self._tag))
                    folding[passed_on] = None
                    passed_on += 1
                    worked = True
                yield WORKED if worked else WAITING
            for request in sent:
                while not request.Test():
                    yield WAITING
        except BaseException:
            keep_alive_for_peers((self, sent, arriving))  # MPI may still write there
            raise

    def _receive_ahead(self, arriving: list[MPI.Request], sent: list[MPI.Request], passed_on: int) -> bool:
        """Post the next receive if its slot is free, or if what it overwrites has left; return whether it was posted."""
        index = len(arriving)
        if index >= min(passed_on + RECEIVES_AHEAD, len(self._receives)):
            return False
        before = self._sent_before[index]
        if before is not None and (before >= len(sent) or not sent[before].Test()):
            return False
        arriving.append(self._comm.Irecv(self._receives[index], self._left, self._tag))
        return True

    def _fold(self, index: int) -> Event | None:
        """Let the device fold a message that has arrived; return the event of its end."""
        fold = self._folds[index]
        if fold is None:
            return None
        kernel, num_blocks, arguments = fold
        self._stream.launch(kernel, num_blocks, arguments)
        return self._stream.record()


class _DeviceRounds:
    """Rounds of messages bound to memory; what is summed is received elsewhere, each message at a place of its own."""

    def __init__(
        self,
        group: Group,
        device: Device,
        stream: Stream,
        memory: DeviceArray,
        rounds: Sequence[Round],
        kernel: str,
        received: DeviceArray,
        channel: int,
    ) -> None:
        self._comm, self._call, self._channel, self._device, self._stream = group.comm, group.call, channel, device, stream
        self._memory, self._kernel = (memory, received), kernel  # held as long as MPI may write there
        if kernel:
            device.prepare(kernel)
        self._rounds: list[_BoundRound] = []
        itemsize, start, free = int(memory.dtype.itemsize), address(memory), address(received)
        for each in rounds:
            bound = _BoundRound(each, [_message(start, part, itemsize) for part in each.sends], [], [])
            for target in each.targets:
                if not each.reduces:
                    bound.receives.append(_message(start, target, itemsize))
                    continue
                count = target.stop - target.start
                bound.receives.append(_message(free, slice(0, count), itemsize))
                bound.folds.append((_num_blocks(count, itemsize), (start + target.start * itemsize, free, count)))
                free += count * itemsize
            free = -(-free // PACKET_BYTES) * PACKET_BYTES
            self._rounds.append(bound)

    def run(self) -> Steps:
        yield from until(self._device.current_stream().record())  # as for the ring
        tag = self._call.tag(self._channel)
        requests: list[MPI.Request] = []
        try:
            for _, rounds in groupby(self._rounds, key=lambda each: each.round.reduces):
                # received ahead: rounds that gather overwrite what earlier ones have sent, and no other memory
                arriving = [
                    (each, [self._comm.Irecv(message, each.round.source, tag) for message in each.receives]) for each in rounds
                ]
                requests += chain.from_iterable(received for _, received in arriving)
                for each, received in arriving:
                    sent = [self._comm.Isend(message, each.round.to, tag) for message in each.sends]
                    requests += sent
                    for request in (*received, *sent):
                        while not request.Test():
                            yield WAITING
                    yield from self._fold(each)
        except BaseException:
            keep_alive_for_peers((self, requests))
            raise

    def _fold(self, each: _BoundRound) -> Steps:
        for num_blocks, arguments in each.folds:
            self._stream.launch(self._kernel, num_blocks, arguments)
        yield WORKED
        if each.folds:
            yield from until(self._stream.record())


@dataclass(frozen=True)
class _BoundRound:
    round: Round
    sends: list[list[Any]]
    receives: list[list[Any]]
    folds: list[tuple[int, tuple[Any, ...]]]


def _stride(buffer: DeviceArray) -> int:
    """Return the distance of gathered buffers in bytes, so that all are aligned."""
    return -(-int(buffer.nbytes) // PACKET_BYTES) * PACKET_BYTES


def _num_blocks(count: int, itemsize: int) -> int:
    return -(-count * itemsize // (THREADS * PACKET_BYTES))


def _longest(bounds: Sequence[int]) -> int:
    return max(stop - start for start, stop in pairwise(bounds))


def _is_over(event: Event | None) -> bool:
    return event is None or event.done()


def _message(start: int, part: slice, itemsize: int) -> list[Any]:
    from mpi4py import MPI

    nbytes = (part.stop - part.start) * itemsize
    return [MPI.buffer.fromaddress(start + part.start * itemsize, nbytes), nbytes, MPI.BYTE]
