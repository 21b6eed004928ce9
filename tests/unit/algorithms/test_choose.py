"""Choosing: the order in which algorithms win as buffers grow, the reasons, and the errors."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.algorithms.choose import PLANNERS, choose
from mpistrat.algorithms.cost import DEFAULT, CostModel
from mpistrat.errors import InvalidArgumentError, Unsuitable
from mpistrat.testing.simulate import simulate
from mpistrat.topology.world import World
from tests.unit.worlds import random_worlds

KIB, MIB = 2**10, 2**20

# a cluster written out, so that calibrating the defaults moves nothing here
FAST = CostModel(
    call_seconds=20e-6, intra_step_seconds=1e-6, inter_step_seconds=20e-6,
    link_bytes_per_second=1.2e9, link_efficiency=0.95,
    memory_bytes_per_second=6e9, cache_bytes_per_second=12e9, cache_bytes=MIB,
    flat_link_efficiency=0.9, flat_crowded_link_efficiency=0.35,
    flat_cache_efficiency=0.45, flat_memory_efficiency=0.45,
)  # fmt: skip
# eight ranks on two cores, four hosts joined by 1 Gbit/s links
SLOW = dataclasses.replace(FAST, link_bytes_per_second=119e6, memory_bytes_per_second=1.5e9, cache_bytes_per_second=3e9)


def chosen(shape: str, num_bytes: int, model: CostModel = FAST) -> str:
    return choose(World.from_shape(shape), num_bytes // 4, 4, model=model).plan.algorithm


@pytest.mark.parametrize("shape", ["4x2", "4x2:cyclic", "4x8", "8x4", "3+1+2+2"])
def test_several_nodes_go_from_flat_to_hierarchical_to_pipelined(shape: str) -> None:
    assert {chosen(shape, size) for size in (8, KIB, 8 * KIB, 32 * KIB)} == {"flat"}
    assert {chosen(shape, size) for size in (256 * KIB, 512 * KIB)} == {"hierarchical"}
    assert {chosen(shape, size) for size in (4 * MIB, 16 * MIB, 64 * MIB)} == {"pipelined"}


@pytest.mark.parametrize("shape", ["4x2", "4x2:cyclic", "3+1+2+2"])
def test_slow_links_make_flat_lose_sooner(shape: str) -> None:
    assert {chosen(shape, size, model=SLOW) for size in (8, KIB, 4 * KIB)} == {"flat"}
    assert {chosen(shape, size, model=SLOW) for size in (32 * KIB, 128 * KIB)} == {"hierarchical"}
    assert {chosen(shape, size, model=SLOW) for size in (2 * MIB, 16 * MIB, 64 * MIB)} == {"pipelined"}


@pytest.mark.parametrize(("shape", "flat_to"), [("1x2", 256), ("1x4", 8 * KIB), ("1x8", 8 * KIB)])
def test_one_node_goes_from_flat_to_hierarchical_to_pipelined(shape: str, flat_to: int) -> None:
    assert {chosen(shape, size) for size in (8, flat_to // 4, flat_to)} == {"flat"}
    assert {chosen(shape, size) for size in (64 * KIB, 512 * KIB)} == {"hierarchical"}
    assert {chosen(shape, size) for size in (16 * MIB, 64 * MIB)} == {"pipelined"}


@pytest.mark.parametrize("shape", ["1x4", "2x2", "4x2", "4x8", "3+1+2+2"])
def test_the_defaults_never_go_back_to_a_simpler_algorithm(shape: str) -> None:
    order = ["flat", "hierarchical", "pipelined"]
    ranks = [order.index(chosen(shape, 2**exponent, DEFAULT)) for exponent in range(3, 29)]
    assert ranks == sorted(ranks)
    assert (ranks[0], ranks[-1]) == (0, 2)


@pytest.mark.parametrize("shape", ["1x4", "4x2"])
def test_of_equal_plans_the_simpler_is_chosen(shape: str) -> None:
    choice = choose(World.from_shape(shape), 64, 4, "pipelined", model=FAST)
    seconds = {candidate.algorithm: candidate.seconds for candidate in choice.considered}
    assert choice.plan.num_chunks == 1
    assert seconds["pipelined"] == seconds["hierarchical"], "one chunk is what hierarchical does"
    assert choose(World.from_shape(shape), 64 * KIB, 4, model=FAST).plan.algorithm == "hierarchical"


def test_one_rank_per_node_stays_flat_where_steps_decide() -> None:
    assert chosen("8x1", 16 * KIB) == "flat"


def test_the_reason_names_the_two_fastest() -> None:
    choice = choose(World.from_shape("4x8"), 16 * MIB, 4, model=FAST)
    first, second = sorted(choice.considered, key=lambda candidate: candidate.seconds)[:2]
    assert choice.plan == first.plan
    assert choice.reason == (
        f"pipelined is predicted fastest: {first.seconds * 1e3:.3g} ms; next: hierarchical {second.seconds * 1e3:.3g} ms"
    )


def test_every_planner_is_considered() -> None:
    considered = {candidate.algorithm: candidate for candidate in choose(World.from_shape("1x4"), 1000, 4).considered}
    assert list(considered) == list(PLANNERS)
    assert considered["leader"].declined == "because all ranks are on one node, which has only one leader"
    assert math.isinf(considered["leader"].seconds)
    assert considered["flat"].declined == ""
    assert 0 < considered["flat"].seconds < 1


def test_an_algorithm_is_taken_by_name() -> None:
    choice = choose(World.from_shape("4x2"), 16 * MIB, 4, "leader", model=FAST)
    assert choice.plan.algorithm == "leader"
    assert choice.reason == "leader was asked for by name; auto would choose pipelined"


def test_a_named_algorithm_that_declines_raises_with_what_is_accepted() -> None:
    message = (
        r"algorithm 'leader' cannot be used on World\(1x4.*\), because all ranks are on one node.*; "
        r"accepted here are auto, flat, hierarchical, pipelined$"
    )
    with pytest.raises(Unsuitable, match=message):
        choose(World.from_shape("1x4"), 1000, 4, "leader")


def test_an_unknown_name_lists_the_names() -> None:
    with pytest.raises(InvalidArgumentError, match=r"'best'; accepted are auto, flat, leader, hierarchical, pipelined$"):
        choose(World.from_shape("1x4"), 1000, 4, "best")


@pytest.mark.parametrize(
    ("count", "itemsize", "chunk_bytes", "message"),
    [
        (-1, 4, 0, "count must be at least 0; got -1"),
        (10, 0, 0, "itemsize must be at least 1; got 0"),
        (10, 4, -5, "chunk_bytes must be at least 0; got -5"),
    ],
)
def test_numbers_out_of_range_are_refused(count: int, itemsize: int, chunk_bytes: int, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        choose(World.from_shape("2x2"), count, itemsize, chunk_bytes=chunk_bytes)


def test_chunk_bytes_reach_the_pipelined_plan() -> None:
    choice = choose(World.from_shape("2x2"), MIB, 4, "pipelined", chunk_bytes=256 * KIB)
    assert choice.plan.num_chunks == 16


def test_one_rank_and_empty_buffers_have_a_plan() -> None:
    assert choose(World.from_shape("1x1"), 1000, 4).plan.phases == ()
    assert choose(World.from_shape("2x2"), 0, 4).plan.num_chunks == 0


@given(random_worlds, st.integers(0, 10**7), st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_auto_always_has_a_proved_and_repeatable_answer(world: World, count: int, itemsize: int, tenths: bool) -> None:
    chunk_bytes = count * itemsize // 10 if tenths else 0
    choice = choose(world, count, itemsize, chunk_bytes=chunk_bytes)
    simulate(choice.plan)
    assert choose(World(world.nodes), count, itemsize, chunk_bytes=chunk_bytes) == choice
    seconds = {candidate.algorithm: candidate.seconds for candidate in choice.considered}
    assert seconds[choice.plan.algorithm] == min(seconds.values())
