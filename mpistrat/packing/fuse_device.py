"""Copy in, copy out on a device: one launch moves all arrays of a dtype, casts them, and divides for MEAN.

The addresses of the arrays travel in a table, which is sent to the device only where they have changed since the last call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mpistrat.device.base import Device, DeviceArray, Event, address
from mpistrat.device.kernels import move_kernel
from mpistrat.device.segments import SegmentTable
from mpistrat.packing.layout import Layout, Piece

__all__ = ["DeviceCopyIn", "DeviceCopyOut"]


class DeviceCopyIn:
    """Copies arrays into one range of a bucket's buffer, on the device's current stream.

    Parameters
    ----------
    device : Device
        Where all of them lie.
    layout : Layout
        The bucket.
    start, stop : int
        The range, in elements of the bucket.
    buffer : device array
        Where it goes; what it has beyond the range is padding, set to zero.
    """

    def __init__(self, device: Device, layout: Layout, start: int, stop: int, buffer: DeviceArray) -> None:
        self._device = device
        pieces = [(piece, buffer[piece.offset :]) for piece in layout.pieces(start, stop, stop - start)]
        self._mover = _Mover(device, pieces, buffer.dtype, inwards=True, divisor=1)
        self._padding = buffer[stop - start :]

    def run(self, arrays: Sequence[DeviceArray]) -> Iterator[bool]:
        """Copy from flat `arrays`, casting where the buffer has another dtype."""
        self._mover.run(arrays)
        if self._padding.size:
            self._device.put(self._padding, np.zeros(self._padding.size, self._padding.dtype))
        return iter(())


class DeviceCopyOut:
    """Copies parts of a bucket's buffer out to arrays, on the device's current stream.

    Parameters
    ----------
    device : Device
        Where all of them lie.
    layout : Layout
        The bucket.
    start, stop : int
        The range of the bucket that the parts belong to.
    parts : sequence of (first, last, source)
        Elements [first, last) of the range are what `source` holds: memory of this device, or mapped memory of another one.
    divisor : int
        Divides what is copied; 1 for every operation but MEAN.
    """

    def __init__(
        self,
        device: Device,
        layout: Layout,
        start: int,
        stop: int,
        parts: Sequence[tuple[int, int, DeviceArray]],
        divisor: int,
    ) -> None:
        pieces = [
            (piece, source[piece.offset :])
            for first, last, source in parts
            for piece in layout.pieces(start + first, min(start + last, stop), stop - start)
        ]
        self._mover = _Mover(device, pieces, parts[0][2].dtype, inwards=False, divisor=divisor) if parts else None

    def run(self, arrays: Sequence[DeviceArray]) -> Iterator[bool]:
        """Copy to flat `arrays`, casting where they have another dtype than the buffer."""
        if self._mover is not None:
            self._mover.run(arrays)
        return iter(())


class _Mover:
    """Pieces of arrays, each with its place in a buffer; `run` moves all, one launch for each dtype of the arrays."""

    def __init__(
        self,
        device: Device,
        pieces: Sequence[tuple[Piece, DeviceArray]],
        dtype: np.dtype[Any],
        inwards: bool,
        divisor: int,
    ) -> None:
        self._device, self._dtype, self._inwards, self._divisor = device, dtype, inwards, divisor
        self._pieces = [(piece, address(place)) for piece, place in pieces]
        self._launches: dict[np.dtype[Any], _Launch] = {}
        self._members: dict[np.dtype[Any], list[tuple[Piece, int]]] = {}

    def run(self, arrays: Sequence[DeviceArray]) -> None:
        if not self._launches:
            assert all(array.ndim == 1 and array.strides == (array.itemsize,) for array in arrays if array.size), "not flat"
            for piece, place in self._pieces:
                self._members.setdefault(arrays[piece.array].dtype, []).append((piece, place))
            self._launches = {kind: self._bind(kind, members) for kind, members in self._members.items()}
        for kind, launch in self._launches.items():
            members = self._members[kind]
            outside = [address(arrays[piece.array]) + piece.start * kind.itemsize for piece, _ in members]
            inside = [place for _, place in members]
            launch.run(*((outside, inside) if self._inwards else (inside, outside)))

    def _bind(self, kind: np.dtype[Any], members: Sequence[tuple[Piece, int]]) -> _Launch:
        counts = [piece.stop - piece.start for piece, _ in members]
        dtypes = (kind, self._dtype) if self._inwards else (self._dtype, kind)
        return _Launch(self._device, counts, *dtypes, self._divisor)


class _Launch:
    """One launch of `move_segments`, and its table on the device."""

    def __init__(
        self, device: Device, counts: Sequence[int], source: np.dtype[Any], target: np.dtype[Any], divisor: int
    ) -> None:
        if source.kind == "c":  # the two numbers of each value are moved, and divided, alike
            counts = [2 * count for count in counts]
            source = target = np.dtype(f"f{source.itemsize // 2}")
        wide = np.dtype(np.float32) if source.itemsize == 2 and source.kind not in "iu" else source
        self._device, self._kernel = device, move_kernel(source, target)
        self._table = SegmentTable(counts, source, target)
        self._rows_bytes = self._table.rows.nbytes
        nbytes = self._rows_bytes + self._table.first_tile.nbytes
        self._host, self._memory = device.pinned(nbytes), device.allocate(nbytes)
        self._host[self._rows_bytes :] = self._table.first_tile.view(np.uint8)
        self._used: Event | None = None
        self._divisor = wide.type(divisor)

    def run(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        if not self._table.num_tiles:
            return
        stream = self._device.current_stream()
        start = address(self._memory)
        if self._table.point(sources, targets):
            while self._used is not None and not self._used.done():
                pass  # the launch before still needs its table: it was put on the stream a whole step ago
            self._host[: self._rows_bytes] = self._table.rows.reshape(-1).view(np.uint8)
            stream.copy(start, int(self._host.__array_interface__["data"][0]), self._host.nbytes)
        arguments = start, start + self._rows_bytes, np.int32(len(self._table.rows)), self._divisor
        stream.launch(self._kernel, self._table.num_tiles, arguments)
        self._used = stream.record()
