"""Nested values: taken apart, put together, and their leaves named."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpistrat
from mpistrat.context.values import Mirrored, PerReplica
from mpistrat.cross_device.sparse import IndexedSlices
from mpistrat.structures import flatten, leaf_names, map_leaves, rebuild
from tests.other_arrays import SpeaksDlpack, StandardArray


class Pair(NamedTuple):
    weights: Any
    bias: Any


NEST = {"b": [1, (2, None)], "a": Pair(3, {"x": 4}), "c": []}

nests = st.recursive(
    st.integers() | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3) | st.tuples(inner, inner)
    ),
    max_leaves=12,
)


def test_leaves_come_in_one_order_and_none_is_no_leaf() -> None:
    leaves, structure = flatten(NEST)
    assert leaves == [3, 4, 1, 2]
    assert rebuild(structure, leaves) == NEST
    reordered = dict(reversed(NEST.items()))
    assert flatten(reordered)[0] == leaves
    assert flatten(reordered)[1] == structure


@given(nests)
def test_what_is_taken_apart_is_put_together(nest: Any) -> None:
    leaves, structure = flatten(nest)
    assert rebuild(structure, leaves) == nest
    assert len(leaf_names(nest)) == len(leaves)


def test_leaves_are_named_as_one_writes_them() -> None:
    assert leaf_names(NEST) == ["value['a'].weights", "value['a'].bias['x']", "value['b'][0]", "value['b'][1][0]"]
    assert leaf_names(7, "gradient") == ["gradient"]
    assert leaf_names([1, 2], "args") == ["args[0]", "args[1]"]
    assert leaf_names({}) == []


@given(nests)
def test_a_name_leads_to_its_leaf(nest: Any) -> None:
    for name, leaf in zip(leaf_names(nest, "nest"), flatten(nest)[0], strict=True):
        assert eval(name, {"nest": nest}) == leaf


def test_a_function_is_mapped_over_leaves_side_by_side() -> None:
    assert map_leaves(lambda leaf: -leaf, NEST) == {"b": [-1, (-2, None)], "a": Pair(-3, {"x": -4}), "c": []}
    assert map_leaves(lambda left, right: left + right, [1, (2,)], [10, (20,)]) == [11, (22,)]
    with pytest.raises(ValueError, match="(?i)expected|structure|arity"):
        map_leaves(lambda left, right: left, [1, 2], [1])


@pytest.mark.parametrize(
    "leaf",
    [
        *(np.zeros(2), np.float32(1), 1.5, PerReplica([1, 2]), Mirrored({"a": 1}), mpistrat.Variable([1.0, 2.0])),
        *(IndexedSlices([[1.0]], [0], (2, 1)), SpeaksDlpack([1, 2]), StandardArray([1, 2])),
    ],
)
def test_whatever_is_like_an_array_is_one_leaf(leaf: Any) -> None:
    leaves, structure = flatten({"w": [leaf]})
    assert leaves[0] is leaf
    assert rebuild(structure, leaves)["w"][0] is leaf
    assert leaf_names({"w": [leaf]}) == ["value['w'][0]"]
