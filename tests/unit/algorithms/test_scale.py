"""Predictions for many nodes: they agree with the plans, and with what the algorithms are known for."""

from __future__ import annotations

import dataclasses

import pytest

from mpistrat.algorithms import hierarchical
from mpistrat.algorithms.cost import DEFAULT, Correction, CostModel, predict_seconds
from mpistrat.algorithms.scale import PREDICTORS, assumptions_text, predict_scale
from mpistrat.errors import InvalidArgumentError
from mpistrat.topology.world import World

MIB = 2**20
# one term at a time
STEPS = CostModel(
    call_seconds=0, intra_step_seconds=1e-9, inter_step_seconds=1, link_bytes_per_second=1e30, link_efficiency=1,
    memory_bytes_per_second=1e30, cache_bytes_per_second=1e30,
)  # fmt: skip
WIRE = dataclasses.replace(STEPS, inter_step_seconds=1e-30, intra_step_seconds=1e-30, link_bytes_per_second=1e6)


def by_start(found: dict[str, float]) -> dict[str, float]:
    return {name.partition(" (")[0]: seconds for name, seconds in found.items()}


def test_messages_in_a_row() -> None:
    found = by_start(predict_scale(16, 4, 1000, STEPS))
    assert found["flat ring"] == pytest.approx(2 * 63)
    assert found["flat halving and doubling"] == pytest.approx(8)
    assert found["flat recursive doubling"] == pytest.approx(4)
    assert found["halving and doubling along rails"] == pytest.approx(8)
    assert found["mpistrat hierarchical"] == pytest.approx(30)


def test_bytes_over_a_link() -> None:
    found = by_start(predict_scale(4, 8, 1_000_000, WIRE))
    assert found["flat ring"] == pytest.approx(2 * 31 / 32)
    assert found["flat halving and doubling"] == pytest.approx(2 * 3 / 4)
    assert found["flat recursive doubling"] == pytest.approx(2 * 8)
    for name in ("halving and doubling along rails", "mpistrat hierarchical", "mpistrat pipelined"):
        assert found[name] == pytest.approx(2 * 3 / 4)


def test_several_links_of_a_node() -> None:
    one, four = (by_start(predict_scale(4, 8, 1_000_000, dataclasses.replace(WIRE, links=links))) for links in (1, 4))
    ring = [name for name in one if name.startswith("flat ring")]
    for name in one:
        assert four[name] == pytest.approx(one[name] if name in ring else one[name] / 4), name
    assert "on each of 4 links of a node" in assumptions_text(dataclasses.replace(WIRE, links=4))


def test_ours_are_what_the_plans_cost() -> None:
    plan = hierarchical.plan(World.from_shape("8x4"), MIB, 4)
    corrected = dataclasses.replace(DEFAULT, corrections=(Correction("hierarchical", ((16, 9.0),)),))
    for model in (DEFAULT, corrected):
        assert by_start(predict_scale(8, 4, 4 * MIB, model))["mpistrat hierarchical"] == predict_seconds(plan)


def test_one_rank_and_nothing_cost_nothing() -> None:
    assert set(predict_scale(1, 1, 100).values()) == {0.0}
    assert set(predict_scale(4, 4, 0).values()) == {0.0}
    assert all(seconds > 0 for seconds in predict_scale(1, 2, 100).values())


def test_ten_thousand_nodes_are_predicted() -> None:
    found = by_start(predict_scale(10_000, 8, 100 * MIB))
    assert len(found) == len(PREDICTORS)
    assert found["halving and doubling along rails"] < found["mpistrat hierarchical"] < found["flat ring"]


def test_numbers_out_of_range_are_refused() -> None:
    for arguments, message in (((0, 8, 1), "nodes must be at least 1; got 0"), ((1, 1, -1), "num_bytes must be at least 0")):
        with pytest.raises(InvalidArgumentError, match=message):
            predict_scale(*arguments)


def test_assumptions_name_all_constants() -> None:
    text = assumptions_text()
    for part in ("α 20 µs between nodes", "1/β 1.14 GB/s", "1/γ 20 GB/s", "(defaults)", "full bisection", "no contention"):
        assert part in text
