"""What was measured, and the cost model that predicts it exactly."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from mpistrat.algorithms.choose import choose
from mpistrat.algorithms.cost import Correction, CostModel, predict_seconds
from mpistrat.topology.world import World

ITEM_BYTES = 4


@dataclass(frozen=True)
class Measurement:
    """The time of an all-reduce of float32.

    Attributes
    ----------
    world : World
        The ranks and their placement.
    algorithm : str
        A name in `PLANNERS`.
    num_bytes : int
        Size of the buffer.
    seconds : float
        Median of the slowest rank's time.
    """

    world: World
    algorithm: str
    num_bytes: int
    seconds: float


def modelled_seconds(measurement: Measurement, model: CostModel) -> float:
    """Return the time that a model predicts for a measurement."""
    count = measurement.num_bytes // ITEM_BYTES
    return predict_seconds(choose(measurement.world, count, ITEM_BYTES, measurement.algorithm, model=model).plan, model)


def corrected(model: CostModel, measurements: Iterable[Measurement]) -> CostModel:
    """Return a model that predicts the measured times exactly at the measured sizes; see `Correction` for sizes between.

    Parameters
    ----------
    model : CostModel
        The constants.
    measurements : iterable of Measurement
        All of one world, the only one that the returned model is for.
    """
    plain = replace(model, corrections=())
    points: dict[str, dict[int, float]] = {}
    for measurement in measurements:
        modelled = modelled_seconds(measurement, plain)
        if modelled > 0:
            points.setdefault(measurement.algorithm, {})[measurement.num_bytes] = measurement.seconds / modelled
    return replace(model, corrections=tuple(Correction(name, tuple(sorted(found.items()))) for name, found in points.items()))
