"""Train what the demo trains on GPUs and on CPUs, one job after the other, and compare the losses of all steps.

python -m tests.gpu.training_pair 4 2x2 gpu,cpu --report FILE
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import mpistrat
from mpistrat import settings
from mpistrat.device.binding import bound_device
from mpistrat.errors import LaunchError
from mpistrat.launch.mpiexec import command
from mpistrat.tools import train_digits
from tests.gpu.program import with_strategy, write_report

EPOCHS = 2


def main(num_ranks: str = "", nodes: str = "", devices: str = "gpu,cpu") -> dict[str, Any]:
    """Start a job on each of two devices, and compare them; or train, as a rank of one, where no ranks are said."""
    if not num_ranks:
        return with_strategy(_train)
    return compare(*(_run(device, int(num_ranks), nodes) for device in devices.split(",")))


def compare(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Return how far two trainings are apart.

    Returns the largest difference of a step's losses, relative to the loss, and the two accuracies.
    """
    pairs = zip(one["losses"], other["losses"], strict=True)
    largest = max(abs(a - b) / abs(b) for a, b in pairs)
    return {"largest_difference": largest, "accuracy": one["accuracy"], "accuracy_of_other": other["accuracy"]}


def _run(device: str, num_ranks: int, nodes: str) -> dict[str, Any]:
    """Run a job to its end, and return what its first rank wrote."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "losses.json")
        program = [sys.executable, "-m", "tests.gpu.training_pair", "--report", str(report)]
        argv, extra = command(num_ranks, program, nodes)
        # in this process's session: whoever ends that ends the job
        done = subprocess.run(argv, env={**os.environ, **extra, settings.DEVICE.name: device}, check=False)
        if done.returncode:
            raise LaunchError(f"the job on {device} ended with {done.returncode}")
        found: dict[str, Any] = json.loads(report.read_text())
    if found["on_gpu"] != (device == "gpu"):
        raise LaunchError(f"{settings.DEVICE.name}={device} was set, and the ranks computed on something else")
    return found


def _train(strategy: mpistrat.Strategy) -> dict[str, Any]:
    _, accuracy, losses = train_digits.train(strategy, EPOCHS)
    return {"losses": losses, "accuracy": accuracy, "on_gpu": bound_device() is not None}


if __name__ == "__main__":
    write_report(main)
