"""The cost model: bytes that are known exactly, and times that add up."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.algorithms.cost import DEFAULT, CostModel, link_bytes, phase_bytes, phase_seconds, predict_seconds
from mpistrat.algorithms.plan import Plan
from mpistrat.algorithms.planners import flat, hierarchical
from mpistrat.topology.world import World
from tests.unit.worlds import random_worlds

MIB = 2**20

# a model in which each phase costs exactly what one of the terms says
WIRE = CostModel(
    call_seconds=0, flat_call_seconds=0, intra_step_seconds=0, inter_step_seconds=0,
    link_bytes_per_second=1e9, link_efficiency=1,
    memory_bytes_per_second=1e30, cache_bytes_per_second=1e30, cache_bytes=MIB,
    flat_link_efficiency=1, flat_crowded_link_efficiency=0.25,
)  # fmt: skip
MEMORY = dataclasses.replace(WIRE, link_bytes_per_second=1e30, memory_bytes_per_second=1e9, cache_bytes_per_second=2e9)


def by_phase(plan: Plan, measure: object) -> list[int]:
    assert callable(measure)
    return [measure(plan, phase) for phase in plan.phases]


@pytest.mark.parametrize(
    ("plan", "sent", "over_the_link"),
    [
        (flat(World.from_shape("4x2"), 1000, 8)[0], [14000], [12000]),
        (hierarchical(World.from_shape("4x2"), 1000, 8)[0], [4000, 6000, 4000], [0, 12000, 0]),
        (hierarchical(World.from_shape("3+1"), 900, 8)[0], [4800, 7200, 4800], [0, 7200, 0]),
        (hierarchical(World.from_shape("1x4"), 1000, 8)[0], [6000, 6000], [0, 0]),
        (hierarchical(World.from_shape("4x1"), 1000, 8)[0], [12000], [12000]),
    ],
    ids=str,
)
def test_bytes_of_each_phase(plan: Plan, sent: list[int], over_the_link: list[int]) -> None:
    assert by_phase(plan, phase_bytes) == sent
    assert by_phase(plan, link_bytes) == over_the_link
    whole, cut = hierarchical(plan.world, MIB, 4)
    assert by_phase(cut, phase_bytes) == by_phase(whole, phase_bytes)


def test_the_wire_is_shared_by_the_ranks_of_a_node() -> None:
    seconds = 2 * 3 / 4 * 8 * MIB / 1e9
    for shape in ("4x1", "4x2", "4x8", "5+1+1+1"):
        plan = hierarchical(World.from_shape(shape), 2 * MIB, 4)[0]
        assert predict_seconds(plan, WIRE) == pytest.approx(seconds)


def test_flat_wastes_the_wire_where_nodes_are_many_or_crowded() -> None:
    shapes = ("2x1", "4x1", "2x2", "4x2")
    seconds = {shape: predict_seconds(flat(World.from_shape(shape), MIB, 4)[0], WIRE) for shape in shapes}
    assert seconds["2x1"] == pytest.approx(1.0 * 4 * MIB / 1e9)
    assert seconds["4x1"] == pytest.approx(1.5 * 4 * MIB / 1e9 / 0.25)
    assert seconds["2x2"] == pytest.approx(1.0 * 4 * MIB / 1e9 / 0.25)
    assert seconds["4x2"] == pytest.approx(1.5 * 4 * MIB / 1e9 / 0.25)


@pytest.mark.parametrize(("shape", "passes"), [("1x2", 9 / 4), ("1x4", 2 + 1 + 1 / 4 + 2), ("1x8", 2 + 1 + 1 / 8 + 2)])
def test_small_chunks_stay_in_the_cache(shape: str, passes: float) -> None:
    world = World.from_shape(shape)
    whole, _ = hierarchical(world, 4 * MIB, 4)
    [cut] = hierarchical(world, 4 * MIB, 4, chunk_bytes=MEMORY.cache_bytes)
    assert predict_seconds(whole, MEMORY) == pytest.approx(passes * 16 * MIB / 1e9)
    assert predict_seconds(cut, MEMORY) == pytest.approx(passes * 16 * MIB / 2e9)


def test_latency_counts_steps_and_calls() -> None:
    model = dataclasses.replace(WIRE, call_seconds=1, flat_call_seconds=1, intra_step_seconds=10, inter_step_seconds=100)
    for planner, calls, intra, inter in ((flat, 1, 1, 2), (hierarchical, 3, 3, 6)):
        seconds = predict_seconds(planner(World.from_shape("4x2"), 1, 1)[0], model)
        assert seconds == pytest.approx(calls + 10 * intra + 100 * inter, rel=1e-6)


def test_the_busier_lane_hides_the_other() -> None:
    world = World.from_shape("2x2")
    _, plan = hierarchical(world, 16 * MIB, 4)
    scatter, rails, gather = (phase_seconds(plan, phase) for phase in plan.phases)
    assert plan.num_chunks > 1
    assert predict_seconds(plan) == pytest.approx(max(rails, scatter + gather) + min(rails, scatter + gather) / plan.num_chunks)
    one_at_a_time = dataclasses.replace(plan, depth=1)
    assert predict_seconds(one_at_a_time) == pytest.approx(scatter + rails + gather)


@given(random_worlds, st.integers(1, 10**7))
def test_more_bytes_cost_more_and_nothing_is_free(world: World, count: int) -> None:
    for planner in (flat, hierarchical):
        smaller, larger = planner(world, count, 4)[0], planner(world, 2 * count, 4)[0]
        assert predict_seconds(planner(world, 0, 4)[0]) == 0
        if smaller.phases:
            assert 0 < predict_seconds(smaller, DEFAULT) < predict_seconds(larger, DEFAULT)
