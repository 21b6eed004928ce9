"""Casts on the GPU around an operation: what is staged through host memory, and sent, has fewer bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpistrat.device.abstract import Device, DeviceArray
from mpistrat.packing.fuse_device import DeviceCopyIn, DeviceCopyOut
from mpistrat.packing.layout import Layout
from mpistrat.transports.base import Operation, Part
from mpistrat.transports.steps import Steps

__all__ = ["cast_on_device"]


def cast_on_device(
    device: Device, buffer: DeviceArray, dtype: np.dtype[Any], bind: Callable[[DeviceArray], Operation]
) -> Operation:
    """Bind an operation to memory of a narrower dtype: a kernel casts a buffer to it before, and back from it afterwards.

    Parameters
    ----------
    device : Device
        This rank's GPU.
    buffer : device array
        One-dimensional and contiguous; gets the result.
    dtype : dtype
        The narrower one.
    bind : callable
        Returns the operation on an array of that dtype, in place.
    """
    layout, narrow = Layout([buffer.size]), device.allocate(buffer.size * dtype.itemsize).view(dtype)
    inwards = DeviceCopyIn(device, layout, 0, buffer.size, narrow, [buffer.dtype])
    outwards = DeviceCopyOut(device, layout, 0, buffer.size, [(0, buffer.size, narrow)], 1, [buffer.dtype])
    operation = bind(narrow)

    def run() -> Steps:
        yield from inwards.run([buffer])
        yield from operation.run()
        yield from outwards.run([buffer])

    return Operation(run, [Part(0, buffer.size, (buffer,))], narrow.nbytes + operation.scratch_bytes)
