"""Copy GPU arrays into a bucket's buffer and out of it: one launch for all arrays of a dtype, which casts and divides for MEAN.

The kernel reads the addresses of the arrays from a table, which is sent to the device only if they have changed since the last
call. Tables are allocated, and kernels compiled, when a copy is made: nothing is while ranks wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mpistrat.device.abstract import Device, DeviceArray, Event, Stream, address
from mpistrat.device.kernels import Segment, SegmentTable, computed_in, move_kernel, real_dtype
from mpistrat.packing.layout import Layout


class DeviceCopyIn:
    """Copies arrays of these dtypes into one range of a bucket's buffer, on the device's current stream."""

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
        self._mover = _Mover(device, segments, buffer.dtype, dtypes, pack=True, divisor=1)
        self._padding = buffer[stop - start :]

    def run(self, arrays: Sequence[DeviceArray]) -> Iterator[bool]:
        """Copy from contiguous `arrays`, casting where the buffer has another dtype."""
        yield from self._mover.run(arrays)
        if self._padding.size:
            self._device.current_stream().clear(address(self._padding), self._padding.nbytes)


class DeviceCopyOut:
    """Copies parts of a range of a bucket out to arrays of these dtypes, on the device's current stream.

    The source of a part is memory of this GPU, or mapped memory of another one.
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
        self._mover = _Mover(device, segments, parts[0][2].dtype, dtypes, pack=False, divisor=divisor) if parts else None

    def run(self, arrays: Sequence[DeviceArray]) -> Iterator[bool]:
        """Copy to contiguous `arrays`, casting where they have another dtype than the buffer."""
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
        pack: bool,
        divisor: int,
    ) -> None:
        self._are_contiguous = False
        # each launch, with the array and the first byte of each of its segments
        self._launches: list[tuple[_Launch, list[tuple[int, int]]]] = []
        members: dict[np.dtype[Any], list[tuple[Segment, int]]] = {}
        for segment, place in segments:
            members.setdefault(dtypes[segment.array], []).append((segment, address(place)))
        for array_dtype, alike in members.items():
            counts, bucket_addresses = [segment.stop - segment.start for segment, _ in alike], [place for _, place in alike]
            launch = _Launch(device, counts, bucket_addresses, array_dtype, dtype, pack, divisor)
            self._launches.append((launch, [(segment.array, segment.start * array_dtype.itemsize) for segment, _ in alike]))

    def run(self, arrays: Sequence[DeviceArray]) -> Iterator[bool]:
        if not self._are_contiguous:
            assert all(array.flags.c_contiguous for array in arrays), "not contiguous"
            self._are_contiguous = True
        for launch, starts in self._launches:
            yield from launch.run([address(arrays[index]) + start_bytes for index, start_bytes in starts])


class _Launch:
    """One launch of `move_segments`, and its table on the device."""

    def __init__(
        self,
        device: Device,
        counts: Sequence[int],
        bucket_addresses: list[int],
        array_dtype: np.dtype[Any],
        dtype: np.dtype[Any],
        pack: bool,
        divisor: int,
    ) -> None:
        source, target = (array_dtype, dtype) if pack else (dtype, array_dtype)
        if source.kind == "c":  # a complex number is copied, and divided, as two real ones
            counts = [2 * count for count in counts]
            source = target = real_dtype(source)
        self._device, self._kernel = device, move_kernel(source, target)
        self._bucket_addresses, self._pack = bucket_addresses, pack
        self._table = SegmentTable(counts, source, target)
        self._rows_bytes = self._table.rows.nbytes
        nbytes = self._rows_bytes + self._table.first_tile.nbytes
        self._host, self._memory = device.pinned(nbytes), device.allocate(nbytes)
        self._host[self._rows_bytes :] = self._table.first_tile.view(np.uint8)
        start = address(self._memory)
        self._arguments = start, start + self._rows_bytes, np.int32(len(self._table.rows)), computed_in(source).type(divisor)
        self._array_addresses: list[int] = []
        self._used: Event | None = None
        device.prepare(self._kernel)

    def run(self, array_addresses: list[int]) -> Iterator[bool]:
        """Copy between the arrays that begin at these addresses and the buffer."""
        stream = self._device.current_stream()
        if array_addresses != self._array_addresses:
            while self._used is not None and not self._used.done():
                yield False  # the launch before still reads the table
            self._send(stream, array_addresses)
        stream.launch(self._kernel, self._table.num_tiles, self._arguments)
        self._used = stream.record()

    def _send(self, stream: Stream, array_addresses: list[int]) -> None:
        self._table.point(
            *((array_addresses, self._bucket_addresses) if self._pack else (self._bucket_addresses, array_addresses))
        )
        self._host[: self._rows_bytes] = self._table.rows.reshape(-1).view(np.uint8)
        stream.copy(self._arguments[0], int(self._host.__array_interface__["data"][0]), self._host.nbytes)
        self._array_addresses = array_addresses
