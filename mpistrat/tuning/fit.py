"""Fit the constants of the cost model to what was measured: non-linear least squares, by SciPy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np

from mpistrat.algorithms.choose import PLANNERS
from mpistrat.algorithms.cost import DEFAULT, Correction, CostModel, predict_seconds
from mpistrat.errors import LaunchError
from mpistrat.topology.world import World

__all__ = ["CONSTANTS", "Measurement", "corrected", "fit", "modelled_seconds", "require_scipy"]

CONSTANTS = tuple(name for name, value in vars(DEFAULT).items() if isinstance(value, float) and value)
"""The constants of a `CostModel` that are fitted: all but sizes, and those of host memory only."""

ITEM_BYTES = 4
# regularisation towards the starting values: constants that no measurement depends on keep them
_TETHER = 0.02
_OUTLIER = 0.1  # residuals beyond this, logarithms of ratios, count linearly instead of squared
Vector = np.ndarray[Any, np.dtype[np.float64]]


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
    plan = PLANNERS[measurement.algorithm](measurement.world, measurement.num_bytes // ITEM_BYTES, ITEM_BYTES, 0)
    return predict_seconds(plan, model)


def fit(measurements: Sequence[Measurement], start: CostModel = DEFAULT) -> CostModel:
    """Return the model that minimises the logarithms of predicted / measured; outliers have little influence.

    Parameters
    ----------
    measurements : sequence of Measurement
        Of any worlds, algorithms and sizes; empty buffers and single ranks are ignored.
    start : CostModel
        The starting values. Constants that no measurement depends on keep them.

    Raises
    ------
    LaunchError
        If SciPy is not installed.
    """
    require_scipy()
    from scipy.optimize import least_squares

    model = replace(start, corrections=())
    useful = [measurement for measurement in measurements if modelled_seconds(measurement, model) > 0]
    if not useful:
        return model
    first = np.log([getattr(model, name) for name in CONSTANTS])

    def residuals(logarithms: Vector) -> Vector:
        candidate = _with(model, logarithms)
        ratios = [math.log(modelled_seconds(measurement, candidate) / measurement.seconds) for measurement in useful]
        return np.concatenate([ratios, _TETHER * (logarithms - first)])

    return _with(model, least_squares(residuals, first, loss="soft_l1", f_scale=_OUTLIER).x)


def require_scipy() -> None:
    """Check that SciPy is installed, before anything is measured.

    Raises
    ------
    LaunchError
        If it is not; names the extra that installs it.
    """
    if find_spec("scipy") is None:
        raise LaunchError("tuning fits the cost model with SciPy, which is not installed: pip install scipy")


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


def _with(model: CostModel, logarithms: Vector) -> CostModel:
    constants: dict[str, Any] = {name: math.exp(value) for name, value in zip(CONSTANTS, logarithms, strict=True)}
    return replace(model, **constants)
