"""Packing: many arrays in few buckets, and the copies into a bucket's buffer and out of it.

Which arrays share a bucket is decided by bytes_per_pack and num_packs, as TensorFlow defines them.

A copy is one pass over memory that also casts, and divides for MEAN. Copies are steps (`mpistrat.steps`): they yield after each
segment of at most SEGMENT_BYTES, or several small ones, so that the caller can advance messages in between.

GPU arrays of one dtype take one launch. The kernel reads their addresses from a table, which is sent to the device only if they
have changed since the last call. Tables are allocated, and kernels compiled, when a copy is made: nothing is while ranks wait
for each other.

Invariant: launches of one copy are ordered on the device, also those on different streams, and so is what is sent to its table.
It is sent from one of a few tables on the host in turn, so that started calls do not wait for the copy before.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from copy import copy
from itertools import accumulate
from typing import Any

import numpy as np

from mpistrat.arrays import Array
from mpistrat.device.cuda import Device, DeviceArray, Event, address, addresses
from mpistrat.device.kernels import Segment, SegmentTable, move_kernel, real_dtype
from mpistrat.reduction import ReduceOp, accumulation_dtype, combine, divide
from mpistrat.steps import until

SEGMENT_BYTES, GROUP_BYTES = 1 << 18, 1 << 16
HOST_TABLES = 8

_Piece = tuple[int, Any, slice]
"""Part of an array: the index of the array, what of it, and where that lies in the bucket."""


class Layout:
    """Arrays that lie one after the other, or `count` of their elements from `first` on; by default all the rest."""

    def __init__(self, counts: Sequence[int], first: int = 0, count: int | None = None) -> None:
        self.offsets = [0, *accumulate(counts)]
        self.first = first
        self.count = self.offsets[-1] - first if count is None else count

    @property
    def is_one_array(self) -> bool:
        """Whether the range is one whole array."""
        return len(self.offsets) == 2 and self.count == self.offsets[-1]

    def part(self, start: int, stop: int) -> Layout:
        """Return elements [start, stop) of the range."""
        part = copy(self)
        part.first, part.count = self.first + start, stop - start
        return part

    def segments(self, start: int, stop: int, longest: int) -> list[Segment]:
        """Return the segments in elements [start, stop) of the range, in order, each of at most `longest` elements."""
        found: list[Segment] = []
        start, stop = start + self.first, stop + self.first
        array = max(0, bisect_right(self.offsets, start) - 1)
        while array < len(self.offsets) - 1 and self.offsets[array] < stop:
            origin = self.offsets[array]
            first, last = max(start, origin), min(stop, self.offsets[array + 1])
            found += [
                Segment(array, begin - origin, min(begin + longest, last) - origin, begin - start)
                for begin in range(first, last, longest)
            ]
            array += 1
        return found


def pack_by_bytes(sizes_bytes: Sequence[int], bytes_per_pack: int) -> list[list[int]]:
    """Return packs of indices, in order; one pack if the limit is 0.

    A pack is complete when it is larger than the limit, so packs exceed it a little.
    """
    packs: list[list[int]] = []
    open_bytes = 0
    for index, size in enumerate(sizes_bytes):
        if not packs or (bytes_per_pack and open_bytes > bytes_per_pack):
            packs.append([])
            open_bytes = 0
        packs[-1].append(index)
        open_bytes += size
    return packs


def split_evenly(count: int, num_packs: int) -> list[int]:
    """Return the elements of each of equal packs; the last one takes the remainder: all, of fewer elements than packs."""
    width = count // num_packs
    return [width] * (num_packs - 1) + [count - width * (num_packs - 1)] if width else [count]


class CopyIn:
    """Copies arrays into `buffer`, a range of a bucket; what lies beyond it is padding, and set to zero."""

    def __init__(self, layout: Layout, buffer: Array) -> None:
        groups = _groups(layout, 0, layout.count, buffer.itemsize)
        self._moves = [[(buffer[place], array, part) for array, part, place in group] for group in groups]
        self._padding = buffer[layout.count :]

    def run(self, arrays: Sequence[Array]) -> Iterator[bool]:
        """Copy from flat `arrays`, casting where the buffer has another dtype."""
        for group in self._moves:
            for target, array, part in group:
                target[...] = arrays[array][part]
            yield True
        if self._padding.size:
            self._padding.fill(0)


class CopyOut:
    """Copies parts of a range of a bucket out to arrays, divided by `divisor`.

    A part ``(first, last, addends)`` says that elements [first, last) of the range are the addends, combined in this order.
    Small arrays that lie side by side are combined and divided together, apart from the addends, which peers may read.
    """

    def __init__(self, layout: Layout, parts: Sequence[tuple[int, int, tuple[Array, ...]]], op: ReduceOp, divisor: int) -> None:
        self._fold = combine(op)
        self._divisor = divisor
        self._moves: list[tuple[list[Array], Array, list[tuple[Array, int, Any]]]] = []
        for first, last, addends in parts:
            apart = np.empty(min(GROUP_BYTES // addends[0].itemsize, last - first), addends[0].dtype)
            for group in _groups(layout, first, min(last, layout.count), addends[0].itemsize):
                begin, end = group[0][2].start, group[-1][2].stop
                total = apart[: end - begin]
                pieces = [(total[place.start - begin : place.stop - begin], array, part) for array, part, place in group]
                self._moves.append(([addend[begin:end] for addend in addends], total, pieces))

    def run(self, arrays: Sequence[Array]) -> Iterator[bool]:
        """Copy to flat `arrays`, casting where they have another dtype than the buffer."""
        for addends, total, pieces in self._moves:
            if len(pieces) == 1:
                [(_, array, part)] = pieces
                total = arrays[array][part]
            source = addends[0] if len(addends) == 1 else self._folded(addends, total)
            divide(source, self._divisor, total)
            if len(pieces) > 1:
                for piece, array, part in pieces:
                    arrays[array][part] = piece
            yield True

    def _folded(self, addends: Sequence[Array], target: Array) -> Array:
        """Return the addends combined: in the target, unless it has another dtype."""
        total = target if target.dtype == addends[0].dtype else np.empty_like(addends[0])
        self._fold(addends[0], addends[1], out=total)
        for addend in addends[2:]:
            self._fold(total, addend, out=total)
        return total


def _groups(layout: Layout, start: int, stop: int, itemsize: int) -> list[list[_Piece]]:
    """Return the segments in a range of a bucket: small ones together, each a part of an array, or all of it."""
    groups: list[list[_Piece]] = []
    for segment in layout.segments(start, stop, SEGMENT_BYTES // itemsize):
        array, count = segment.array, segment.stop - segment.start
        is_whole, end = count == layout.offsets[array + 1] - layout.offsets[array], segment.offset + count
        if not groups or (end - groups[-1][0][2].start) * itemsize > GROUP_BYTES:
            groups.append([])
        part = ... if is_whole else slice(segment.start, segment.stop)
        groups[-1].append((array, part, slice(segment.offset, end)))
    return groups


class DeviceCopyOut:
    """Copies parts of a range of a bucket out to arrays of these dtypes, by one launch for each dtype, on one stream.

    Parts lie in memory of this GPU, or in mapped memory of another one.
    """

    _packs = False

    def __init__(
        self,
        device: Device,
        layout: Layout,
        parts: Sequence[tuple[int, int, DeviceArray]],
        divisor: int,
        dtypes: Sequence[np.dtype[Any]],
    ) -> None:
        self._device, self._are_contiguous = device, False
        members: dict[np.dtype[Any], list[tuple[Segment, DeviceArray]]] = {}
        for first, last, memory in parts:
            for segment in layout.segments(first, min(last, layout.count), layout.count):
                members.setdefault(dtypes[segment.array], []).append((segment, memory[segment.offset :]))
        self._launches = [_Launch(device, alike, dtype, self._packs, divisor) for dtype, alike in members.items()]

    def run(self, arrays: Sequence[DeviceArray]) -> Iterator[bool]:
        """Copy from or to contiguous `arrays`, casting where the buffer has another dtype."""
        if not self._are_contiguous:
            assert all(array.flags.c_contiguous for array in arrays), "not contiguous"
            self._are_contiguous = True
        for launch in self._launches:
            yield from launch.run(arrays)


class DeviceCopyIn(DeviceCopyOut):
    """Copies arrays into one range of a bucket's buffer; what lies beyond it is set to zero."""

    _packs = True

    def __init__(self, device: Device, layout: Layout, buffer: DeviceArray, dtypes: Sequence[np.dtype[Any]]) -> None:
        super().__init__(device, layout, [(0, layout.count, buffer)], 1, dtypes)
        self._padding = buffer[layout.count :]

    def run(self, arrays: Sequence[DeviceArray]) -> Iterator[bool]:
        """Copy from contiguous `arrays`."""
        yield from super().run(arrays)
        if self._padding.size:
            self._device.current_stream().clear(address(self._padding), self._padding.nbytes)


class _Launch:
    """One launch of `move_segments`, for segments of arrays of one dtype, and its table on the device."""

    def __init__(
        self,
        device: Device,
        segments: Sequence[tuple[Segment, DeviceArray]],
        array_dtype: np.dtype[Any],
        pack: bool,
        divisor: int,
    ) -> None:
        dtype = segments[0][1].dtype
        source, target = (array_dtype, dtype) if pack else (dtype, array_dtype)
        counts = [segment.stop - segment.start for segment, _ in segments]
        if source.kind == "c":  # a complex number is copied, and divided, as two real ones
            counts = [2 * count for count in counts]
            source = target = real_dtype(source)
        self._device, self._kernel = device, move_kernel(source, target)
        # of each segment, its array and the first byte in it
        self._starts = [(segment.array, segment.start * array_dtype.itemsize) for segment, _ in segments]
        self._are_whole = self._starts == [(index, 0) for index in range(len(segments))]
        table = SegmentTable(counts, source, target)
        self._arrays, bucket = ("sources", "targets") if pack else ("targets", "sources")
        table.point(**{bucket: [address(place) for _, place in segments]})
        self._num_tiles, self._nbytes = table.num_tiles, table.rows.nbytes + table.first_tile.nbytes
        pinned = device.pinned(HOST_TABLES * self._nbytes).reshape(HOST_TABLES, self._nbytes)
        # each with its address, and the event after which it has been sent
        self._host: deque[tuple[SegmentTable, int, Event | None]] = deque(
            (table.in_memory(memory), address(memory), None) for memory in pinned
        )
        self._memory = device.allocate(self._nbytes)
        start = address(self._memory)
        by = accumulation_dtype(ReduceOp.SUM, source).type(divisor)
        self._arguments = start, start + table.rows.nbytes, np.int32(len(table.rows)), by
        self._array_addresses: list[int] = []
        device.prepare(self._kernel)

    def run(self, arrays: Sequence[DeviceArray]) -> Iterator[bool]:
        """Copy between the arrays and the bucket."""
        stream = self._device.current_stream()
        array_addresses = addresses(arrays)
        if not self._are_whole or len(array_addresses) != len(self._starts):
            array_addresses = [array_addresses[index] + start_bytes for index, start_bytes in self._starts]
        if array_addresses != self._array_addresses:
            table, start, sent = self._host[0]
            yield from () if sent is None else until(sent.done)
            table.point(**{self._arrays: array_addresses})
            stream.copy(self._arguments[0], start, self._nbytes)
            self._host[0] = table, start, stream.record(sent)
            self._host.rotate(-1)
            self._array_addresses = array_addresses
        stream.launch(self._kernel, self._num_tiles, self._arguments)
