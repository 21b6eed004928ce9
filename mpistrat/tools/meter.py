"""Measure training steps on one rank: the loss, the throughput, and the share of time spent communicating."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from mpistrat.timeline import Timeline

__all__ = ["Meter", "Step", "images_per_second", "mean_loss", "share_communicating"]

# every scope of a plan; training steps have their own lane
LANES = ("intra", "inter", "leaders", "world")


@dataclass(frozen=True)
class Step:
    """The measurements of one training step.

    Attributes
    ----------
    epoch : int
        Counted from 0.
    loss : float
        Mean over the images of the global batch.
    images : int
        Size of the global batch.
    seconds, communicating_seconds : float
        Time since the end of the previous step (for the first one: since the meter was made), and the part of it in which
        this rank was in a collective: copying, sending or waiting for other ranks.
    """

    epoch: int
    loss: float
    images: int
    seconds: float
    communicating_seconds: float


class Meter:
    """Measures steps, and records them on the timeline.

    Parameters
    ----------
    timeline : Timeline
        The timeline of this rank's collectives; it is enabled here.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.steps: list[Step] = []
        self._timeline = timeline
        self._timeline.enabled = True
        self._started = time.perf_counter()
        self._busy_seconds = timeline.busy_seconds(LANES)

    def end_step(self, epoch: int, loss: float, images: int) -> Step:
        """End a step now, and return its measurements."""
        self._timeline.record(f"step {len(self.steps)}", "step", self._started)
        now, busy_seconds = time.perf_counter(), self._timeline.busy_seconds(LANES)
        step = Step(epoch, loss, images, now - self._started, busy_seconds - self._busy_seconds)
        self._started, self._busy_seconds = now, busy_seconds
        self.steps.append(step)
        return step


def mean_loss(steps: Sequence[Step]) -> float:
    """Return the mean loss over the images of some steps."""
    return sum(step.loss * step.images for step in steps) / sum(step.images for step in steps)


def images_per_second(steps: Sequence[Step]) -> float:
    """Return the throughput of all ranks over some steps."""
    return sum(step.images for step in steps) / sum(step.seconds for step in steps)


def share_communicating(steps: Sequence[Step]) -> float:
    """Return the share, 0 to 1, of the time of some steps that this rank spent communicating."""
    return sum(step.communicating_seconds for step in steps) / sum(step.seconds for step in steps)
