"""How long sums of ranks on GPUs of one node take, by each way to compute them, until the GPU is through.

    MPISTRAT_DEVICE=gpu mpistrat run -n 2 -m tests.gpu.sums --report FILE

Small arrays of float32: by cuda_ipc in one shot and in two, and by NCCL. Large ones of bfloat16: by NCCL in float32, which is
the default, and in their own dtype. Ranks that share a GPU take turns on it: then only meetings and launches are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import ml_dtypes
import numpy as np

from mpistrat.communicator.communicator import Communicator
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.device.abstract import Device
from mpistrat.device.binding import bound_device
from mpistrat.errors import LaunchError
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.launch.bootstrap import start
from mpistrat.reduction import ReduceOp
from mpistrat.topology.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

SMALL = {"4KiB": 1 << 12, "16KiB": 1 << 14, "64KiB": 1 << 16, "256KiB": 1 << 18, "1MiB": 1 << 20}
LARGE = {"1MiB": 1 << 20, "64MiB": 1 << 26}
ROUNDS = 50

_SHOTS = {"one_shot": ("cuda_ipc", "1GiB"), "two_shots": ("cuda_ipc", "0"), "nccl": ("nccl", "0")}
_DTYPES = {"in_float32": None, "native": CommunicationOptions(intra_dtype="native")}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure; rank 0 writes the figures. A collective call."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", type=Path, required=True, help="where to write the figures")
    arguments = parser.parse_args(argv)
    comm, device = start(), bound_device()
    if device is None:
        raise LaunchError("this process computes on its CPU; MPISTRAT_DEVICE=gpu says why")
    figures = measure(comm, device, SMALL, LARGE)
    if comm.rank == 0:
        arguments.report.write_text(json.dumps(figures))


def measure(
    comm: MPI.Intracomm, device: Device, small: Mapping[str, int], large: Mapping[str, int], rounds: int = ROUNDS
) -> dict[str, float]:
    """Return the median microseconds of each way, on this rank. A collective call."""
    node = World.from_shape(f"1x{comm.size}")
    communicators: dict[str, Communicator] = {}
    for way, (transport, limit) in _SHOTS.items():
        with patch.dict(os.environ, {"MPISTRAT_INTRA_TRANSPORT": transport, "MPISTRAT_ONE_SHOT_BYTES": limit}):
            communicators[way] = Communicator(Hierarchy(comm, node))
    shots = {way: (communicator, None) for way, communicator in communicators.items()}
    dtypes = {f"bfloat16_{way}": (communicators["nccl"], options) for way, options in _DTYPES.items()}
    figures: dict[str, float] = {}
    for ways, sizes, dtype in ((shots, small, np.dtype(np.float32)), (dtypes, large, np.dtype(ml_dtypes.bfloat16))):
        for name, nbytes in sizes.items():
            taken = _take_turns(ways, device, nbytes, dtype, rounds)
            figures |= {f"{way}_us_{name}": round(1e6 * seconds, 1) for way, seconds in taken.items()}
    for communicator in communicators.values():
        communicator.close()
    return figures


def _take_turns(
    ways: Mapping[str, tuple[Communicator, CommunicationOptions | None]],
    device: Device,
    nbytes: int,
    dtype: np.dtype[Any],
    rounds: int,
) -> dict[str, float]:
    """Return the median seconds of each way to sum an array in place of another."""
    array = np.ones(nbytes // dtype.itemsize, dtype)
    source, target = device.array_module.asarray(array), device.array_module.asarray(np.zeros_like(array))
    samples: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(2 + rounds):
        for way, (communicator, options) in ways.items():
            communicator.barrier()
            begun = time.perf_counter()
            communicator.all_reduce(ReduceOp.SUM, [source], options, out=[target])
            event = device.current_stream().record()
            while not event.done():
                pass
            if turn > 1:  # the first ones make plans and compile kernels
                samples[way].append(time.perf_counter() - begun)
            elif not (device.get(target) == communicator.size).all():
                raise AssertionError(f"{way} of {dtype}, {nbytes} bytes, gave a wrong result")
    return {way: median(seconds) for way, seconds in samples.items()}


if __name__ == "__main__":
    main()
