"""Nested values: flatten, map, rebuild, and name a leaf in an error.

A nested value is any combination of dict, list, tuple, namedtuple and registered classes; None is an empty nest.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
import optree

__all__ = ["Structure", "flatten", "flatten_arrays", "leaf_names", "map_leaves", "rebuild"]

Structure = optree.PyTreeSpec

OUTLINES_KEPT = 64
_MOST_LEVELS = 16  # a list that contains itself has no end

_structures: dict[tuple[Any, ...], tuple[Structure, Callable[[list[Any]], tuple[Any, ...]] | None]] = {}


def flatten(value: Any) -> tuple[list[Any], Structure]:
    """Return the leaves of a nested value in a fixed order, and the structure that `rebuild` takes."""
    return optree.tree_flatten(value)


def flatten_arrays(value: Any) -> tuple[list[Any], Structure] | None:
    """Return what `flatten` does for a nest of NumPy arrays and nothing else; None for other nests, and some of these.

    From the second nest on that is built alike it takes a fraction of the time.
    """
    outline, found = _walk(value, np.ndarray)
    if outline is None:
        return None
    known = _structures.get(outline)
    if known is None:
        if len(_structures) == OUTLINES_KEPT:
            _structures.clear()
        known = _structures[outline] = _structure_and_order(value, len(found))
    structure, in_order = known
    return found if in_order is None else list(in_order(found)), structure


def rebuild(structure: Structure, leaves: list[Any]) -> Any:
    """Return the nested value of this structure whose leaves are `leaves`."""
    return optree.tree_unflatten(structure, leaves)


def map_leaves(function: Callable[..., Any], value: Any, *others: Any) -> Any:
    """Return the nested value whose leaves are ``function(leaf, *other_leaves)``; all must have one structure."""
    return optree.tree_map(function, value, *others)


def leaf_names(value: Any, root: str = "value") -> list[str]:
    """Return one name for each leaf, as a user would write it: ``value['w'][0]``."""
    return [root + accessor.codify("") for accessor in optree.tree_accessors(value)]


def _walk(value: Any, leaf: type) -> tuple[tuple[Any, ...] | None, list[Any]]:
    """Go through a nest of dicts, lists, tuples and objects of type `leaf`, level by level.

    Return what tells it from nests that are built otherwise, and its leaves. Instead of the first None where something else is
    in it, or containers of several kinds stand on one level.
    """
    outline: list[Any] = []
    found: list[Any] = []
    level: list[Any] = [value]
    for _ in range(_MOST_LEVELS):
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
    """Return the structure of a nest, and what puts its leaves, level by level, in their order; None where that is the same."""
    structure = optree.tree_structure(value)
    ranks = _walk(rebuild(structure, list(range(count))), int)[1]
    order = sorted(range(count), key=ranks.__getitem__)
    return structure, None if ranks == list(range(count)) else itemgetter(*order)
