"""Shape: the ranks that a test runs on, as its ``ranks`` mark says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from mpistrat.errors import TopologyError
from mpistrat.topology.world import World

PARAMETER = "ranks_shape"
"""The parameter of a test that holds its shape."""


@dataclass(frozen=True)
class Shape:
    """The ranks that a test runs on."""

    num_ranks: int
    nodes: str = ""  # the shape of virtual nodes, such as 2x2; the real nodes if it is empty

    def __str__(self) -> str:
        return self.nodes or f"{self.num_ranks}-ranks"


def shape_of(item: pytest.Item) -> Shape | None:
    """Return the shape that a test runs on, or None if it has no ``ranks`` mark."""
    callspec = getattr(item, "callspec", None)
    shape = callspec.params.get(PARAMETER) if callspec else None
    return shape if isinstance(shape, Shape) else None


def shapes_of(mark: pytest.Mark) -> list[Shape]:
    """Return the shapes that a ``ranks`` mark names; a ValueError says what is accepted instead."""
    nodes = mark.kwargs.get("nodes", ())
    shapes: Sequence[object] = (nodes,) if isinstance(nodes, str) else nodes
    unknown = set(mark.kwargs) - {"nodes"}
    if unknown or not (mark.args or shapes):
        raise ValueError(f"{_text(mark)}: {_ACCEPTED}")
    return [*(_plain(mark, number) for number in mark.args), *(_with_nodes(mark, shape) for shape in shapes)]


_ACCEPTED = (
    'accepted are numbers of ranks, shapes of nodes, or both: ranks(2, 4), ranks(nodes="2x2"), ranks(2, nodes=["2x2", "3+1"])'
)


def _plain(mark: pytest.Mark, number: object) -> Shape:
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ValueError(f"{_text(mark)}: {number!r} is not a number of ranks; {_ACCEPTED}")
    return Shape(number)


def _with_nodes(mark: pytest.Mark, shape: object) -> Shape:
    try:
        return Shape(World.from_shape(str(shape)).size, str(shape))
    except TopologyError as error:
        raise ValueError(f"{_text(mark)}: {error}") from None


def _text(mark: pytest.Mark) -> str:
    arguments = [*map(repr, mark.args), *(f"{name}={value!r}" for name, value in mark.kwargs.items())]
    return f"pytest.mark.ranks({', '.join(arguments)})"
