"""Worlds that the tests of plans run on."""

from hypothesis import strategies as st

from mpistrat.topology.world import World

random_worlds = st.lists(st.integers(0, 5), min_size=1, max_size=16).map(World.from_node_of_rank)
"""Any placement of up to 16 ranks on up to 6 nodes."""
