"""The planner of a reduce-scatter: who gets what, that no element is lost, and when it declines."""

import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.algorithms.planners import SCATTER_FROM_BYTES, reduce_scatter
from mpistrat.arrays import part_bounds
from mpistrat.errors import Unsuitable
from mpistrat.topology.world import World

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
    "uneven nodes": ("3+1", 1 << 20, "hierarchical", "because nodes have different numbers of ranks"),
    "one rank": ("1x1", 1 << 20, "auto", "or there is one rank"),
    "another algorithm": ("1x4", 1 << 20, "flat", "because algorithm 'flat' was asked for"),
    "nothing": ("1x4", 0, "hierarchical", "so small"),
    "little": ("1x4", SCATTER_FROM_BYTES // 4 - 1, "auto", "so small"),
}


@pytest.mark.parametrize(("shape", "count", "algorithm", "reason"), DECLINED.values(), ids=DECLINED)
def test_it_declines(shape, count, algorithm, reason):
    world = World.from_shape(shape)
    with pytest.raises(Unsuitable, match=reason):
        reduce_scatter(world, part_bounds(count, world.size), 4, algorithm)


def test_the_smallest_array_is_not_declined():
    bounds = part_bounds(SCATTER_FROM_BYTES // 4, 4)
    assert reduce_scatter(World.from_shape("1x4"), bounds, 4).chunk_count == 1 << 17
