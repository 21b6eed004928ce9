"""Prefetch: a thread reads batches ahead while the program computes, and copies them to the replica's GPU if it has one.

For a GPU the thread writes a batch to a slot, which is a pinned buffer and one of the same size on the GPU, and starts the copy
from the one to the other on a stream of its own. When the program takes the batch, it is copied on the program's stream into
new arrays, which the program may keep: that copy stays on the GPU, and takes a fraction of the time. Slots are reused.

Invariant: the thread does not communicate, and holds no reference to the iterator that the program has: it ends with that.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import accumulate, count, cycle
from queue import SimpleQueue
from typing import Any

import numpy as np

from mpistrat import ending
from mpistrat.arrays import Array, as_array, is_on_device, like
from mpistrat.device.cuda import Device, DeviceArray, Event, Stream, address
from mpistrat.errors import UnavailableError, UnsupportedDtypeError
from mpistrat.structures import flatten

_EXIT_SECONDS = 1.0  # a source may wait for ever
_Made = tuple[Any, BaseException | None]  # an element, or the error after which there is none: StopIteration at the end


def prefetched(source: Iterator[Any], buffer_size: int) -> Iterator[Any]:
    """Return what yields the elements of `source`, which a thread reads ahead. Errors of the source are raised in order."""
    made, taken, stopped = SimpleQueue[_Made](), SimpleQueue[None](), list[bool]()
    arguments = (source, buffer_size, made, taken, stopped)
    thread = threading.Thread(target=_fill, args=arguments, name="mpistrat-prefetch", daemon=True)
    thread.start()
    pid = os.getpid()

    def stop() -> None:
        stopped.append(True)
        taken.put(None)

    def stop_at_exit() -> None:
        """Wait for the thread, too: Python ends the process by a signal if it ends while a thread is inside C++."""
        stop()
        thread.join(_EXIT_SECONDS)

    def elements() -> Iterator[Any]:
        try:
            yield None
            while True:
                if os.getpid() != pid:
                    forked = f"process {os.getpid()} was forked from the one that reads these batches ahead"
                    raise UnavailableError(f"{forked}: it needs an iterator of its own, made there")
                element, error = made.get()
                taken.put(None)
                if isinstance(error, StopIteration):
                    return
                if error is not None:
                    raise error
                yield element
        finally:  # of the data, or of the iterator
            ending.forget(ending.Stage.FINISH, stop_at_exit)
            stop()

    ending.at(ending.Stage.FINISH, stop_at_exit)
    begun = elements()
    next(begun)  # what has not begun has no end
    return begun


def _fill(
    source: Iterator[Any], buffer_size: int, made: SimpleQueue[_Made], taken: SimpleQueue[None], stopped: list[bool]
) -> None:
    """Read ahead. What `threading` has for that is left locked by an interrupt of the program in it; queues are not."""
    for number in count():
        if number >= buffer_size:
            taken.get()
        if stopped:
            return
        try:
            made.put((next(source), None))
        except BaseException as error:  # of any kind: the consumer waits for an element or an error
            made.put((None, error))
            return


_ALIGNMENT = 256  # bytes, of each array in a slot
_POLL_SECONDS = 1e-4


def fetched(source: Iterator[Any], buffer_size: int, device: Device, lifts: bool = True) -> Iterator[Any]:
    """Return what yields the elements of `source`, prefetched if `buffer_size` is not 0, with their arrays on the GPU.

    Leaves that are not numeric, such as text, are unchanged; without `lifts` also those in host memory.
    """
    stream = device.stream()

    def follow() -> None:
        """Make the stream of the copies wait for the work on the current stream of the calling thread."""
        with device.activate():
            stream.wait(device.current_stream().record())

    def taken(batches: Iterator[_Slot]) -> Iterator[Any]:
        while True:
            if not buffer_size:
                follow()  # without a thread, the source may use what the program has just computed
            if (slot := next(batches, None)) is None:
                return
            with device.activate():
                arrays = slot.take()
            yield arrays

    follow()  # arrays of a dataset that are on the GPU are complete by then
    # one slot for each prefetched batch, and one for that which is being read or taken
    batches = _filled(source, lifts, [_Slot(device, stream) for _ in range(buffer_size + 1)])
    return taken(prefetched(batches, buffer_size) if buffer_size else batches)


class _Slot:
    """A pinned buffer and a buffer on the GPU, for one batch at a time."""

    def __init__(self, device: Device, stream: Stream) -> None:
        self.device, self.stream = device, stream
        self._pinned: Array = np.empty(0, np.uint8)
        self._memory: DeviceArray = None
        self._filled: Event | None = None
        self._emptied: Event | None = None
        # by their places among the leaves: arrays that are on the GPU anyway; of others where they are in the buffer, and what
        self._kept: dict[int, DeviceArray] = {}
        self._sent: dict[int, tuple[int, tuple[int, ...], np.dtype[Any]]] = {}

    def clear(self) -> None:
        """Wait until the pinned buffer may be overwritten; the stream waits for the buffer on the GPU."""
        while self._filled is not None and not self._filled.done():
            time.sleep(_POLL_SECONDS)
        if self._emptied is not None:
            self.stream.wait(self._emptied)
        self._kept, self._sent = {}, {}

    def fill(self, batch: Any, lifts: bool) -> None:
        """Start the copy of a batch."""
        self._leaves, self._structure = flatten(batch)
        found = {place: array for place, leaf in enumerate(self._leaves) if (array := _numbers(leaf, lifts)) is not None}
        self._kept = {place: array for place, array in found.items() if is_on_device(array)}
        sent = {place: array for place, array in found.items() if place not in self._kept}
        starts = [0, *accumulate(-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in sent.values())]
        if starts[-1] > self._pinned.nbytes:
            self._pinned, self._memory = self.device.pinned(starts[-1]), self.device.allocate(starts[-1])
        for (place, array), start in zip(sent.items(), starts, strict=False):
            dtype = array.dtype.newbyteorder("=")
            np.copyto(self._pinned[start : start + array.nbytes].view(dtype).reshape(array.shape), array)
            self._sent[place] = start, array.shape, dtype
        if starts[-1]:
            self.stream.copy(address(self._memory), address(self._pinned), starts[-1])
        self._filled = self.stream.record()

    def take(self) -> Any:
        """Return the batch in new arrays, ordered on the current stream."""
        stream = self.device.current_stream()
        assert self._filled is not None, "the slot was filled"
        stream.wait(self._filled)
        taken = {place: array.copy() for place, array in self._kept.items()}
        for place, (start, shape, dtype) in self._sent.items():
            taken[place] = self.device.array_module.empty(shape, dtype)
            if taken[place].nbytes:
                stream.copy(address(taken[place]), address(self._memory) + start, taken[place].nbytes)
        leaves, self._leaves = self._leaves, []  # the program's from now on
        for place, array in taken.items():
            leaves[place] = like(array, leaves[place])
        self._emptied = stream.record()
        return self._structure.unflatten(leaves)


def _filled(source: Iterator[Any], lifts: bool, slots: Sequence[_Slot]) -> Iterator[_Slot]:
    for slot in cycle(slots):
        with slot.device.activate(slot.stream):
            slot.clear()
            try:
                batch = next(source)
            except StopIteration:
                return
            slot.fill(batch, lifts)
        yield slot


def _numbers(leaf: Any, lifts: bool) -> Array | None:
    """Return a leaf as an array for the GPU; None if it is not numeric, or stays in host memory."""
    try:
        array = as_array(leaf)
    except UnsupportedDtypeError:
        return None
    return array if lifts or is_on_device(array) else None
