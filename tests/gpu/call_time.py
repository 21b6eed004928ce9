"""What Python takes for a call on device arrays whose plan is known: one rank alone, so that nobody is waited for.

MPISTRAT_DEVICE=gpu python -m tests.gpu.call_time --report FILE
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np

from mpistrat.communicator.communicator import Communicator
from mpistrat.device.abstract import Device
from mpistrat.device.binding import bound_device
from mpistrat.errors import LaunchError
from mpistrat.groups.hierarchy import Hierarchy
from mpistrat.launch.bootstrap import start
from mpistrat.reduction import ReduceOp
from mpistrat.topology.world import World
from tests.gradients import resnet50

CALLS = 200


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", type=Path, required=True, help="where to write the figures")
    arguments = parser.parse_args(argv)
    comm = start()
    device = bound_device()
    if device is None:
        raise LaunchError("this process computes on its CPU; MPISTRAT_DEVICE=gpu says why")
    communicator = Communicator(Hierarchy(comm, World.from_shape("1x1")))
    figures = measure(communicator, device)
    communicator.close()
    arguments.report.write_text(json.dumps(figures))


def measure(communicator: Communicator, device: Device, calls: int = CALLS) -> dict[str, float]:
    """Return the median time of an all-reduce of one array of 1000 elements, and of arrays like a network's gradients."""
    # as many arrays as ResNet-50 has gradients, each small: it is not the GPU that is measured
    lists = {"python_us": 1, "python_us_of_gradients": len(resnet50())}
    figures = {}
    for name, count in lists.items():
        arrays = [device.array_module.asarray(np.ones(1000, np.float32)) for _ in range(count)]
        samples = []
        for _ in range(2 + calls):
            begun = time.perf_counter()
            communicator.all_reduce(ReduceOp.SUM, arrays)
            samples.append(time.perf_counter() - begun)
            event = device.current_stream().record()
            while not event.done():
                pass
        figures[name] = round(1e6 * median(samples[2:]), 1)
    return figures


if __name__ == "__main__":
    main()
