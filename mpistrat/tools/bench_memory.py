"""Where the arrays of a benchmark lie: in host memory, or on the GPUs of the ranks."""

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
from mpistrat.topology.gpu_assignment import check_gpu_assignment

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["DEVICES", "communicator", "filled", "place_text", "prefer", "timed"]

DEVICES = ("auto", "gpu", "cpu")


def prefer(device: str) -> None:
    """Let ranks compute on what is asked for, before MPI starts; auto: on what MPISTRAT_DEVICE says."""
    if device != "auto":
        os.environ[settings.DEVICE.name] = device


def communicator(comm: MPI.Intracomm) -> Communicator:
    """Return collectives over all ranks, for arrays where they compute. A collective call.

    Raises
    ------
    LaunchError, TopologyError
        As `topology.check_gpu_assignment`, if the devices of the ranks do not go together.
    """
    check_gpu_assignment(comm)
    return Communicator(Hierarchy(comm, discover(comm)))


def place_text(ops: Communicator) -> str:
    """Return where arrays lie, why, and on GPUs which way they take."""
    bound = what_is_bound()
    why = f" ({bound.why})" if bound is not None and bound.why else ""
    if ops.path:
        return f"on GPUs{why}: {ops.path}; bare MPI on arrays in host memory"
    return f"in host memory{why}"


def filled(count: int, value: float, ops: Communicator) -> Array:
    """Return an array of float32 where these collectives work."""
    module: Any = array_module() if ops.path else np
    array: Array = module.full(count, value, np.float32)
    return array


def timed(run: Callable[[], object], ops: Communicator) -> Callable[[], object]:
    """Return a call that ends when its results are there: on GPUs, when an event behind them has passed."""
    device = bound_device()
    if device is None or not ops.path:
        return run

    def until_there() -> None:
        run()
        event = device.current_stream().record()
        while not event.done():
            pass

    return until_there
