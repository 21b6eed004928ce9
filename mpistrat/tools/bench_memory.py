"""The memory of a benchmark's arrays: host memory, or the GPUs of the ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat import settings
from mpistrat.arrays import Array, array_module
from mpistrat.communicator.communicator import Communicator
from mpistrat.device.binding import bound_device
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.launch.gpu_binding import what_is_bound
from mpistrat.topology.discover import discover
from mpistrat.topology.gpus import check_gpu_assignment
from mpistrat.tuning.gpu_measurements import wait_until_complete

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["DEVICES", "communicator", "filled", "place_text", "prefer", "timed"]

DEVICES = ("auto", "gpu", "cpu")


def prefer(device: str) -> None:
    """Select the device that ranks compute on, before MPI starts; auto: the one that MPISTRAT_DEVICE selects."""
    if device != "auto":
        os.environ[settings.DEVICE.name] = device


def communicator(comm: MPI.Intracomm) -> Communicator:
    """Return a communicator over all ranks, for arrays on their device. A collective call.

    Raises
    ------
    LaunchError, TopologyError
        As `topology.gpus.check_gpu_assignment`, if the devices of the ranks are not compatible.
    """
    check_gpu_assignment(comm)
    return Communicator(Hierarchy(comm, discover(comm)))


def place_text(ops: Communicator) -> str:
    """Return the memory that arrays are in, why, and on GPUs by which transports they are combined."""
    bound = what_is_bound()
    why = f" ({bound.why})" if bound is not None and bound.why else ""
    if ops.path:
        return f"on GPUs{why}: {ops.path}; plain MPI on arrays in host memory"
    return f"in host memory{why}"


def filled(count: int, value: float, ops: Communicator) -> Array:
    """Return an array of float32 on the device of a communicator."""
    module: Any = array_module() if ops.path else np
    array: Array = module.full(count, value, np.float32)
    return array


def timed(run: Callable[[], object], ops: Communicator) -> Callable[[], object]:
    """Return a call that returns when its results are complete: on GPUs, when an event recorded after them is done."""
    device = bound_device()
    if device is None or not ops.path:
        return run

    def until_complete() -> None:
        run()
        wait_until_complete(device)

    return until_complete
