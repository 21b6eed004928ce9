"""Copy GPU arrays into a bucket's buffer and out of it: one launch for all arrays of a dtype, which casts and divides for MEAN.

The kernel reads the addresses of the arrays from a table, which is sent to the device only if they have changed since the last
call. Tables are allocated, and kernels compiled, when a copy is made: nothing is while ranks wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mpistrat.device.abstract import Device, DeviceArray, Event, Stream, address
from mpistrat.device.kernels import computed_in, move_kernel, real_dtype
from mpistrat.device.segments import Segment, SegmentTable
from mpistrat.packing.layout import Layout

__all__ = ["DeviceCopyIn", "DeviceCopyOut"]


class DeviceCopyIn:
    """Copies arrays into one range of a bucket's buffer, on the device's current stream.

    Parameters
    ----------
    device : Device
        The GPU of the arrays and the buffer.
    layout, start, stop, buffer : Layout, int, int, device array
        As for `CopyIn`.
    dtypes : sequence of dtype
        Those of the arrays.
    """

    def __init__(
        self,
        device: Device,
        layout: Layout,
        start: int,
        stop: int,
        buffer: DeviceArray,
        dtypes: Sequence[np.dtype[Any]],
    ) -> None:
        self._device = device
        segments = [(segment, buffer[segment.offset :]) for segment in layout.segments(start, stop, stop - start)]
        self._mover = _Mover(device, segments, buffer.dtype, dtypes, inwards=True, divisor=1)
        self._padding = buffer[stop - start :]

    def run(self, arrays: Sequence[DeviceArray]) -> Iterator[bool]:
        """Copy from flat `arrays`, casting where the buffer has another dtype."""
        yield from self._mover.run(arrays)
        if self._padding.size:
            self._device.current_stream().clear(address(self._padding), self._padding.nbytes)


class DeviceCopyOut:
    """Copies parts of a bucket's buffer out to arrays, on the device's current stream.

    Parameters
    ----------
    device : Device
        The GPU of the arrays.
    layout, start, stop, divisor : Layout, int, int, int
        As for `CopyOut`.
    parts : sequence of (first, last, source)
        `source` holds elements [first, last) of the range: memory of this GPU, or mapped memory of another one.
    dtypes : sequence of dtype
        Those of the arrays.
    """

    def __init__(
        self,
        device: Device,
        layout: Layout,
        start: int,
        stop: int,
        parts: Sequence[tuple[int, int, DeviceArray]],
        divisor: int,
        dtypes: Sequence[np.dtype[Any]],
    ) -> None:
        segments = [
            (segment, source[segment.offset :])
            for first, last, source in parts
            for segment in layout.segments(start + first, min(start + last, stop), stop - start)
        ]
        self._mover = _Mover(device, segments, parts[0][2].dtype, dtypes, inwards=False, divisor=divisor) if parts else None

    def run(self, arrays: Sequence[DeviceArray]) -> Iterator[bool]:
        """Copy to flat `arrays`, casting where they have another dtype than the buffer."""
        if self._mover is not None:
            yield from self._mover.run(arrays)


class _Mover:
    """Copies segments of arrays into or out of a buffer, by one launch for each dtype of the arrays."""

    def __init__(
        self,
        device: Device,
        segments: Sequence[tuple[Segment, DeviceArray]],
        dtype: np.dtype[Any],
        dtypes: Sequence[np.dtype[Any]],
        inwards: bool,
        divisor: int,
    ) -> None:
        self._are_flat = False
        # each launch, with the array and the first byte of each of its segments
        self._launches: list[tuple[_Launch, list[tuple[int, int]]]] = []
        members: dict[np.dtype[Any], list[tuple[Segment, int]]] = {}
        for segment, place in segments:
            members.setdefault(dtypes[segment.array], []).append((segment, address(place)))
        for kind, alike in members.items():
            counts, inside = [segment.stop - segment.start for segment, _ in alike], [place for _, place in alike]
            launch = _Launch(device, counts, inside, kind, dtype, inwards, divisor)
            self._launches.append((launch, [(segment.array, segment.start * kind.itemsize) for segment, _ in alike]))

    def run(self, arrays: Sequence[DeviceArray]) -> Iterator[bool]:
        if not self._are_flat:
            assert all(array.ndim == 1 and array.strides == (array.itemsize,) for array in arrays if array.size), "not flat"
            self._are_flat = True
        for launch, spots in self._launches:
            yield from launch.run([address(arrays[index]) + start_bytes for index, start_bytes in spots])


class _Launch:
    """One launch of `move_segments`, and its table on the device."""

    def __init__(
        self,
        device: Device,
        counts: Sequence[int],
        inside: list[int],
        kind: np.dtype[Any],
        dtype: np.dtype[Any],
        inwards: bool,
        divisor: int,
    ) -> None:
        source, target = (kind, dtype) if inwards else (dtype, kind)
        if source.kind == "c":  # a complex number is copied, and divided, as two real ones
            counts = [2 * count for count in counts]
            source = target = real_dtype(source)
        self._device, self._kernel, self._inside, self._inwards = device, move_kernel(source, target), inside, inwards
        self._table = SegmentTable(counts, source, target)
        self._rows_bytes = self._table.rows.nbytes
        nbytes = self._rows_bytes + self._table.first_tile.nbytes
        self._host, self._memory = device.pinned(nbytes), device.allocate(nbytes)
        self._host[self._rows_bytes :] = self._table.first_tile.view(np.uint8)
        start = address(self._memory)
        self._arguments = start, start + self._rows_bytes, np.int32(len(self._table.rows)), computed_in(source).type(divisor)
        self._outside: list[int] = []
        self._used: Event | None = None
        device.prepare(self._kernel)

    def run(self, outside: list[int]) -> Iterator[bool]:
        """Copy between the arrays that begin at these addresses and the buffer."""
        stream = self._device.current_stream()
        if outside != self._outside:
            while self._used is not None and not self._used.done():
                yield False  # the launch before still reads the table
            self._send(stream, outside)
        stream.launch(self._kernel, self._table.num_tiles, self._arguments)
        self._used = stream.record()

    def _send(self, stream: Stream, outside: list[int]) -> None:
        self._table.point(*((outside, self._inside) if self._inwards else (self._inside, outside)))
        self._host[: self._rows_bytes] = self._table.rows.reshape(-1).view(np.uint8)
        stream.copy(self._arguments[0], int(self._host.__array_interface__["data"][0]), self._host.nbytes)
        self._outside = outside
