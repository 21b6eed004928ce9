"""Worlds that the tests of plans run on: shapes written by hand, and random ones."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from mpistrat.topology.world import World

SHAPES = (
    *("1x1", "1x2", "1x3", "1x4", "1x8", "2x1", "3x1", "4x1", "8x1"),
    *("2x2", "2x3", "3x2", "2x4", "4x2", "3x3", "4x4", "4x8", "8x4", "5x7"),
    *("2+1", "1+2", "3+1", "1+3", "3+1+2+2", "4+2+1+1", "1+1+1+5", "7+5+3", "8+1", "6+4+4", "5+3+2+1+1"),
    *("2x2:cyclic", "4x2:cyclic", "2x4:cyclic", "3x3:cyclic", "3+1:cyclic", "3+1+2+2:cyclic", "1+5:cyclic"),
)


def shuffled(shape: str, seed: int = 0) -> World:
    """Return the world of a shape with its ranks dealt to the nodes at random."""
    world = World.from_shape(shape)
    labels = [world.place(rank).node_index for rank in range(world.size)]
    random.Random(seed).shuffle(labels)
    return World.from_node_of_rank(labels)


def worlds() -> list[World]:
    """Return the world of every shape, as written and shuffled."""
    return [world for shape in SHAPES for world in (World.from_shape(shape), shuffled(shape))]


random_worlds = st.lists(st.integers(0, 5), min_size=1, max_size=16).map(World.from_node_of_rank)
"""Any placement of up to 16 ranks on up to 6 nodes."""
