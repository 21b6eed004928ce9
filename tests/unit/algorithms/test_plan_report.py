"""What is told of a plan: bytes that are known exactly."""

from __future__ import annotations

import dataclasses

import pytest

from mpistrat.algorithms.plan import Plan
from mpistrat.algorithms.plan_report import phase_bytes
from mpistrat.algorithms.planners import flat, hierarchical
from mpistrat.topology.world import World

MIB = 2**20


@pytest.mark.parametrize(
    ("plan", "sent", "over_the_link"),
    [
        (flat(World.from_shape("4x2"), 1000, 8), [14000], [12000]),
        (hierarchical(World.from_shape("4x2"), 1000, 8), [4000, 6000, 4000], [0, 12000, 0]),
        (hierarchical(World.from_shape("3+1"), 900, 8), [4800, 7200, 4800], [0, 7200, 0]),
        (hierarchical(World.from_shape("1x4"), 1000, 8), [6000, 6000], [0, 0]),
        (hierarchical(World.from_shape("1x2"), 1000, 8), [8000], [0]),
        (hierarchical(World.from_shape("4x1"), 1000, 8), [12000], [12000]),
    ],
    ids=str,
)
def test_bytes_of_each_phase(plan: Plan, sent: list[int], over_the_link: list[int]) -> None:
    found = [phase_bytes(plan, phase) for phase in plan.phases]
    assert found == list(zip(sent, over_the_link, strict=True))
    cut = dataclasses.replace(plan, chunk_count=plan.padded(100), depth=2)
    assert [phase_bytes(cut, phase) for phase in plan.phases] == found


def test_what_is_cast_between_nodes_is_shorter_there() -> None:
    plan = dataclasses.replace(hierarchical(World.from_shape("4x2"), 1000, 4), wire_itemsize=2)
    assert [phase_bytes(plan, phase) for phase in plan.phases] == [(2000, 0), (1500, 3000), (2000, 0)]
