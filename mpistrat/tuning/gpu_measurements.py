"""Measure the two ways of an all-reduce on GPUs: with MPI or NCCL between nodes; on one node in one shot or two."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat.algorithms.cost import GpuTimes
from mpistrat.device.abstract import Device
from mpistrat.reduction import ReduceOp
from mpistrat.transports.steps import drive, until
from mpistrat.tuning.corrections import ITEM_BYTES
from mpistrat.tuning.measure import Measured, Run, Times, race

if TYPE_CHECKING:
    from mpi4py import MPI

DEADLINE_SECONDS = 60.0

BETWEEN_NODES = {"mpi": GpuTimes(), "nccl": GpuTimes(nccl_over_mpi=((1, 0.0),))}
IN_SHOTS = {"one shot": GpuTimes(one_shot_bytes=sys.maxsize), "two shots": GpuTimes(one_shot_bytes=0)}
"""By name, what lets ``auto`` take one way at every size."""


@dataclass(frozen=True)
class GpuMeasurements:
    """The times of an all-reduce of float32 on GPUs.

    Attributes
    ----------
    device : str
        The GPU of rank 0: ``NVIDIA H100``.
    ways : tuple of (str, str)
        The names of `BETWEEN_NODES` or of `IN_SHOTS`.
    rows : tuple of (int, float, float)
        Bytes, and the seconds of either way, in increasing order of bytes.
    """

    device: str
    ways: tuple[str, ...]
    rows: tuple[tuple[int, float, float], ...]

    def times(self, date: str) -> GpuTimes:
        """Return what ``auto`` chooses by, measured on that date."""
        source = f"measured {date} by mpistrat tune"
        if self.ways == tuple(BETWEEN_NODES):
            return GpuTimes(tuple((num_bytes, nccl / mpi) for num_bytes, mpi, nccl in self.rows), None, source)
        limits = (0, *(num_bytes for num_bytes, _, _ in self.rows))
        return GpuTimes((), min(limits, key=self._time_with_limit), source)

    def chosen(self) -> dict[int, str]:
        """Return the way that ``auto`` takes at each size."""
        times, first, second = self.times(""), *self.ways
        if times.one_shot_bytes is None:
            return {num_bytes: second if times.nccl_ratio(num_bytes) < 1 else first for num_bytes, _, _ in self.rows}
        return {num_bytes: first if num_bytes <= times.one_shot_bytes else second for num_bytes, _, _ in self.rows}

    def document(self) -> dict[str, Any]:
        """Return what the file of a tuning holds of it, for JSON."""
        seconds = {way: {str(row[0]): row[index] for row in self.rows} for index, way in enumerate(self.ways, 1)}
        return {"device": self.device, "seconds": seconds}

    @classmethod
    def from_document(cls, document: Any, positive: Callable[[Any], float]) -> GpuMeasurements:
        """Return what `document` has returned; `positive` returns a positive number as such, and raises for all else.

        Raises
        ------
        ValueError, KeyError, TypeError, AttributeError
            If it is anything else.
        """
        ways = tuple(document["seconds"])
        if ways not in (tuple(BETWEEN_NODES), tuple(IN_SHOTS)):
            raise ValueError(f"it names unknown ways on GPUs: {', '.join(map(str, ways))}")
        first, second = document["seconds"].values()
        sizes = sorted({int(positive(int(num_bytes))) for num_bytes in first})
        rows = tuple((size, positive(first[str(size)]), positive(second[str(size)])) for size in sizes)
        if not rows:
            raise ValueError("it names no sizes on GPUs")
        return cls(str(document["device"]), ways, rows)

    def _time_with_limit(self, limit: int) -> float:
        """Return the sum of the logarithms of all times, so that all sizes count alike, if one shot is taken up to a limit."""
        return sum(math.log(one if num_bytes <= limit else two) for num_bytes, one, two in self.rows)


def measure_on_gpus(
    comm: MPI.Intracomm,
    device: Device,
    ways: Mapping[str, Measured],
    max_bytes: int,
    report: Callable[[int, Times], None] | None = None,
) -> GpuMeasurements:
    """Return the times of each way, from 16 bytes up: see `race`. A collective call.

    Parameters
    ----------
    comm : MPI.Intracomm
        The ranks.
    device : Device
        The GPU of this rank.
    ways : mapping of str to Measured
        For each name a communicator that takes this way.
    max_bytes, report : int, callable
        As for `measure`.
    """

    def run(each: Measured, arrays: Any, targets: Any) -> None:
        each.all_reduce(ReduceOp.SUM, arrays, None, targets)
        wait_until_complete(device)

    def runs(num_bytes: int) -> dict[str, Run]:
        values = device.array_module.ones(num_bytes // ITEM_BYTES, np.float32)
        target = device.array_module.empty_like(values)
        return {way: partial(run, each, [values], [target]) for way, each in ways.items()}

    found, (first, second) = race(comm, runs, max_bytes, report), ways
    rows = [(num_bytes, times[first], times[second]) for num_bytes, times in sorted(found.items()) if len(times) == len(ways)]
    return GpuMeasurements(device.identity().name, (first, second), tuple(rows))


def wait_until_complete(device: Device) -> None:
    """Wait until what was enqueued on the current stream has ended.

    Raises
    ------
    DeadlineExceededError
        If it has not after a minute: another rank has not made the call.
    """
    drive(until(device.current_stream().record()), lambda: "a call that is measured on GPUs", DEADLINE_SECONDS)
