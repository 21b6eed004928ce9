"""Train what the demo trains on GPUs, and then on the CPU of the first rank alone, and compare all that comes of it."""

from typing import Any

import numpy as np

import mpistrat
from mpistrat.device import binding
from mpistrat.tools import train_digits
from tests.gpu.program import the_gpu, with_strategy, write_report


def check(strategy: Any, epochs: int = 2, **how: Any) -> dict[str, float]:
    """Train with a strategy of GPUs, and alone on a CPU; return how they differ at most, and how well. A collective call."""
    weights, accuracy, losses = train_digits.train(strategy, epochs, **how)
    device, alone = the_gpu(), None
    binding.bind(None)
    if strategy.rank == 0:
        alone = train_digits.train(mpistrat.OneDeviceStrategy("/cpu:0"), epochs, **how)
    binding.bind(device)
    expected, accuracy_of_other, losses_of_other = strategy.communicator.broadcast_object(alone)
    for name, value in weights.items():
        assert type(value) is np.ndarray
        of_first = strategy.communicator.broadcast_object(value)
        assert value.tobytes() == of_first.tobytes(), f"replicas hold different {name}"
    return {
        "largest_difference": max(abs(a - b) / abs(b) for a, b in zip(losses, losses_of_other, strict=True)),
        "weights_differ_by": max(float(np.abs(weights[name] - value).max()) for name, value in expected.items()),
        "accuracy": accuracy,
        "accuracy_of_other": accuracy_of_other,
    }


if __name__ == "__main__":
    write_report(lambda: with_strategy(check))
