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
from mpistrat.structures import flatten, flatten_arrays, leaf_names, map_leaves, rebuild
from tests.other_arrays import SpeaksDlpack, StandardArray


class Pair(NamedTuple):
    weights: Any
    bias: Any


def nests_of(leaf: Any) -> Any:
    return st.recursive(
        leaf,
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3) | st.tuples(inner, inner)
        ),
        max_leaves=12,
    )


NEST = {"b": [1, (2, None)], "a": Pair(3, {"x": 4}), "c": []}

nests = nests_of(st.integers() | st.none())


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


@given(nests_of(st.builds(lambda: np.zeros(2)) | st.none()), st.integers(0, 3))
def test_nests_of_arrays_come_apart_alike_however_often(nest: Any, turn: int) -> None:
    nest = reordered(nest, turn)
    expected, structure = flatten(nest)
    for _ in range(2):
        found = flatten_arrays(nest)
        if found is None:
            continue
        leaves, known = found
        assert [id(leaf) for leaf in leaves] == [id(leaf) for leaf in expected]
        assert known == structure
        numbers = list(range(len(leaves)))
        assert repr(rebuild(known, numbers)) == repr(rebuild(structure, numbers))  # keys in one order too


def test_which_nests_of_arrays_are_known() -> None:
    one = np.zeros(2)
    levels = {"b": [one, one], "a": [one], "c": one}
    for nest in (one, [one], (one, (one, one)), {"w": one, "b": one}, {"x": {"w": one}, "y": {"b": one, "a": one}}, levels):
        found = flatten_arrays(nest)
        assert found is not None
        assert len(found[0]) == found[1].num_leaves
    others = (
        1.0,
        None,
        [one, 1.0],
        [one, None],
        Pair(one, one),
        [np.float64(1)],
        [one.view(np.recarray)],
        [{"a": one}, [one]],
        {},
        [],
    )
    endless: list[Any] = []
    endless.append(endless)
    for nest in (*others, endless):
        assert flatten_arrays(nest) is None


def reordered(nest: Any, turn: int) -> Any:
    """Return a nest with the keys of its dicts in another order."""
    if isinstance(nest, dict):
        items = [(key, reordered(inner, turn)) for key, inner in nest.items()]
        return dict(items[turn % len(items) :] + items[: turn % len(items)] if items else [])
    return type(nest)(reordered(inner, turn) for inner in nest) if isinstance(nest, (list, tuple)) else nest


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
