"""Planners: their phases, when they decline, how they cut a buffer, and what is written about them."""

from __future__ import annotations

import dataclasses
import importlib
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.algorithms import chunks, flat, hierarchical, leader, pipelined
from mpistrat.algorithms.choose import PLANNERS
from mpistrat.algorithms.plan import Plan
from mpistrat.errors import Unsuitable
from mpistrat.topology.world import World
from tests.unit.worlds import random_worlds

KIB, MIB = 2**10, 2**20
PAGE = Path(__file__).parents[3] / "docs/reference/algorithms.md"

SCATTER, RAILS, GATHER = "intra reduce_scatter", "inter all_reduce", "intra all_gather"


def steps(plan: Plan) -> list[str]:
    return [str(phase) for phase in plan.phases]


@pytest.mark.parametrize("shape", ["1x2", "2x2", "3+1", "4x1"])
def test_flat_is_one_phase_on_every_world(shape: str) -> None:
    plan = flat.plan(World.from_shape(shape), 64 * MIB // 4 // 12 * 12, 4)
    assert steps(plan) == ["world all_reduce"]
    assert plan.num_chunks == 1


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("1x1", []),
        ("1x2", ["intra all_reduce"]),
        ("1x4", [SCATTER, GATHER]),
        ("4x1", [RAILS]),
        ("2x2", [SCATTER, RAILS, GATHER]),
        ("3+1", [SCATTER, RAILS, GATHER]),
    ],
)
def test_hierarchical_has_the_phases_its_world_needs(shape: str, expected: list[str]) -> None:
    world = World.from_shape(shape)
    assert steps(hierarchical.plan(world, 10, 4)) == expected
    if expected:
        assert steps(pipelined.plan(world, 10 * MIB, 4)) == expected


def test_one_rank_has_nothing_to_do() -> None:
    assert str(flat.plan(World.from_shape("1x1"), 2, 4)) == "flat: nothing to do (8 bytes)"


def test_leader_goes_through_the_leaders() -> None:
    expected = ["intra reduce", "leaders all_reduce", "intra broadcast"]
    assert steps(leader.plan(World.from_shape("3+1"), 10, 4)) == expected


@pytest.mark.parametrize(
    ("planner", "shape", "count", "because"),
    [
        (leader.plan, "1x4", 10, "because all ranks are on one node"),
        (leader.plan, "4x1", 10, "because each node has one rank"),
        (pipelined.plan, "1x1", 10 * MIB, "because one rank has nobody to exchange chunks with"),
    ],
)
def test_planners_decline_with_a_reason(planner: object, shape: str, count: int, because: str) -> None:
    assert callable(planner)
    with pytest.raises(Unsuitable, match=because):
        planner(World.from_shape(shape), count, 4)


@pytest.mark.parametrize("planner", [flat.plan, leader.plan, hierarchical.plan])
def test_scratch_memory_is_bounded(planner: object) -> None:
    assert callable(planner)
    world = World.from_shape("2x3")
    at_the_bound, beyond = planner(world, 64 * MIB // 4 // 3 * 3, 4), planner(world, 200 * MIB // 4, 4)
    assert (at_the_bound.num_chunks, beyond.num_chunks) == (1, 4)
    assert (at_the_bound.depth, beyond.depth) == (1, 1)
    assert beyond.chunk_count * 4 <= 64 * MIB


@pytest.mark.parametrize(
    ("shape", "num_bytes", "num_chunks"),
    [
        ("2x2", 512 * KIB, 1),
        ("3+1", MIB, 2),
        ("2x2", MIB + 4, 3),
        ("2x2", 2 * MIB, 3),
        ("2x2", 16 * MIB, 11),
        ("2x2", 64 * MIB, 35),
        ("1x2", 2 * MIB, 2),
        ("1x2", 64 * MIB, 64),
    ],
)
def test_pipelined_cuts_by_rule(shape: str, num_bytes: int, num_chunks: int) -> None:
    world = World.from_shape(shape)
    plan = pipelined.plan(world, num_bytes // 4, 4)
    assert plan.num_chunks == num_chunks
    assert plan.depth == min(chunks.pipeline_rule(world).depth, num_chunks)


def test_pipelined_begins_and_ends_with_small_chunks() -> None:
    plan = pipelined.plan(World.from_shape("2x2"), 5 * MIB, 1)
    assert [2 * count // MIB for _, count in plan.chunks()] == [1, 2, 4, 2, 1]
    assert [2 * start // MIB for start, _ in plan.chunks()] == [0, 1, 3, 7, 9]
    assert (plan.chunk_count, plan.end_count) == (2 * MIB, MIB // 2)
    assert chunks.chunk_lengths(World.from_shape("2x2"), 36, 2, 8) == [2, 4, 8, 8, 8, 4, 2]


@given(random_worlds, st.integers(0, 10**4), st.integers(1, 100), st.integers(0, 1000))
def test_chunks_grow_and_shrink_within_bounds(world: World, count: int, end: int, more: int) -> None:
    end, largest = end * world.num_shards, (end + more) * world.num_shards
    lengths = chunks.chunk_lengths(world, count, end, largest)
    assert sum(lengths) == count
    assert all(0 < length <= largest for length in lengths)
    if len(lengths) > 1:
        assert max(lengths[0], lengths[-1]) <= end, "the nodes wait for no more than that"
        assert lengths[1] <= 2 * lengths[0], "a chunk between the nodes hides the next one"


@pytest.mark.parametrize("count", [0, 1, 512 * KIB // 4])
def test_pipelined_of_one_chunk_is_hierarchical(count: int) -> None:
    world = World.from_shape("2x2")
    assert dataclasses.replace(pipelined.plan(world, count, 4), algorithm="hierarchical") == hierarchical.plan(world, count, 4)


def test_pipelined_takes_the_chunk_it_is_given() -> None:
    plan = pipelined.plan(World.from_shape("3+1"), 1000, 4, chunk_bytes=1000)
    assert (plan.num_chunks, plan.chunk_count) == (5, 201)
    assert plan.chunks()[-1] == (804, 196)


@given(random_worlds, st.integers(0, 10**4), st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 10**5))
def test_chunks_are_few_even_and_bounded(world: World, count: int, itemsize: int, max_bytes: int) -> None:
    shards = world.num_shards
    chunk_count = chunks.chunk_elements(world, count, itemsize, max_bytes)
    plan = Plan("any", world, count, itemsize, (), chunk_count)
    assert chunk_count >= shards
    assert chunk_count % shards == 0
    assert chunk_count * itemsize <= max(max_bytes, shards * itemsize)
    needed = max(-(-count // (max(max_bytes // itemsize // shards, 1) * shards)), 1)
    assert plan.num_chunks <= needed, "no more chunks than the bound asks for"
    assert chunk_count <= count / needed + shards, "no larger than an even split needs"


@pytest.mark.parametrize("num_bytes", [1_100_000, 4_321_012, 9 * MIB, 17 * MIB + 4, 65 * MIB])
@pytest.mark.parametrize("shape", ["2x2", "1x3", "3+1+2+2", "4x8"])
def test_no_chunk_is_tiny(shape: str, num_bytes: int) -> None:
    plan = pipelined.plan(World.from_shape(shape), num_bytes // 4, 4)
    assert min(count for _, count in plan.chunks()) >= 0.8 * min(MIB / 2, num_bytes / 3) / 4


def sections(docstring: str) -> dict[str, str]:
    headed = re.findall(r"^(\w[\w ]+)\n((?:    .+\n)+)", docstring, flags=re.MULTILINE)
    return {heading: " ".join(text.split()) for heading, text in headed}


@pytest.mark.parametrize("name", PLANNERS)
def test_planners_have_the_same_paragraphs(name: str) -> None:
    module = importlib.import_module(f"mpistrat.algorithms.{name}")
    assert module.__doc__ is not None
    found = sections(module.__doc__)
    assert list(found) == ["Phases", "Communication steps", "Bytes on the wire per node", "Good when", "Source"]
    plan = PLANNERS[name](World.from_shape("2x2"), MIB, 4, 0)
    assert plan.algorithm == name
    assert found["Phases"] == f"``{' -> '.join(steps(plan))}``"


@pytest.mark.parametrize("name", PLANNERS)
def test_the_reference_page_has_a_row_for_each(name: str) -> None:
    plan = PLANNERS[name](World.from_shape("2x2"), MIB, 4, 0)
    assert f"| `{name}` | {' -> '.join(steps(plan))} |" in PAGE.read_text()


def test_the_reference_page_has_the_limits_of_the_table() -> None:
    rule, text = chunks.pipeline_rule(World.from_shape("2x2")), " ".join(PAGE.read_text().split())
    assert f"work on the whole buffer up to {chunks.SCRATCH_BYTES // MIB} MiB" in text
    assert f"{rule.depth} in flight at a time" in text
    assert f"chunks of {rule.end_bytes // KIB} KiB, between which they double up to {rule.max_bytes // MIB} MiB" in text
    assert f"chunks of {chunks.pipeline_rule(World.from_shape('1x2')).max_bytes // MIB} MiB that stay" in text
