"""What programs of probes have in common: where their figures go, the GPU that they compute on, and when it is through."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mpistrat
from mpistrat.device.abstract import Device
from mpistrat.device.binding import bound_device
from mpistrat.errors import LaunchError
from mpistrat.launch.environment import detect

STUCK_SECONDS = 20.0


def write_report(measure: Callable[..., Mapping[str, Any]]) -> None:
    """Call a function with the words of the command line; let the first rank write what it returns to ``--report FILE``."""
    *words, option, path = sys.argv[1:]
    assert option == "--report", "the last words must be --report FILE"
    found, view = measure(*words), detect()
    if view is None or not view.rank:
        Path(path).write_text(json.dumps(found))


def with_strategy(measure: Callable[[mpistrat.Strategy], Mapping[str, Any]]) -> dict[str, Any]:
    """Return what a function finds with a strategy of all ranks, and how long it took."""
    strategy, begun = mpistrat.MultiWorkerMirroredStrategy(), time.monotonic()
    found = measure(strategy)
    strategy.close()
    return {**found, "seconds": round(time.monotonic() - begun, 1)}


def the_gpu() -> Device:
    """Return the device that this process is bound to."""
    device = bound_device()
    if device is None:
        raise LaunchError("this process computes on its CPU; MPISTRAT_DEVICE=gpu says why")
    return device


def settle(device: Device) -> None:
    """Wait until all work on the current stream is through."""
    event, deadline = device.current_stream().record(), time.monotonic() + STUCK_SECONDS
    while not event.done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the GPU was not through after {STUCK_SECONDS:g} s")
