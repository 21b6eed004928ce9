"""Prefetch: a thread reads batches ahead while the program computes, and copies them to the replica's GPU if it has one.

For a GPU the thread writes a batch to a slot, which is a pinned buffer and one of the same size on the GPU, and starts the copy
from the one to the other on a stream of its own. When the program takes the batch, it is copied on the program's stream into
new arrays, which the program may keep: that copy stays on the GPU, and takes a fraction of the time. Slots are reused.

Invariant: the thread does not communicate, and holds no reference to the iterator that the program has: it ends with that.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import count, cycle
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from mpistrat.arrays import Array, as_array, is_on_device, like
from mpistrat.device.cuda import Device, DeviceArray, Event, Stream, address
from mpistrat.errors import UnavailableError, UnsupportedDtypeError
from mpistrat.structures import Structure, flatten

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
            atexit.unregister(stop_at_exit)
            stop()

    atexit.register(stop_at_exit)
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

    def taken(batches: Iterator[_Fetched]) -> Iterator[Any]:
        while True:
            if not buffer_size:
                follow()  # without a thread, the source may use what the program has just computed
            if (batch := next(batches, None)) is None:
                return
            with device.activate():
                arrays = batch.take()
            yield arrays

    follow()  # arrays of a dataset that are on the GPU are complete by then
    # one slot for each prefetched batch, and one for that which is being read or taken
    batches = _copied(source, lifts, stream, [_Slot(device, stream) for _ in range(buffer_size + 1)])
    return taken(prefetched(batches, buffer_size) if buffer_size else batches)


class _Part(NamedTuple):
    """An array of a batch: its offset in the slot, or the array itself if it is on the GPU already."""

    start: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    on_device: DeviceArray = None


class _Slot:
    """A pinned buffer and a buffer on the GPU, for one batch at a time."""

    def __init__(self, device: Device, stream: Stream) -> None:
        self.device, self._stream = device, stream
        self.pinned: Array = np.empty(0, np.uint8)
        self.memory: DeviceArray = None
        self.filled: Event | None = None
        self.emptied: Event | None = None
        self.kept: Sequence[_Part] = ()

    def clear(self) -> None:
        """Wait until the pinned buffer may be overwritten; the stream waits for the buffer on the GPU."""
        while self.filled is not None and not self.filled.done():
            time.sleep(_POLL_SECONDS)
        if self.emptied is not None:
            self._stream.wait(self.emptied)
        self.kept = ()

    def fill(self, arrays: Sequence[Array]) -> Sequence[_Part]:
        """Start the copy of arrays in host memory, and return where each array is."""
        parts, nbytes = [], 0
        for array in arrays:
            if is_on_device(array):
                parts.append(_Part(0, array.shape, array.dtype, array))
            else:
                parts.append(_Part(nbytes, array.shape, array.dtype.newbyteorder("=")))
                nbytes += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        if nbytes > self.pinned.nbytes:
            self.pinned, self.memory = self.device.pinned(nbytes), self.device.allocate(nbytes)
        for part, array in zip(parts, arrays, strict=True):
            if part.on_device is None:
                target = self.pinned[part.start : part.start + array.nbytes].view(part.dtype).reshape(part.shape)
                np.copyto(target, array)
        if nbytes:
            self._stream.copy(address(self.memory), address(self.pinned), nbytes)
        self.filled, self.kept = self._stream.record(), parts
        return parts


class _Fetched(NamedTuple):
    """A batch that is being copied: its leaves, of which those in `places` are arrays, described by `parts`."""

    slot: _Slot
    leaves: list[Any]
    structure: Structure
    places: list[int]
    parts: Sequence[_Part]

    def take(self) -> Any:
        """Return the batch in new arrays, ordered on the current stream."""
        stream = self.slot.device.current_stream()
        assert self.slot.filled is not None, "the slot was filled"
        stream.wait(self.slot.filled)
        for place, part in zip(self.places, self.parts, strict=True):
            self.leaves[place] = like(self._array(part, stream), self.leaves[place])
        self.slot.emptied = stream.record()
        return self.structure.unflatten(self.leaves)

    def _array(self, part: _Part, stream: Stream) -> DeviceArray:
        if part.on_device is not None:
            return part.on_device.copy()
        array = self.slot.device.array_module.empty(part.shape, part.dtype)
        if array.nbytes:
            stream.copy(address(array), address(self.slot.memory) + part.start, array.nbytes)
        return array


def _copied(source: Iterator[Any], lifts: bool, stream: Stream, slots: Sequence[_Slot]) -> Iterator[_Fetched]:
    for slot in cycle(slots):
        with slot.device.activate(stream):
            slot.clear()
            try:
                batch = next(source)
            except StopIteration:
                return
            leaves, structure = flatten(batch)
            found = {place: array for place, leaf in enumerate(leaves) if (array := _numbers(leaf, lifts)) is not None}
            parts = slot.fill(list(found.values()))
        yield _Fetched(slot, leaves, structure, list(found), parts)


def _numbers(leaf: Any, lifts: bool) -> Array | None:
    """Return a leaf as an array for the GPU; None if it is not numeric, or stays in host memory."""
    try:
        array = as_array(leaf)
    except UnsupportedDtypeError:
        return None
    return array if lifts or is_on_device(array) else None
