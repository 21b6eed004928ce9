"""Planners: their phases, when they decline, how they cut a buffer; and which algorithm is chosen, and why."""

import dataclasses
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.algorithms import plan as plans
from mpistrat.algorithms import planners
from mpistrat.algorithms.planners import (
    PLANNERS,
    SCATTER_FROM_BYTES,
    Measured,
    choose,
    choose_on_gpus,
    flat,
    hierarchical,
    hierarchical_from_bytes,
    reduce_scatter,
)
from mpistrat.arrays import part_bounds
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
def test_scratch_memory_is_bounded_and_the_reference_page_has_a_row_for_each(name):
    world = World.from_shape("16x3")  # on which chunks of ours do not overlap
    plan = PLANNERS[name](world, 200 * MIB // 4, 4, 0)
    assert plan.depth * plan.chunk_count * 4 <= 64 * MIB
    plan = PLANNERS[name](World.from_shape("2x2"), MIB, 4, 0)
    assert f"| `{name}` | {' -> '.join(steps(plan))} |" in PAGE.read_text()


@pytest.mark.parametrize("planner", [flat, hierarchical])
def test_what_fits_the_bound_is_one_chunk(planner):
    plans_made = [planner(World.from_shape("16x3"), count, 4) for count in (64 * MIB // 4 // 3 * 3, 200 * MIB // 4)]
    assert [(plan.num_chunks, plan.depth) for plan in plans_made] == [(1, 1), (4, 1)]


@pytest.mark.parametrize(
    ("shape", "num_bytes", "num_chunks"),
    [
        ("3+1", 512 * KIB, 1),
        ("2x2", MIB, 1),
        ("2x2", MIB + 4, 2),
        ("2x2", 64 * MIB, 64),
        ("1x2", 2 * MIB, 2),
        ("1x2", 64 * MIB, 64),
    ],
)
def test_chunks_are_cut_by_rule(shape, num_bytes, num_chunks):
    world = World.from_shape(shape)
    plan = hierarchical(world, num_bytes // 4, 4)
    assert plan.num_chunks == num_chunks
    assert plan.depth == min(planners.DEPTH, num_chunks)


def test_chunks_follow_each_other_and_have_the_size_that_was_asked_for():
    for count in (0, 1, 512 * KIB // 4):  # one chunk is the whole buffer
        assert hierarchical(World.from_shape("2x2"), count, 4, 512 * KIB) == hierarchical(World.from_shape("2x2"), count, 4)
    plan = hierarchical(World.from_shape("3+1"), 1000, 4, chunk_bytes=1000)
    assert (plan.num_chunks, plan.chunk_count) == (5, 201)
    assert plan.chunks[-1] == (804, 196)
    assert choose(World.from_shape("1x1"), 1000, 4).plan.phases == ()
    assert choose(World.from_shape("2x2"), 0, 4).plan.num_chunks == 0
    assert choose(World.from_shape("2x2"), MIB, 4, "hierarchical", chunk_bytes=256 * KIB).plan.num_chunks == 16


@given(random_worlds, st.integers(0, 10**4), st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 10**5))
def test_chunks_are_few_even_and_bounded(world, count, itemsize, max_bytes):
    shards = world.num_shards
    chunk_count = plans.chunk_elements(world, count, itemsize, max_bytes)
    plan = plans.Plan("any", world, count, itemsize, (), chunk_count)
    assert chunk_count >= shards
    assert chunk_count % shards == 0
    assert chunk_count * itemsize <= max(max_bytes, shards * itemsize)
    needed = max(-(-count // (max(max_bytes // itemsize // shards, 1) * shards)), 1)
    assert plan.num_chunks <= needed, "no more chunks than the bound asks for"
    assert chunk_count <= count / needed + shards, "no larger than an even split needs"


def test_the_reference_page_has_the_limits_of_the_table():
    text = " ".join(PAGE.read_text().split())
    assert f"A buffer of up to {planners.SCRATCH_BYTES // MIB} MiB is one chunk" in text
    assert f"with {planners.DEPTH} in flight at a time" in text
    assert f"of up to {planners.CHUNK_BYTES // MIB} MiB, with" in text
    assert f"chunks are of up to {planners.SCATTER_CHUNK_BYTES // MIB} MiB" in text


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
    found = [plans.phase_bytes(plan, phase) for phase in plan.phases]
    assert found == list(zip(sent, over_the_link, strict=True))
    cut = dataclasses.replace(plan, chunk_count=plan.padded(100), depth=2)
    assert [plans.phase_bytes(cut, phase) for phase in plan.phases] == found


def test_what_is_cast_between_nodes_is_shorter_there_and_on_gpus_a_node_has_one_phase():
    plan = dataclasses.replace(hierarchical(World.from_shape("4x2"), 1000, 4), wire_itemsize=2)
    assert [plans.phase_bytes(plan, phase) for phase in plan.phases] == [(2000, 0), (1500, 3000), (2000, 0)]
    bounds = part_bounds(SCATTER_FROM_BYTES // 4, 4)
    assert reduce_scatter(World.from_shape("1x4"), bounds, 4).chunk_count == 1 << 17
    assert [str(phase) for phase in choose_on_gpus(World.from_shape("1x8"), 2**28, 4).plan.phases] == ["intra all_reduce"]
    assert choose_on_gpus(World.from_shape("1x8"), 2**28, 4).plan.depth == 1
    choice = choose_on_gpus(World.from_shape("2x2"), 16 * MIB, 4, "flat")
    assert (choice.plan.algorithm, choice.reason) == ("flat", "flat was asked for by name")


WORLDS = st.builds(
    lambda nodes, ranks, placement: World.from_shape(f"{nodes}x{ranks}:{placement}"),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from(["block", "cyclic"]),
).filter(lambda world: world.size > 1)


@given(st.integers(0, 40), st.integers(1, 9))
def test_parts_are_those_of_array_split(extent, num_parts):
    parts = [list(range(start, stop)) for start, stop in pairwise(part_bounds(extent, num_parts))]
    assert parts == [part.tolist() for part in np.array_split(np.arange(extent), num_parts)]


@given(WORLDS, st.data())
def test_each_chunk_has_some_of_each_part_and_all_chunks_have_all(world, data):
    counts = data.draw(st.lists(st.integers(0, 50), min_size=world.size, max_size=world.size).filter(any))
    bounds = [sum(counts[:rank]) for rank in range(world.size + 1)]
    plan = reduce_scatter(world, bounds, 4, "hierarchical", chunk_bytes=data.draw(st.integers(1, 400)))
    chunks = plan.parts()
    for position, rank in enumerate(plan.order):
        moved = [place for chunk in chunks for place in range(chunk[position].start, chunk[position].stop)]
        assert moved == list(range(bounds[rank], bounds[rank + 1]))
    assert all(part.stop - part.start <= plan.chunk_count // world.size for chunk in chunks for part in chunk)
    assert 1 <= plan.depth <= len(chunks)
    assert len(chunks) == 1 or world.num_nodes > 1


@given(WORLDS)
def test_what_a_rail_divides_is_the_shard_of_its_ranks(world):
    order = reduce_scatter(world, range(world.size + 1), 4, "hierarchical").order
    for shard, rail in enumerate(world.rails):
        assert order[shard * world.num_nodes : (shard + 1) * world.num_nodes] == rail
    assert sorted(order) == list(range(world.size))


@pytest.mark.parametrize(
    ("shape", "phases"),
    [("1x4", "intra reduce_scatter"), ("4x1", "inter reduce_scatter"), ("2x2", "intra reduce_scatter -> inter reduce_scatter")],
)
def test_phases_are_those_the_world_needs(shape, phases):
    plan = reduce_scatter(World.from_shape(shape), part_bounds(1 << 20, 4), 4)
    assert re.fullmatch(rf"hierarchical: {phases} \(4194304 bytes(, 2 chunks, 2 at a time)?\)", str(plan))


DECLINED = {
    "uneven nodes": ("3+1", 1 << 20, "hierarchical"),
    "one rank": ("1x1", 1 << 20, "auto"),
    "another algorithm": ("1x4", 1 << 20, "flat"),
    "nothing": ("1x4", 0, "hierarchical"),
    "little": ("1x4", SCATTER_FROM_BYTES // 4 - 1, "auto"),
}


@pytest.mark.parametrize(("shape", "count", "algorithm"), DECLINED.values(), ids=DECLINED)
def test_it_declines(shape, count, algorithm):
    world = World.from_shape(shape)
    assert reduce_scatter(world, part_bounds(count, world.size), 4, algorithm) is None


def chosen(shape, num_bytes):
    """Return the algorithm that is chosen, or ``chunks`` if it is hierarchical on several."""
    plan = choose(World.from_shape(shape), num_bytes // 4, 4).plan
    return "chunks" if plan.depth > 1 else plan.algorithm


NODES = (8, KIB, 8 * KIB, 128 * KIB), (512 * KIB, MIB), (4 * MIB, 16 * MIB, 64 * MIB)
ONE_NODE = (8, 2 * KIB, 128 * KIB), (), (16 * MIB, 64 * MIB)


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        *((shape, NODES) for shape in ("4x2", "4x2:cyclic", "4x8", "3+1+2+2")),
        ("2x2", ((8, 128 * KIB), (384 * KIB, MIB), (2 * MIB, 16 * MIB))),
        *((shape, ONE_NODE) for shape in ("1x4", "1x8")),
        ("1x2", ((8, 64, 256), (64 * KIB, 512 * KIB), (16 * MIB, 64 * MIB))),
        ("2x1", ((256 * KIB,), (512 * KIB, 4 * MIB), (8 * MIB, 64 * MIB))),
        ("8x1", ((16 * KIB, 256 * KIB), (512 * KIB, 64 * MIB), ())),  # where steps decide
        ("64x8", ((MIB,), (8 * MIB, 64 * MIB), ())),
    ],
)
def test_it_goes_from_flat_to_hierarchical_to_chunks(shape, sizes):
    for name, chosen_for in zip(("flat", "hierarchical", "chunks"), sizes, strict=True):
        assert {size: chosen(shape, size) for size in chosen_for} == dict.fromkeys(chosen_for, name)


def test_the_reason_names_the_limit_or_the_two_fastest_or_what_was_asked_for():
    world = World.from_shape("4x8")
    assert choose(world, 1000, 4).reason == "on such nodes flat takes less than 288 KiB"
    assert choose(world, MIB, 4).reason == "on such nodes hierarchical takes 288 KiB and more"
    assert choose(world, 144 * KIB // 4, 4, wire_itemsize=2).reason == "on such nodes hierarchical takes 144 KiB and more"
    assert choose(World.from_shape("1x4"), MIB // 4, 4, wire_itemsize=2).plan.algorithm == "flat", "nothing is cast"
    measured = Measured({"flat": {16: 2e-3}, "hierarchical": {16: 1e-3}}, "a file")
    choice = choose(world, 4, 4, measured=measured)
    assert choice.plan.algorithm == "hierarchical"
    assert choice.reason == "hierarchical is the fastest as measured: 1 ms; next: flat 2 ms"
    choice = choose(World.from_shape("4x2"), 16 * MIB, 4, "flat")
    assert (choice.plan.algorithm, choice.reason) == ("flat", "flat was asked for by name; auto would choose hierarchical")


@pytest.mark.parametrize(("shape", "chunk_bytes", "num_chunks"), [("1x8", 0, 1), ("2x2", 0, 4), ("1x8", 8 * MIB, 8)])
def test_on_gpus_a_buffer_stays_whole_where_nothing_overlaps_unless_chunks_are_asked_for(shape, chunk_bytes, num_chunks):
    choice = choose_on_gpus(World.from_shape(shape), 16 * MIB, 4, chunk_bytes=chunk_bytes)
    assert (choice.plan.algorithm, choice.plan.num_chunks) == ("hierarchical", num_chunks)
    assert choice.plan.depth == min(3, num_chunks)
    assert (choice.reason, choice.seconds) == ("on GPUs auto is hierarchical", {})


@given(random_worlds, st.integers(0, 10**7), st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_auto_always_has_a_repeatable_answer(world, count, itemsize, tenths):
    chunk_bytes = count * itemsize // 10 if tenths else 0
    choice = choose(world, count, itemsize, chunk_bytes=chunk_bytes)
    assert choose(World(world.nodes), count, itemsize, chunk_bytes=chunk_bytes) == choice
    assert (choice.plan.algorithm == "flat") == (count * itemsize < hierarchical_from_bytes(world))


def test_what_was_measured_is_predicted_and_between_and_beyond_it_by_the_bytes():
    measured = Measured({"flat": {64: 3.0, 16: 1.0}, "hierarchical": {}})
    found = {num_bytes: measured.predict(num_bytes) for num_bytes in (0, 8, 16, 40, 64, 128)}
    assert found == {n: {"flat": seconds} for n, seconds in zip(found, (1.0, 1.0, 1.0, 2.0, 3.0, 6.0), strict=True)}


_ORDERS = st.permutations(range(1, 1 + len(PLANNERS)))


@given(st.sampled_from(["1x2", "1x4", "2x2", "3+1", "4x1"]), _ORDERS, _ORDERS)
def test_the_fastest_measured_is_chosen(shape, small, large):
    small, large = ([unit * place for place in order] for unit, order in ((1e-5, small), (1e-3, large)))
    measured = Measured({name: {64: small[i], 2**16: large[i]} for i, name in enumerate(PLANNERS)})
    for num_bytes, seconds in ((4, small), (64, small), (2**16, large), (2**30, large)):
        choice = choose(World.from_shape(shape), num_bytes // 4, 4, measured=measured)
        assert choice.plan.algorithm == [*PLANNERS][seconds.index(min(seconds))]
