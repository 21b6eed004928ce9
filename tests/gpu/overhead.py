"""What this library adds to NCCL: one rank's all-reduce beside ncclAllReduce and a plain copy, until the GPU is through.

    MPISTRAT_DEVICE=gpu python -m tests.gpu.overhead --report FILE

One rank has nobody to wait for: NCCL copies then, and whatever a call takes beyond that is ours.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import mpistrat
from mpistrat.communicator.interface import BaseCommunicator
from mpistrat.device.abstract import Device, address
from mpistrat.device.binding import bound_device
from mpistrat.errors import LaunchError
from mpistrat.reduction import ReduceOp

SIZES = {"4KiB": 1 << 12, "1MiB": 1 << 20, "16MiB": 1 << 24, "256MiB": 1 << 28}
ROUNDS = 50
CHECKED = 1000

Raw = Callable[[int, int, int, int], None]
"""Sums floats: the address of what is read, of what is written, how many, and the stream."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", type=Path, required=True, help="where to write the figures")
    arguments = parser.parse_args(argv)
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    device = bound_device()
    if device is None:
        raise LaunchError("this process computes on its CPU; MPISTRAT_DEVICE=gpu says why")
    figures = measure(strategy.extended.communicator, device, _nccl())
    strategy.close()
    arguments.report.write_text(json.dumps(figures))


def measure(
    communicator: BaseCommunicator, device: Device, raw: Raw, sizes: Mapping[str, int] | None = None, rounds: int = ROUNDS
) -> dict[str, float]:
    """Return the median times of each way to sum floats on a rank alone, and how ours compare with NCCL's.

    Returns for each size ``copy_us``, ``nccl_us``, ``call_us`` and, with ``out=``, ``out_us``; ``ratio`` and ``ratio_out``
    divide ours by NCCL's.
    """
    figures: dict[str, float] = {}
    for name, nbytes in (SIZES if sizes is None else sizes).items():
        taken = _times(communicator, device, raw, nbytes // 4, rounds)
        figures |= {f"{way}_us_{name}": round(1e6 * seconds, 1) for way, seconds in taken.items()}
        figures |= {f"ratio_{name}": round(taken["call"] / taken["nccl"], 3)}
        figures |= {f"ratio_out_{name}": round(taken["out"] / taken["nccl"], 3)}
    return figures


def _times(communicator: BaseCommunicator, device: Device, raw: Raw, count: int, rounds: int) -> dict[str, float]:
    """Return the median seconds of each way, which take turns."""
    values = np.random.default_rng(count).standard_normal(count, np.float32)
    source, stream = device.array_module.asarray(values), device.current_stream()
    targets = {way: device.array_module.empty(count, np.float32) for way in ("copy", "nccl", "out")}

    def call() -> Any:
        [result] = communicator.all_reduce(ReduceOp.SUM, [source])
        return result

    ways: dict[str, Callable[[], Any]] = {
        "copy": lambda: stream.copy(address(targets["copy"]), address(source), 4 * count),
        "nccl": lambda: raw(address(source), address(targets["nccl"]), count, stream.pointer),
        "call": call,
        "out": lambda: communicator.all_reduce(ReduceOp.SUM, [source], out=[targets["out"]]),
    }
    samples: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(2 + rounds):
        for way, run in ways.items():
            begun = time.perf_counter()
            result = run()
            _settle(device)
            if turn > 1:  # the first ones make plans and compile kernels
                samples[way].append(time.perf_counter() - begun)
            if way == "call":
                targets["call"] = result
    for way, target in targets.items():
        if not np.array_equal(device.get(target[:CHECKED]), values[:CHECKED]):
            raise AssertionError(f"{way} of {count} floats gave a wrong result")
    return {way: median(seconds) for way, seconds in samples.items()}


def _settle(device: Device) -> None:
    event = device.current_stream().record()
    while not event.done():
        pass


def _nccl() -> Raw:
    from cupy.cuda import nccl

    comm = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    return lambda source, target, count, stream: comm.allReduce(source, target, count, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream)


if __name__ == "__main__":
    main()
