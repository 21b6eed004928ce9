"""Nested values (pytrees): flatten, map, rebuild, and name a leaf in an error.

A nested value is any combination of dict and other Mappings, list, tuple, namedtuple and registered classes; None is an empty
nest.

A subclass of dict is rebuilt as a copy with new values, which keeps its attributes; any other Mapping is rebuilt by calling its
class with a dict. A Mapping that cannot be rebuilt in this way, such as an open file, is a leaf.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import Any

import optree

from mpistrat.errors import MpistratError

Structure = optree.PyTreeSpec

ONE_LEAF: Structure = optree.tree_structure(0)  # type: ignore[arg-type]
"""The structure of a single array."""
MAX_CACHED_STRUCTURES = 64
_MAX_DEPTH = 16  # a list that contains itself would never end

_NAMESPACE = "mpistrat"  # of optree's registry, in which Mapping types are registered when they are first seen
_lock = threading.Lock()
_leaf_types: set[type] = set()
_nest_types: set[type] = set()

_structures: dict[tuple[Any, ...], tuple[Structure, Callable[[list[Any]], tuple[Any, ...]] | None]] = {}


def flatten(value: Any) -> tuple[list[Any], Structure]:
    """Return the leaves of a nested value in a fixed order, and their structure, whose ``unflatten(leaves)`` undoes that."""
    leaves, structure = optree.tree_flatten(value, namespace=_NAMESPACE)
    while not _leaf_types.issuperset(map(type, leaves)) and _learn(leaves):
        leaves, structure = optree.tree_flatten(value, namespace=_NAMESPACE)
    return leaves, structure


def flatten_arrays(value: Any, kind: type) -> tuple[list[Any], Structure] | None:
    """Return the same as `flatten` for a nest of arrays of one class, or None if the nest is not supported.

    It caches structures, and is several times as fast as `flatten` from the second nest of a structure on.
    """
    outline, found = _walk(value, kind)
    if outline is None:
        return None
    known = _structures.get(outline)
    if known is None:
        if len(_structures) == MAX_CACHED_STRUCTURES:
            _structures.clear()
        known = _structures[outline] = _structure_and_order(value, len(found))
    structure, in_order = known
    return found if in_order is None else list(in_order(found)), structure


def map_leaves(function: Callable[..., Any], value: Any, *others: Any) -> Any:
    """Return the nested value whose leaves are ``function(leaf, *other_leaves)``; all values must have the same structure."""
    leaves, structure = flatten(value)
    rows = zip(leaves, *(_flattened_like(structure, other) for other in others), strict=True)
    return structure.unflatten([function(*row) for row in rows])  # a map would end at a StopIteration of the function


def leaf_names(value: Any, root: str = "value") -> list[str]:
    """Return one name for each leaf, as a user would write it: ``value['w'][0]``."""
    flatten(value)  # registers its Mapping types
    return [root + accessor.codify("") for accessor in optree.tree_accessors(value, namespace=_NAMESPACE)]


def each_leaf(function: Callable[..., Any], leaves: Sequence[Any], names: Callable[[], Sequence[str]]) -> list[Any]:
    """Return ``function(leaf)`` of leaves; where that raises, the error is that of ``function(leaf, name)``, which names it."""
    try:
        return list(map(function, leaves))
    except MpistratError:  # naming all leaves takes as long as the rest
        list(map(function, leaves, names()))
        raise


def _flattened_like(structure: Structure, value: Any) -> list[Any]:
    flatten(value)
    return structure.flatten_up_to(value)


@dataclass(frozen=True)
class _Like:
    """What a Mapping was whose node has one child, the dict of its items: by these nodes of a type are compared."""

    mapping: Mapping[Any, Any] = field(compare=False, repr=False)


class _ItsDict(optree.PyTreeEntry):
    def codify(self, node: str = "") -> str:
        return node


def _learn(leaves: Iterable[Any]) -> bool:
    """Register the types of leaves that are Mappings, so that these are flattened; return whether there are any."""
    with _lock:
        unknown = {type(leaf): leaf for leaf in leaves if type(leaf) not in _leaf_types}
        nests = {kind for kind, leaf in unknown.items() if isinstance(leaf, Mapping) and _can_be_rebuilt(leaf)}
        _leaf_types.update(unknown.keys() - nests)
        for kind in nests - _nest_types:  # another thread may have registered it meanwhile
            optree.register_pytree_node(kind, _as_dict, _from_dict, path_entry_type=_ItsDict, namespace=_NAMESPACE)
        _nest_types.update(nests)
        return bool(nests)


def _can_be_rebuilt(mapping: Mapping[Any, Any]) -> bool:
    """Return whether a Mapping of this type can be created with any values, and returns them unchanged."""
    values = {key: object() for key in mapping} or {"key": object()}
    try:
        again = _made_like(mapping, values)
        return type(again) is type(mapping) and all(again[key] is value for key, value in values.items())
    except Exception:  # the constructor of a user's class may raise anything
        return False


def _made_like(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Mapping[Any, Any]:
    if not isinstance(mapping, dict):
        made: Mapping[Any, Any] = type(mapping)(items)  # type: ignore[call-arg]
        return made
    copied = copy.copy(mapping)
    dict.update(copied, items)  # the subclass's own update may reject values
    attributes = getattr(copied, "__dict__", {})
    for key in attributes.keys() & mapping.keys():  # some classes store their items as attributes too
        if attributes[key] is mapping[key]:
            attributes[key] = items[key]
    return copied


def _as_dict(mapping: Any) -> tuple[list[Any], _Like]:
    return [dict(mapping)], _Like(mapping)


def _from_dict(like: Any, children: Any) -> Any:
    return _made_like(like.mapping, *children)


def _walk(value: Any, leaf: type) -> tuple[tuple[Any, ...] | None, list[Any]]:
    """Traverse a nest of dicts, lists, tuples and objects of type `leaf`, level by level.

    Return a key that identifies its structure, and its leaves. The key is None if anything else is in the nest, or if one level
    has containers of several types.
    """
    if type(value) is dict and set(map(type, value.values())) == {leaf}:  # by far the most frequent
        return (dict, tuple(value), len(value)), list(value.values())
    outline: list[Any] = []
    found: list[Any] = []
    level: list[Any] = [value]
    for _ in range(_MAX_DEPTH):
        kinds = set(map(type, level))
        if kinds == {leaf}:
            return (*outline, len(level)), found + level
        if leaf in kinds:
            kinds.remove(leaf)
            outline.append(tuple(map(type, level)))
            found += [node for node in level if type(node) is leaf]
            level = [node for node in level if type(node) is not leaf]
        kind = kinds.pop() if len(kinds) == 1 else None
        if kind is dict:
            outline += (kind, *map(tuple, level))
            level = list(chain.from_iterable(map(dict.values, level)))
        elif kind is list or kind is tuple:
            outline += (kind, *map(len, level))
            level = list(chain.from_iterable(level))
        else:
            break
    return None, found


def _structure_and_order(value: Any, count: int) -> tuple[Structure, Callable[[list[Any]], tuple[Any, ...]] | None]:
    """Return the structure of a nest, and a function that reorders leaves from level order to that of `flatten`, or None."""
    structure = optree.tree_structure(value)
    positions = _walk(structure.unflatten(range(count)), int)[1]
    order = sorted(range(count), key=positions.__getitem__)
    return structure, None if positions == list(range(count)) else itemgetter(*order)
