"""Fit the constants of the cost model to what was measured.

Source: Levenberg: A Method for the Solution of Certain Non-Linear Problems in Least Squares. Quarterly of Applied
Mathematics 2(2), 1944 (damped least squares).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpistrat.algorithms.choose import PLANNERS
from mpistrat.algorithms.cost import DEFAULT, Correction, CostModel, predict_seconds
from mpistrat.topology.world import World

__all__ = ["CONSTANTS", "Measurement", "corrected", "fit", "modelled_seconds"]

CONSTANTS = tuple(name for name, value in vars(DEFAULT).items() if isinstance(value, float) and value)
"""The constants of a `CostModel` that are fitted: all that are no sizes, and that matter to memory of the host."""

ITEM_BYTES = 4
MAX_ITERATIONS = 40
# how much a constant is held to where it began: those that nothing measured depends on stay there
_TETHER = 0.02
_LARGE = 0.1  # an error that may be an outlier, as a logarithm of a ratio
_STEP = 1e-4
Vector = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Measurement:
    """How long an all-reduce of float32 took.

    Attributes
    ----------
    world : World
        Where.
    algorithm : str
        A name in `PLANNERS`.
    num_bytes : int
        Size of the buffer.
    seconds : float
        Time of the slowest rank, a median.
    """

    world: World
    algorithm: str
    num_bytes: int
    seconds: float


def modelled_seconds(measurement: Measurement, model: CostModel) -> float:
    """Return what the model predicts for what was measured."""
    plan = PLANNERS[measurement.algorithm](measurement.world, measurement.num_bytes // ITEM_BYTES, ITEM_BYTES, 0)
    return predict_seconds(plan, model)


def fit(measurements: Sequence[Measurement], start: CostModel = DEFAULT) -> CostModel:
    """Return the model whose predictions are nearest to what was measured, in ratios.

    Parameters
    ----------
    measurements : sequence of Measurement
        Of any worlds, algorithms and sizes; those of empty buffers and single ranks say nothing.
    start : CostModel
        Where the search begins. Constants that no measurement depends on stay as they are here.
    """
    model = replace(start, corrections=())
    useful = [measurement for measurement in measurements if modelled_seconds(measurement, model) > 0]
    if not useful:
        return model
    first = _logarithms(model)
    errors, damping = _errors(useful, model, first), 1e-2
    for _ in range(MAX_ITERATIONS):
        here = _logarithms(model)
        slopes = np.stack([_errors(useful, _moved(model, here, index), first) for index in range(len(here))], axis=1)
        slopes = (slopes - errors[:, None]) / _STEP
        step = np.linalg.solve(slopes.T @ slopes + damping * np.eye(len(here)), -slopes.T @ errors)
        candidate = _with(model, here + np.clip(step, -1, 1))
        found = _errors(useful, candidate, first)
        if found @ found < errors @ errors:
            done = errors @ errors - found @ found < 1e-6
            model, errors, damping = candidate, found, damping / 4
            if done:
                break
        else:
            damping *= 8
    return model


def corrected(model: CostModel, measurements: Iterable[Measurement]) -> CostModel:
    """Return a model that at each size measured predicts what was measured; see `Correction` for the sizes between.

    Parameters
    ----------
    model : CostModel
        The constants.
    measurements : iterable of Measurement
        All of one world: the model that is returned is for it alone.
    """
    plain = replace(model, corrections=())
    points: dict[str, dict[int, float]] = {}
    for measurement in measurements:
        modelled = modelled_seconds(measurement, plain)
        if modelled > 0:
            points.setdefault(measurement.algorithm, {})[measurement.num_bytes] = measurement.seconds / modelled
    return replace(model, corrections=tuple(Correction(name, tuple(sorted(found.items()))) for name, found in points.items()))


def _errors(measurements: Sequence[Measurement], model: CostModel, first: Vector) -> Vector:
    """Return the logarithms of modelled / measured, and how far the constants are from where they began."""
    ratios = [_softened(math.log(modelled_seconds(measurement, model) / measurement.seconds)) for measurement in measurements]
    return np.concatenate([ratios, _TETHER * (_logarithms(model) - first)])


def _softened(error: float) -> float:
    """Return an error whose square grows like the error itself where that is large: a few outliers decide nothing."""
    return math.copysign(_LARGE * math.sqrt(2 * (math.hypot(1, error / _LARGE) - 1)), error)


def _logarithms(model: CostModel) -> Vector:
    return np.log([getattr(model, name) for name in CONSTANTS])


def _with(model: CostModel, logarithms: Vector) -> CostModel:
    constants: dict[str, Any] = {name: math.exp(value) for name, value in zip(CONSTANTS, logarithms, strict=True)}
    return replace(model, **constants)


def _moved(model: CostModel, here: Vector, index: int) -> CostModel:
    moved = here.copy()
    moved[index] += _STEP
    return _with(model, moved)
