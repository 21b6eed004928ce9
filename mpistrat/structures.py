"""Nested values: flatten, map, rebuild, and name a leaf in an error.

A nested value is any combination of dict, list, tuple, namedtuple and registered classes; None is an empty nest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree

__all__ = ["Structure", "flatten", "leaf_names", "map_leaves", "rebuild"]

Structure = optree.PyTreeSpec


def flatten(value: Any) -> tuple[list[Any], Structure]:
    """Return the leaves of a nested value in a fixed order, and the structure that `rebuild` takes."""
    return optree.tree_flatten(value)


def rebuild(structure: Structure, leaves: list[Any]) -> Any:
    """Return the nested value of this structure whose leaves are `leaves`."""
    return optree.tree_unflatten(structure, leaves)


def map_leaves(function: Callable[..., Any], value: Any, *others: Any) -> Any:
    """Return the nested value whose leaves are ``function(leaf, *other_leaves)``; all must have one structure."""
    return optree.tree_map(function, value, *others)


def leaf_names(value: Any, root: str = "value") -> list[str]:
    """Return one name for each leaf, as a user would write it: ``value['w'][0]``."""
    return [root + accessor.codify("") for accessor in optree.tree_accessors(value)]
