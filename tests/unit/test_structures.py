"""Nested values: taken apart, put together, and their leaves named."""

import collections
import collections.abc
import os
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpistrat
from mpistrat.context.values import Mirrored, PerReplica
from mpistrat.structures import flatten, flatten_arrays, leaf_names, map_leaves
from tests.other_arrays import SpeaksDlpack, StandardArray


class Pair(NamedTuple):
    weights: Any
    bias: Any


def nests_of(leaf):
    def around(inner):
        return st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3) | st.tuples(inner, inner)

    return st.recursive(leaf, around, max_leaves=12)


NEST = {"b": [1, (2, None)], "a": Pair(3, {"x": 4}), "c": []}


def test_leaves_come_in_one_order_with_names_as_one_writes_them_and_none_is_not_a_leaf():
    leaves, structure = flatten(NEST)
    assert leaves == [3, 4, 1, 2]
    assert leaf_names(NEST) == ["value['a'].weights", "value['a'].bias['x']", "value['b'][0]", "value['b'][1][0]"]
    assert leaf_names(7, "gradient") == ["gradient"]
    assert structure.unflatten(leaves) == NEST
    reordered = dict(reversed(NEST.items()))
    assert flatten(reordered)[0] == leaves
    assert flatten(reordered)[1] == structure


class Metrics(dict):
    """As programs write them: with attributes of their own, and a constructor that takes no dict."""

    def __init__(self, step):
        super().__init__()
        self.step = step


class Attributes(dict):
    """Keys that are attributes too."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Numbers(dict):
    """Accepts numbers only."""

    def __setitem__(self, key, value):
        super().__setitem__(key, float(value))


class Counted(collections.OrderedDict):
    """A subclass of a subclass."""


class Frozen(collections.abc.Mapping):
    """A Mapping that is not a dict."""

    def __init__(self, items):
        self._items = dict(items)

    def __getitem__(self, key):
        return self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


class Converts(Frozen):
    """Holds something else than it was given."""

    def __init__(self, items):
        super().__init__({key: str(value) for key, value in dict(items).items()})


class Opened(Frozen):
    """Is made of something else than its items, as an open file is."""

    def __init__(self, path):
        super().__init__({"rows": len(path.upper())})


def metrics():
    made = Metrics(7)
    made.update(loss=1, accuracy=(2, None))
    return made


MAPPINGS = [
    metrics(),
    Attributes(loss=1, accuracy=(2, None)),
    Counted(loss=1, accuracy=(2, None)),
    Frozen({"loss": 1, "accuracy": (2, None)}),
    collections.UserDict(loss=1, accuracy=(2, None)),
    types.MappingProxyType({"loss": 1, "accuracy": (2, None)}),
    collections.ChainMap({"loss": 1}, {"accuracy": (2, None)}),
]


@pytest.mark.parametrize("mapping", MAPPINGS, ids=lambda mapping: type(mapping).__name__)
def test_every_mapping_is_a_nest(mapping):
    for _ in range(2):
        leaves, structure = flatten([mapping, 3])
        assert leaves == [2, 1, 3], "in the order of the keys"
        again = structure.unflatten(["two", "one", "three"])
        assert type(again[0]) is type(mapping)
        assert (list(again[0]), dict(again[0])) == (list(mapping), {"loss": "one", "accuracy": ("two", None)})
        assert flatten([mapping, 4])[1] == structure
        assert leaf_names([mapping, 3])[:2] == ["value[0]['accuracy'][0]", "value[0]['loss']"]
        assert dict(map_leaves(lambda a, b: (a, b), mapping, mapping))["loss"] == (1, 1)
        assert dict(mapping) == {"loss": 1, "accuracy": (2, None)}, "it stays as it was"


def test_what_a_mapping_holds_beside_its_items_is_kept():
    again = map_leaves(str, metrics())
    assert (again.step, again["loss"]) == (7, "1")
    attributes = map_leaves(str, Attributes(loss=1))
    assert (attributes.loss, attributes["loss"]) == ("1", "1")
    numbers = Numbers()
    numbers["loss"] = 1
    assert map_leaves(str, numbers) == {"loss": "1.0"}
    leaves, structure = flatten([collections.UserDict(), Metrics(3)])  # an empty mapping is an empty nest
    assert (leaves, structure.unflatten([])[1].step) == ([], 3)


def test_mappings_are_compared_by_their_keys_and_none_shows_in_the_text_of_a_structure():
    one, other = (flatten(Frozen(items))[1] for items in ({"a": 1, "b": 2}, {"b": 5, "a": 6}))
    assert one == other
    assert hash(one) == hash(other)
    assert str(one) == str(other)
    assert "Frozen[_Like()], [{'a': *, 'b': *}]" in str(one), "what a message shows"
    assert flatten(Frozen({"a": 1, "c": 2}))[1] != one
    assert flatten(Frozen({1: 1, "b": 2}))[0] == [1, 2], "keys without an order"
    with pytest.raises(ValueError, match="[Mm]ismatch|[Ee]xpected"):
        map_leaves(lambda a, b: a, Frozen({"a": 1}), Frozen({"b": 1}))
    one = np.zeros(2)
    texts = [str(flatten(nest)[1]) for nest in ({"a": one, "b": None}, {"a": None, "b": one}, {"a": one, "b": one}, {"a": one})]
    assert "'a': *, 'b': None" in texts[0]
    assert "'a': None, 'b': *" in texts[1]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("mapping", [Converts({"a": 1}), Opened("x"), os.environ])
def test_a_mapping_that_does_not_come_back_is_a_leaf(mapping):
    assert flatten([mapping])[0] == [mapping]
    assert flatten([mapping])[0][0] is mapping


def test_threads_may_meet_a_mapping_at_once():
    for _ in range(20):
        kind = type("Fresh", (Frozen,), {})
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(lambda _, kind=kind: flatten(kind({"a": 1}))[0], range(8))) == [[1]] * 8


@given(nests_of(st.integers() | st.none()))
def test_flattened_nests_are_restored_and_a_name_leads_to_its_leaf(nest):
    leaves, structure = flatten(nest)
    assert structure.unflatten(leaves) == nest
    for name, leaf in zip(leaf_names(nest, "nest"), leaves, strict=True):
        assert eval(name, {"nest": nest}) == leaf


@given(nests_of(st.builds(lambda: np.zeros(2)) | st.none()), st.integers(0, 3))
def test_nests_of_arrays_flatten_the_same_each_time(nest, turn):
    nest = reordered(nest, turn)
    expected, structure = flatten(nest)
    for _ in range(2):
        found = flatten_arrays(nest, np.ndarray)
        if found is None:
            continue
        leaves, known = found
        assert [id(leaf) for leaf in leaves] == [id(leaf) for leaf in expected]
        assert known == structure
        numbers = list(range(len(leaves)))
        assert repr(known.unflatten(numbers)) == repr(structure.unflatten(numbers))  # keys in one order too


def test_which_nests_of_arrays_are_known():
    one = np.zeros(2)
    levels = {"b": [one, one], "a": [one], "c": one}
    for nest in (one, [one], (one, (one, one)), {"w": one, "b": one}, {"x": {"w": one}, "y": {"b": one, "a": one}}, levels):
        found = flatten_arrays(nest, np.ndarray)
        assert len(found[0]) == found[1].num_leaves
    others = [1.0, None, [one, 1.0], [one, None], Pair(one, one), [np.float64(1)], [one.view(np.recarray)]]
    others += [[{"a": one}, [one]], {}, []]
    endless: list[Any] = []
    endless.append(endless)
    for nest in (*others, endless):
        assert flatten_arrays(nest, np.ndarray) is None


def reordered(nest, turn):
    """Return a nest with the keys of its dicts in another order."""
    if isinstance(nest, dict):
        items = [(key, reordered(inner, turn)) for key, inner in nest.items()]
        return dict(items[turn % len(items) :] + items[: turn % len(items)] if items else [])
    return type(nest)(reordered(inner, turn) for inner in nest) if isinstance(nest, (list, tuple)) else nest


def test_a_function_is_mapped_over_leaves_side_by_side():
    assert map_leaves(lambda leaf: -leaf, NEST) == {"b": [-1, (-2, None)], "a": Pair(-3, {"x": -4}), "c": []}
    assert map_leaves(lambda left, right: left + right, [1, (2,)], [10, (20,)]) == [11, (22,)]
    with pytest.raises(ValueError, match="(?i)expected|structure|arity"):
        map_leaves(lambda left, right: left, [1, 2], [1])


@pytest.mark.parametrize(
    "leaf",
    [
        *(np.zeros(2), np.float32(1), 1.5, PerReplica([1, 2]), Mirrored({"a": 1}), mpistrat.Variable([1.0, 2.0])),
        *(mpistrat.IndexedSlices([[1.0]], [0], (2, 1)), SpeaksDlpack([1, 2]), StandardArray([1, 2])),
    ],
)
def test_whatever_is_like_an_array_is_one_leaf(leaf):
    leaves, structure = flatten({"w": [leaf]})
    assert leaves[0] is leaf
    assert structure.unflatten(leaves)["w"][0] is leaf
    assert leaf_names({"w": [leaf]}) == ["value['w'][0]"]
