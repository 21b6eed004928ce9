"""The plot that ``mpistrat demo`` writes: the loss and the throughput of each step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from mpistrat.tools.meter import Step, images_per_second, mean_loss, share_communicating

__all__ = ["plot_training"]


def plot_training(path: Path, title: str, steps: Sequence[Step]) -> None:
    """Draw some training steps.

    Parameters
    ----------
    path : Path
        The PNG file to write.
    title : str
        The title of the figure.
    steps : sequence of Step
        In order, from the beginning of an epoch on; at least one.
    """
    epochs = [list(group) for _, group in groupby(steps, key=lambda step: step.epoch)]
    figure, (upper, lower) = plt.subplots(2, 1, sharex=True, figsize=(8, 5.5), layout="constrained")
    figure.suptitle(title)
    _draw(upper, epochs, [step.loss for step in steps], [mean_loss(epoch) for epoch in epochs], "#2a6fb0")
    upper.set_yscale("log")
    upper.set_ylabel("training loss")
    rates = [images_per_second([step]) for step in steps]
    _draw(lower, epochs, rates, [images_per_second(epoch) for epoch in epochs], "#c2571a")
    lower.set_ylim(0, 1.1 * max(rates))
    lower.set_ylabel("images per second")
    lower.set_xlabel(f"epoch ({share_communicating(steps):.0%} of the time communicating, copies and waiting included)")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw(axes: Axes, epochs: Sequence[Sequence[Step]], values: Sequence[float], means: Sequence[float], color: str) -> None:
    """Draw a value of each step where the step ends, in epochs, and the means of the epochs."""
    places = [number + (index + 1) / len(epoch) for number, epoch in enumerate(epochs) for index in range(len(epoch))]
    axes.plot(places, values, color=color, alpha=0.35, label="each step")
    axes.stairs(means, range(len(epochs) + 1), baseline=None, color=color, linewidth=2, label="mean of the epoch")
    axes.set_xlim(0, len(epochs))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
