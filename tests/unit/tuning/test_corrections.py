"""What was measured is predicted exactly where it was measured."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.algorithms.choose import PLANNERS, choose
from mpistrat.algorithms.cost import DEFAULT, Correction, predict_seconds
from mpistrat.topology.world import World
from mpistrat.tuning.model import Measurement, corrected, modelled_seconds

SLOW = dataclasses.replace(DEFAULT, link_bytes_per_second=1e8, inter_step_seconds=1e-4, call_seconds=5e-5)
SIZES = [2**exponent for exponent in range(4, 25, 2)]


def measured(shape: str, model=SLOW, sizes=SIZES, factor: float = 1.0) -> list[Measurement]:
    """Return what ranks would take that do just what the model says, times a factor."""
    world, found = World.from_shape(shape), []
    for name in PLANNERS:
        for num_bytes in sizes:
            one = Measurement(world, name, num_bytes, 1.0)
            found.append(dataclasses.replace(one, seconds=factor * modelled_seconds(one, model)))
    return found


def test_what_was_measured_is_predicted() -> None:
    # no constants of the model say this: one algorithm is slow at one size
    found = [
        dataclasses.replace(one, seconds=9 * one.seconds) if (one.algorithm, one.num_bytes) == ("flat", 64) else one
        for one in measured("4x2")
    ]
    model = corrected(SLOW, found)
    for one in found:
        assert modelled_seconds(one, model) == pytest.approx(one.seconds)
    assert choose(World.from_shape("4x2"), 4, 4, model=model).plan.algorithm == "flat"
    assert choose(World.from_shape("4x2"), 16, 4, model=model).plan.algorithm != "flat"


def test_between_sizes_the_ratio_changes_evenly_and_beyond_them_it_stays() -> None:
    correction = Correction("flat", ((16, 1.0), (64, 3.0)))
    assert [correction.ratio(n) for n in (0, 8, 16, 32, 48, 64, 65, 2**40)] == [1.0, 1.0, 1.0, 2.0, 2.5, 3.0, 3.0, 3.0]
    assert Correction("flat", ((16, 2.0),)).ratio(1000) == 2.0


def test_only_the_algorithm_that_was_measured_is_corrected() -> None:
    world = World.from_shape("4x2")
    model = dataclasses.replace(DEFAULT, corrections=(Correction("flat", ((16, 2.0),)),))
    for name, planner in PLANNERS.items():
        plan = planner(world, 1000, 4, 0)[0]
        assert predict_seconds(plan, model) == predict_seconds(plan) * (2 if name == "flat" else 1)


@given(st.sampled_from(["1x2", "1x4", "2x2", "3+1", "4x1"]), st.floats(0.1, 10), st.floats(0.1, 10))
def test_the_fastest_measured_is_chosen(shape: str, flat: float, others: float) -> None:
    found = [
        dataclasses.replace(one, seconds=one.seconds * (flat if one.algorithm == "flat" else others))
        for one in measured(shape, DEFAULT, [64, 2**16])
    ]
    model = corrected(DEFAULT, found)
    for num_bytes in (64, 2**16):
        times = {one.algorithm: one.seconds for one in found if one.num_bytes == num_bytes}
        chosen = choose(World.from_shape(shape), num_bytes // 4, 4, model=model).plan.algorithm
        assert times[chosen] == pytest.approx(min(times.values()))
