"""How long all-reduces on a GPU take, until it is through: beside CuPy's own call of NCCL; and by each way to sum.

    MPISTRAT_DEVICE=gpu mpistrat run -n 2 -m tests.gpu.calls overhead --report FILE
    MPISTRAT_DEVICE=gpu mpistrat run -n 2 -m tests.gpu.calls sums --report FILE

Ranks that share a GPU take turns on it: how fast NCCL is there says nothing of GPUs of their own, but both ways have the same
turns, so that whatever a call takes beyond NCCL's is ours.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mpistrat.communicator.communicator import Communicator
from mpistrat.communicator.interface import BaseCommunicator
from mpistrat.communicator.options import CommunicationOptions
from mpistrat.device.abstract import Device, address
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.launch.bootstrap import start
from mpistrat.reduction import ReduceOp
from mpistrat.topology.world import World
from tests.gpu.program import settle, the_gpu, write_report

SIZES = {"8B": 8, "4KiB": 1 << 12, "64KiB": 1 << 16, "1MiB": 1 << 20, "16MiB": 1 << 24, "256MiB": 1 << 28, "1GiB": 1 << 30}
SMALL = {"4KiB": 1 << 12, "16KiB": 1 << 14, "64KiB": 1 << 16, "256KiB": 1 << 18, "1MiB": 1 << 20}
LARGE = {"1MiB": 1 << 20, "64MiB": 1 << 26}
ROUNDS, CHECKED = 50, 1000
ROUND_BYTES = 4 << 30  # of an array, in all rounds, but for the least number of these

Raw = Callable[[int, int, int, int], None]
"""Sums floats: the address of what is read, of what is written, how many, and the stream."""

_SHOTS = {"one_shot": ("cuda_ipc", "1GiB"), "two_shots": ("cuda_ipc", "0"), "nccl": ("nccl", "0")}
_DTYPES = {"in_float32": None, "native": CommunicationOptions(intra_dtype="native")}


def overhead(
    communicator: BaseCommunicator, device: Device, raw: Raw, sizes: Mapping[str, int] = SIZES, rounds: int = ROUNDS
) -> dict[str, float]:
    """Return the median microseconds of each way to sum floats, and how ours compare with NCCL's. A collective call.

    Returns for each size ``nccl_us``, ``call_us`` and, with ``out=``, ``out_us``; ``ratio`` and ``ratio_out`` divide ours by
    NCCL's.
    """
    figures: dict[str, float] = {}
    for name, nbytes in sizes.items():
        taken = _beside_nccl(communicator, device, raw, nbytes // 4, min(rounds, max(10, ROUND_BYTES // nbytes)))
        figures |= {f"{way}_us_{name}": us for way, us in taken.items()}
        figures |= {f"ratio_{name}": round(taken["call"] / taken["nccl"], 3)}
        figures |= {f"ratio_out_{name}": round(taken["out"] / taken["nccl"], 3)}
    return figures


def _beside_nccl(communicator: BaseCommunicator, device: Device, raw: Raw, count: int, rounds: int) -> dict[str, float]:
    values = np.arange(count, dtype=np.float32) % 97
    stream, source = device.current_stream(), device.array_module.asarray(values)
    summed, target = (device.array_module.zeros(count, np.float32) for _ in range(2))
    ways = {
        "nccl": lambda: raw(address(source), address(summed), count, stream.pointer) or summed,
        "call": lambda: communicator.all_reduce(ReduceOp.SUM, [source])[0],
        "out": lambda: communicator.all_reduce(ReduceOp.SUM, [source], out=[target])[0],
    }
    return _take_turns(device, ways, values * np.float32(communicator.size), rounds, communicator.barrier)


def sums(
    comm: Any, device: Device, small: Mapping[str, int], large: Mapping[str, int], rounds: int = ROUNDS
) -> dict[str, float]:
    """Return the median microseconds of each way, on this rank. A collective call.

    Small arrays of float32: by cuda_ipc in one shot and in two, and by NCCL. Large ones of bfloat16: by NCCL in float32, which
    is the default, and in their own dtype.
    """
    communicators: dict[str, Communicator] = {}
    for way, (transport, limit) in _SHOTS.items():
        with patch.dict(os.environ, {"MPISTRAT_INTRA_TRANSPORT": transport, "MPISTRAT_ONE_SHOT_BYTES": limit}):
            communicators[way] = Communicator(Hierarchy(comm, World.from_shape(f"1x{comm.size}")))
    shots = {way: (communicator, None) for way, communicator in communicators.items()}
    dtypes = {f"bfloat16_{way}": (communicators["nccl"], options) for way, options in _DTYPES.items()}
    figures: dict[str, float] = {}
    for ways, sizes, dtype in ((shots, small, np.dtype(np.float32)), (dtypes, large, np.dtype(ml_dtypes.bfloat16))):
        for name, nbytes in sizes.items():
            taken = _ways_to_sum(ways, device, np.ones(nbytes // dtype.itemsize, dtype), rounds)
            figures |= {f"{way}_us_{name}": us for way, us in taken.items()}
    for communicator in communicators.values():
        communicator.close()
    return figures


def _ways_to_sum(
    ways: Mapping[str, tuple[Communicator, CommunicationOptions | None]], device: Device, array: NDArray[Any], rounds: int
) -> dict[str, float]:
    source, target = device.array_module.asarray(array), device.array_module.asarray(np.zeros_like(array))

    def run(communicator: Communicator, options: CommunicationOptions | None) -> Any:
        communicator.all_reduce(ReduceOp.SUM, [source], options, out=[target])
        return target

    first, _ = next(iter(ways.values()))
    runs = {way: partial(run, *how) for way, how in ways.items()}
    return _take_turns(device, runs, array * array.dtype.type(first.size), rounds, first.barrier)


def _take_turns(
    device: Device, ways: Mapping[str, Callable[[], Any]], expected: NDArray[Any], rounds: int, meet: Callable[[], object]
) -> dict[str, float]:
    """Return the median microseconds of each way to compute what is expected, and to return it; they take turns."""
    samples: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(2 + rounds):
        for way, run in ways.items():
            meet()
            begun = time.perf_counter()
            found = run()
            settle(device)
            if turn > 1:  # the first ones make plans and compile kernels
                samples[way].append(time.perf_counter() - begun)
            elif not np.array_equal(device.get(found[:CHECKED]), expected[:CHECKED]):
                raise AssertionError(f"{way} of {expected.size} elements of {expected.dtype} gave a wrong result")
    return {way: round(1e6 * median(seconds), 1) for way, seconds in samples.items()}


def main(what: str) -> Mapping[str, float]:
    """Measure what is said."""
    comm, device = start(), the_gpu()
    if what == "sums":
        return sums(comm, device, SMALL, LARGE)
    from cupy.cuda import nccl

    communicator = Communicator(Hierarchy(comm, World.from_shape(f"1x{comm.size}")))
    with raw_nccl(comm, nccl) as raw:
        figures = overhead(communicator, device, raw)
    communicator.close()
    return figures


@contextmanager
def raw_nccl(comm: Any, nccl: Any) -> Iterator[Raw]:
    """Give a binding's own call, of a communicator that it has for itself. A collective call."""
    bare = nccl.NcclCommunicator(comm.size, comm.bcast(nccl.get_unique_id() if comm.rank == 0 else None), comm.rank)
    kind, op = nccl.NCCL_FLOAT32, nccl.NCCL_SUM
    yield lambda source, target, count, stream: bare.allReduce(source, target, count, kind, op, stream)
    bare.destroy()


if __name__ == "__main__":
    write_report(main)
