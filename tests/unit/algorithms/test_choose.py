"""Choosing: the order in which algorithms win as buffers grow, the reasons, and the errors."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.algorithms.choose import PLANNERS, choose, choose_on_gpus
from mpistrat.algorithms.cost import DEFAULT, CostModel
from mpistrat.algorithms.plan import Verb
from mpistrat.errors import InvalidArgumentError
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
    """Return the algorithm that is chosen, or ``chunks`` if it is hierarchical on several."""
    plan = choose(World.from_shape(shape), num_bytes // 4, 4, model=model).plan
    return "chunks" if plan.depth > 1 else plan.algorithm


NODES = (8, KIB, 8 * KIB, 32 * KIB), (256 * KIB, 512 * KIB), (4 * MIB, 16 * MIB, 64 * MIB)
SLOW_NODES = (8, KIB, 4 * KIB), (32 * KIB, 128 * KIB), (2 * MIB, 16 * MIB, 64 * MIB)
ONE_NODE = (8, 2 * KIB, 8 * KIB), (64 * KIB, 512 * KIB), (16 * MIB, 64 * MIB)
PAIR = (8, 64, 256), (64 * KIB, 512 * KIB), (16 * MIB, 64 * MIB)


@pytest.mark.parametrize(
    ("model", "shape", "sizes"),
    [
        *((FAST, shape, NODES) for shape in ("4x2", "4x2:cyclic", "4x8", "8x4", "3+1+2+2")),
        *((SLOW, shape, SLOW_NODES) for shape in ("4x2", "4x2:cyclic", "3+1+2+2")),
        *((FAST, shape, ONE_NODE) for shape in ("1x4", "1x8")),
        (FAST, "1x2", PAIR),
        (FAST, "8x1", ((16 * KIB,), (), ())),  # where steps decide
    ],
)
def test_it_goes_from_flat_to_hierarchical_to_chunks(model: CostModel, shape: str, sizes: tuple[tuple[int, ...], ...]) -> None:
    for name, chosen_for in zip(("flat", "hierarchical", "chunks"), sizes, strict=True):
        assert {size: chosen(shape, size, model) for size in chosen_for} == dict.fromkeys(chosen_for, name)


@pytest.mark.parametrize("shape", ["1x4", "2x2", "4x2", "4x8", "3+1+2+2"])
def test_the_defaults_never_go_back_to_a_simpler_algorithm(shape: str) -> None:
    order = ["flat", "hierarchical", "chunks"]
    ranks = [order.index(chosen(shape, 2**exponent, DEFAULT)) for exponent in range(3, 29)]
    assert ranks == sorted(ranks)
    assert (ranks[0], ranks[-1]) == (0, 2)


def test_the_reason_names_the_two_fastest() -> None:
    choice = choose(World.from_shape("4x8"), 16 * MIB, 4, model=FAST)
    first, second = sorted(choice.considered, key=lambda candidate: candidate.seconds)[:2]
    assert choice.plan == first.plan
    assert choice.reason == (
        f"hierarchical is predicted fastest: {first.seconds * 1e3:.3g} ms; next: flat {second.seconds * 1e3:.3g} ms"
    )


def test_every_planner_is_considered() -> None:
    considered = choose(World.from_shape("1x4"), 1000, 4).considered
    assert [candidate.plan.algorithm for candidate in considered] == list(PLANNERS)
    assert all(0 < candidate.seconds < 1 for candidate in considered)


def test_an_algorithm_is_taken_by_name() -> None:
    choice = choose(World.from_shape("4x2"), 16 * MIB, 4, "flat", model=FAST)
    assert choice.plan.algorithm == "flat"
    assert choice.reason == "flat was asked for by name; auto would choose hierarchical"


@pytest.mark.parametrize(
    ("count", "itemsize", "algorithm", "chunk_bytes", "message"),
    [
        (-1, 4, "auto", 0, "count must be at least 0; got -1"),
        (10, 0, "auto", 0, "itemsize must be at least 1; got 0"),
        (10, 4, "auto", -5, "chunk_bytes must be at least 0; got -5"),
        (10, 4, "best", 0, r"'best'; accepted are auto, flat, hierarchical$"),
    ],
)
def test_what_cannot_be_planned_is_refused(count: int, itemsize: int, algorithm: str, chunk_bytes: int, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        choose(World.from_shape("2x2"), count, itemsize, algorithm, chunk_bytes=chunk_bytes)


@pytest.mark.parametrize(("shape", "chunk_bytes", "num_chunks"), [("1x8", 0, 1), ("2x2", 0, 4), ("1x8", 8 * MIB, 8)])
def test_on_gpus_a_buffer_stays_whole_where_nothing_overlaps_unless_chunks_are_asked_for(
    shape: str, chunk_bytes: int, num_chunks: int
) -> None:
    choice = choose_on_gpus(World.from_shape(shape), 16 * MIB, 4, chunk_bytes=chunk_bytes)
    plan = choice.plan
    assert (plan.algorithm, plan.num_chunks) == ("hierarchical", num_chunks)
    assert [phase.verb for phase in plan.phases].count(Verb.ALL_REDUCE) == 1, "NCCL needs one phase in a node"
    assert (choice.reason, choice.considered) == ("on GPUs auto is hierarchical", ())


def test_on_gpus_flat_is_for_those_who_ask_for_it() -> None:
    choice = choose_on_gpus(World.from_shape("2x2"), 1000, 4, "flat", wire_itemsize=2)
    assert (choice.plan.algorithm, choice.plan.wire_itemsize, choice.reason) == ("flat", 2, "flat was asked for by name")


def test_where_each_node_has_one_rank_large_arrays_are_copied_in_chunks() -> None:
    sizes = (4 * MIB, 8 * MIB, 64 * MIB)
    plans = [choose(World.from_shape("2x1"), nbytes // 4, 4, "hierarchical").plan for nbytes in sizes]
    assert [plan.num_chunks > 1 for plan in plans] == [False, True, True]
    assert plans[-1].depth == 3
    many = choose(World.from_shape("64x1"), 16 * MIB, 4)  # where steps take longer than copies
    assert (many.plan.algorithm, many.plan.num_chunks) == ("hierarchical", 1)


def test_one_rank_and_empty_buffers_have_a_plan_and_chunks_are_as_asked_for() -> None:
    assert choose(World.from_shape("1x1"), 1000, 4).plan.phases == ()
    assert choose(World.from_shape("2x2"), 0, 4).plan.num_chunks == 0
    assert choose(World.from_shape("2x2"), MIB, 4, "hierarchical", chunk_bytes=256 * KIB).plan.num_chunks == 16


@given(random_worlds, st.integers(0, 10**7), st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_auto_always_has_a_proved_and_repeatable_answer(world: World, count: int, itemsize: int, tenths: bool) -> None:
    chunk_bytes = count * itemsize // 10 if tenths else 0
    choice = choose(world, count, itemsize, chunk_bytes=chunk_bytes)
    simulate(choice.plan)
    assert choose(World(world.nodes), count, itemsize, chunk_bytes=chunk_bytes) == choice
    seconds = {candidate.plan.algorithm: candidate.seconds for candidate in choice.considered}
    assert seconds[choice.plan.algorithm] == min(seconds.values())
