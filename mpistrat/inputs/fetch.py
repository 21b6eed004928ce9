"""Fetcher: batches brought to the replica's GPU ahead of their use, through pinned memory and on a stream of their own.

The thread that makes a batch writes it to a slot, which is pinned memory and as much of the GPU's, and starts the copy from the
one to the other. When the program takes the batch, it is copied once more, on the stream that the program computes on, into
arrays that are like all others it makes there: it may keep them, and their memory is nobody else's. That copy stays on the GPU,
and takes a fraction of the time of the first. Slots are used again.

File law: as for `prefetch`: the thread calls nothing that communicates, and holds no reference to the Fetcher.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np

from mpistrat.arrays import Array, as_array, is_on_device, like
from mpistrat.device.abstract import Device, DeviceArray, Event, Stream, address
from mpistrat.errors import UnsupportedDtypeError
from mpistrat.inputs.prefetch import Prefetcher
from mpistrat.structures import Structure, flatten, rebuild

__all__ = ["Fetcher"]

_ALIGNMENT = 256  # bytes, of each array in a slot
_POLL_SECONDS = 1e-4


class Fetcher(Iterator[Any]):
    """Iterates over what `source` yields, with its arrays on the GPU; what holds no numbers, such as text, stays as it is.

    Parameters
    ----------
    source : iterator
        Used by the thread alone from here on, with a stream of the Fetcher's as its current one.
    buffer_size : int
        How many elements are made and copied ahead; 0 makes each when it is asked for, without a thread.
    device : Device
        The GPU.
    lifts : bool
        Whether arrays in host memory are brought to the GPU; else these stay there, and those on the GPU are taken over.
    """

    def __init__(self, source: Iterator[Any], buffer_size: int, device: Device, lifts: bool = True) -> None:
        self._device, self._stream = device, device.stream()
        self._follow()  # arrays of a dataset that are on the GPU are there by then
        # as many are on their way as are made ahead, and one is being made, or taken
        fetched = _fetched(source, lifts, self._stream, [_Slot(device, self._stream) for _ in range(buffer_size + 1)])
        self._fetched = Prefetcher(fetched, buffer_size) if buffer_size else fetched

    def close(self) -> None:
        """End the iteration, and the thread."""
        if isinstance(self._fetched, Prefetcher):
            self._fetched.close()
        self._fetched = iter(())

    def __next__(self) -> Any:
        if not isinstance(self._fetched, Prefetcher):
            self._follow()  # what is made in turn with the program may use what the program has just computed
        batch = next(self._fetched)
        with self._device.activate():
            return batch.take()

    def _follow(self) -> None:
        """Let what is made from here on come after what the calling thread has put on its current stream."""
        with self._device.activate():
            self._stream.wait(self._device.current_stream().record())


class _Part(NamedTuple):
    """An array of a batch: where it begins in the slot, or itself where it is on the GPU already."""

    start: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    on_device: DeviceArray = None


class _Slot:
    """Pinned memory and memory of the GPU, for one batch at a time."""

    def __init__(self, device: Device, stream: Stream) -> None:
        self.device, self._stream = device, stream
        self.pinned, self.memory = np.empty(0, np.uint8), None
        self.filled: Event | None = None
        self.emptied: Event | None = None
        self.kept: Sequence[_Part] = ()

    def clear(self) -> None:
        """Wait until the pinned memory may be written to; the stream waits until the memory of the GPU may be."""
        while self.filled is not None and not self.filled.done():
            time.sleep(_POLL_SECONDS)
        if self.emptied is not None:
            self._stream.wait(self.emptied)
        self.kept = ()

    def fill(self, arrays: Sequence[Array]) -> Sequence[_Part]:
        """Start to copy what is in host memory, and return where each array is."""
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
            self._stream.copy(address(self.memory), int(self.pinned.__array_interface__["data"][0]), nbytes)
        self.filled, self.kept = self._stream.record(), parts
        return parts


class _Fetched(NamedTuple):
    """A batch on its way: its leaves, of which those in `places` are the parts."""

    slot: _Slot
    leaves: list[Any]
    structure: Structure
    places: list[int]
    parts: Sequence[_Part]

    def take(self) -> Any:
        """Return the batch in arrays of its own, in order on the current stream."""
        stream = self.slot.device.current_stream()
        assert self.slot.filled is not None, "the slot was filled"
        stream.wait(self.slot.filled)
        for place, part in zip(self.places, self.parts, strict=True):
            self.leaves[place] = like(self._array(part, stream), self.leaves[place])
        self.slot.emptied = stream.record()
        return rebuild(self.structure, self.leaves)

    def _array(self, part: _Part, stream: Stream) -> DeviceArray:
        if part.on_device is not None:
            return part.on_device.copy()
        array = self.slot.device.array_module.empty(part.shape, part.dtype)
        if array.nbytes:
            stream.copy(address(array), address(self.slot.memory) + part.start, array.nbytes)
        return array


def _fetched(source: Iterator[Any], lifts: bool, stream: Stream, slots: Sequence[_Slot]) -> Iterator[_Fetched]:
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
    """Return an array that is to be handed out on the GPU; None for what holds no numbers, or is to stay in host memory."""
    try:
        array = as_array(leaf)
    except UnsupportedDtypeError:
        return None
    return array if lifts or is_on_device(array) else None
