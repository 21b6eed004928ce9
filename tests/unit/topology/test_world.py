"""World: shapes, places, and who owns which shard."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.errors import TopologyError
from mpistrat.topology.world import World, parse_shape
from tests.unit.worlds import random_worlds


@pytest.mark.parametrize(
    ("shape", "nodes", "placement"),
    [
        ("2x2", [(0, 1), (2, 3)], "block"),
        ("2x2:block", [(0, 1), (2, 3)], "block"),
        ("2x2:cyclic", [(0, 2), (1, 3)], "cyclic"),
        ("3+1", [(0, 1, 2), (3,)], "block"),
        (" 3+1 : cyclic ", [(0, 2, 3), (1,)], "cyclic"),
        ("1+3", [(0,), (1, 2, 3)], "block"),
        ("5", [(0, 1, 2, 3, 4)], "block"),
    ],
)
def test_shape_places_ranks(shape, nodes, placement):
    world = World.from_shape(shape)
    assert ([node.ranks for node in world.nodes], world.placement) == (nodes, placement)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (
            ["", "x", "2x", "x2", "2x2x2", "2+", "+1", "a", "-1x2", "2x2:random", "2 x 2", "1.5x2", "2x2+1"],
            r"is malformed; accepted are NODESxRANKS \(2x4\)",
        ),
        (["0x2", "2x0", "0", "3+0", f"{2**40}x0"], "has a node without ranks or no nodes; accepted are"),
        ([f"{2**40}x2", f"2x{2**40}", f"{2**40}+1"], "has more than 1048576 ranks"),
    ],
)
def test_a_shape_that_is_none_says_what_is_accepted(shapes, message):
    for shape in shapes:
        for read in (parse_shape, World.from_shape):
            with pytest.raises(TopologyError, match=message):
                read(shape)


def test_shape_of_other_ranks_names_both_numbers():
    with pytest.raises(TopologyError, match="node shape '2x2' describes 4 ranks, but there are 3"):
        World.from_shape("2x2", num_ranks=3)
    assert World.from_shape("2x2", num_ranks=4).size == 4
    with pytest.raises(TopologyError, match="at least one rank"):
        World.from_node_of_rank([])


def test_nodes_are_ordered_by_lowest_rank_and_take_its_name():
    world = World.from_node_of_rank([7, 3, 7], names=["b", "a", "b"])
    assert [(node.index, node.name, node.ranks) for node in world.nodes] == [(0, "b", (0, 2)), (1, "a", (1,))]
    assert world.leaders == (0, 1)
    assert World.from_node_of_rank([0, 1, 1, 0]).placement == "mixed"
    assert repr(World.from_shape("3+1").place(1)) == "Place(rank=1(4), node=0(2), local_rank=1(3))"


@given(random_worlds)
def test_every_rank_has_one_place(world):
    assert sorted(rank for node in world.nodes for rank in node.ranks) == list(range(world.size))
    for rank in range(world.size):
        place = world.place(rank)
        assert place.rank == rank
        assert world.nodes[place.node_index].ranks[place.local_rank] == rank
        assert place.local_size == world.local_sizes[place.node_index]


@given(random_worlds)
def test_shards_have_one_owner_per_node_and_tile(world):
    for node in world.nodes:
        owned = [shard for rank in node.ranks for shard in world.shards_of(rank)]
        assert owned == list(range(world.num_shards)), "in rank order, each shard once"
        counts = [len(world.shards_of(rank)) for rank in node.ranks]
        assert min(counts) >= 1
        assert max(counts) - min(counts) <= 1, "evenly shared"


@given(random_worlds)
def test_rails_join_the_owners(world):
    assert len(world.rails) == world.num_shards
    for shard, rail in enumerate(world.rails):
        assert [world.place(rank).node_index for rank in rail] == list(range(world.num_nodes))
        assert all(shard in world.shards_of(rank) for rank in rail)
        assert rail == tuple(world.owner(shard, node) for node in range(world.num_nodes))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.sampled_from(["block", "cyclic"]))
def test_shape_is_read_back(sizes, placement):
    world = World.from_shape("+".join(map(str, sizes)) + ":" + placement)
    assert world.local_sizes == tuple(sizes)
    assert World.from_shape(world.shape).local_sizes == world.local_sizes
