"""Train what the demo trains on GPUs and on CPUs, one job after the other, and compare the losses of all steps.

python -m tests.gpu.training_pair --ranks 4 --nodes 2x2 --report FILE
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mpistrat
from mpistrat import settings
from mpistrat.device.binding import bound_device
from mpistrat.errors import LaunchError
from mpistrat.launch.mpiexec import command
from mpistrat.tools import train_digits

EPOCHS = 2


def main(argv: Sequence[str] | None = None) -> None:
    """Start the two jobs and compare them; or, as a rank of one, train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1, help="how many ranks each job has")
    parser.add_argument("--nodes", default="", help="the nodes to pretend, such as 2x2")
    parser.add_argument("--devices", default="gpu,cpu", help="what MPISTRAT_DEVICE is in the two jobs")
    parser.add_argument("--report", type=Path, required=True, help="where to write the figures")
    parser.add_argument("--as-rank", action="store_true", help="train, as one of the ranks")
    arguments = parser.parse_args(argv)
    if arguments.as_rank:
        _train(arguments.report)
        return
    jobs = [_run(device, arguments.ranks, arguments.nodes) for device in arguments.devices.split(",")]
    figures = compare(*jobs)
    print(json.dumps(figures))
    arguments.report.write_text(json.dumps(figures))


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
        program = [sys.executable, "-m", "tests.gpu.training_pair", "--as-rank", "--report", str(report)]
        argv, extra = command(num_ranks, program, nodes)
        # in this process's session: whoever ends that ends the job
        done = subprocess.run(argv, env={**os.environ, **extra, settings.DEVICE.name: device}, check=False)
        if done.returncode:
            raise LaunchError(f"the job on {device} ended with {done.returncode}")
        found: dict[str, Any] = json.loads(report.read_text())
    if found["on_gpu"] != (device == "gpu"):
        raise LaunchError(f"{settings.DEVICE.name}={device} was set, and the ranks computed on something else")
    return found


def _train(report: Path) -> None:
    strategy = mpistrat.MultiWorkerMirroredStrategy()
    _, accuracy, losses = train_digits.train(strategy, EPOCHS)
    chief = strategy.extended.should_save_summary
    found = {"losses": losses, "accuracy": accuracy, "on_gpu": bound_device() is not None}
    strategy.close()
    if chief:
        report.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
