"""Planners: their phases, when they decline, how they cut a buffer, and what is told and written about them."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.algorithms import plan as plans
from mpistrat.algorithms import planners
from mpistrat.algorithms.choose import PLANNERS
from mpistrat.algorithms.plan import Plan, phase_bytes
from mpistrat.algorithms.planners import flat, hierarchical
from mpistrat.topology.world import World
from tests.unit.worlds import random_worlds

KIB, MIB = 2**10, 2**20
PAGE = Path(__file__).parents[3] / "docs/reference/algorithms.md"

SCATTER, RAILS, GATHER = "intra reduce_scatter", "inter all_reduce", "intra all_gather"


def steps(plan):
    return [str(phase) for phase in plan.phases]


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
def test_hierarchical_has_the_phases_its_world_needs_and_flat_has_one(shape, expected):
    world = World.from_shape(shape)
    assert [steps(hierarchical(world, count, 4)) for count in (10, 10 * MIB)] == [expected] * 2
    plan = flat(world, 64 * MIB // 4 // 12 * 12, 4)
    assert (steps(plan), plan.num_chunks) == (["world all_reduce"] if expected else [], 1)
    assert str(flat(World.from_shape("1x1"), 2, 4)) == "flat: nothing to do (8 bytes)"


@pytest.mark.parametrize("name", PLANNERS)
def test_scratch_memory_is_bounded(name):
    world = World.from_shape("16x3")  # on which chunks of ours do not overlap
    plan = PLANNERS[name](world, 200 * MIB // 4, 4, 0)
    assert plan.depth * plan.chunk_count * 4 <= 64 * MIB


@pytest.mark.parametrize("planner", [flat, hierarchical])
def test_what_fits_the_bound_is_one_chunk(planner):
    plans_made = [planner(World.from_shape("16x3"), count, 4) for count in (64 * MIB // 4 // 3 * 3, 200 * MIB // 4)]
    assert [(plan.num_chunks, plan.depth) for plan in plans_made] == [(1, 1), (4, 1)]


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
def test_chunks_are_cut_by_rule(shape, num_bytes, num_chunks):
    world = World.from_shape(shape)
    plan = hierarchical(world, num_bytes // 4, 4)
    assert plan.num_chunks == num_chunks
    assert plan.depth == min(planners.pipeline_rule(world).depth, num_chunks)


def test_a_plan_begins_and_ends_with_small_chunks():
    plan = hierarchical(World.from_shape("2x2"), 5 * MIB, 1)
    assert [2 * count // MIB for _, count in plan.chunks] == [1, 2, 4, 2, 1]
    assert [2 * start // MIB for start, _ in plan.chunks] == [0, 1, 3, 7, 9]
    assert (plan.chunk_count, plan.end_count) == (2 * MIB, MIB // 2)
    assert plans.chunk_lengths(World.from_shape("2x2"), 36, 2, 8) == [2, 4, 8, 8, 8, 4, 2]


@given(random_worlds, st.integers(0, 10**4), st.integers(1, 100), st.integers(0, 1000))
def test_chunks_grow_and_shrink_within_bounds(world, count, end, more):
    end, largest = end * world.num_shards, (end + more) * world.num_shards
    lengths = plans.chunk_lengths(world, count, end, largest)
    assert sum(lengths) == count
    assert all(0 < length <= largest for length in lengths)
    if len(lengths) > 1:
        assert max(lengths[0], lengths[-1]) <= end, "the nodes wait for no more than that"
        assert lengths[1] <= 2 * lengths[0], "a chunk between the nodes hides the next one"


def test_a_chunk_is_as_large_as_it_was_asked_for():
    for count in (0, 1, 512 * KIB // 4):  # one chunk is the whole buffer
        assert hierarchical(World.from_shape("2x2"), count, 4, 512 * KIB) == hierarchical(World.from_shape("2x2"), count, 4)
    plan = hierarchical(World.from_shape("3+1"), 1000, 4, chunk_bytes=1000)
    assert (plan.num_chunks, plan.chunk_count) == (5, 201)
    assert plan.chunks[-1] == (804, 196)


@given(random_worlds, st.integers(0, 10**4), st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 10**5))
def test_chunks_are_few_even_and_bounded(world, count, itemsize, max_bytes):
    shards = world.num_shards
    chunk_count = plans.chunk_elements(world, count, itemsize, max_bytes)
    plan = Plan("any", world, count, itemsize, (), chunk_count)
    assert chunk_count >= shards
    assert chunk_count % shards == 0
    assert chunk_count * itemsize <= max(max_bytes, shards * itemsize)
    needed = max(-(-count // (max(max_bytes // itemsize // shards, 1) * shards)), 1)
    assert plan.num_chunks <= needed, "no more chunks than the bound asks for"
    assert chunk_count <= count / needed + shards, "no larger than an even split needs"


@pytest.mark.parametrize("name", PLANNERS)
def test_the_reference_page_has_a_row_for_each(name):
    plan = PLANNERS[name](World.from_shape("2x2"), MIB, 4, 0)
    assert f"| `{name}` | {' -> '.join(steps(plan))} |" in PAGE.read_text()


def test_the_reference_page_has_the_limits_of_the_table():
    rule, text = planners.pipeline_rule(World.from_shape("2x2")), " ".join(PAGE.read_text().split())
    assert f"A buffer of up to {planners.SCRATCH_BYTES // MIB} MiB is one chunk" in text
    assert f"with {rule.depth} in flight at a time" in text
    assert f"begin and end at {rule.end_bytes // KIB} KiB" in text
    assert f"double up to {rule.max_bytes // MIB} MiB" in text
    assert f"chunks are of {planners.pipeline_rule(World.from_shape('1x2')).max_bytes // MIB} MiB, which stay" in text


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
def test_bytes_of_each_phase(plan, sent, over_the_link):
    found = [phase_bytes(plan, phase) for phase in plan.phases]
    assert found == list(zip(sent, over_the_link, strict=True))
    cut = dataclasses.replace(plan, chunk_count=plan.padded(100), depth=2)
    assert [phase_bytes(cut, phase) for phase in plan.phases] == found


def test_what_is_cast_between_nodes_is_shorter_there():
    plan = dataclasses.replace(hierarchical(World.from_shape("4x2"), 1000, 4), wire_itemsize=2)
    assert [phase_bytes(plan, phase) for phase in plan.phases] == [(2000, 0), (1500, 3000), (2000, 0)]
