"""The text of an all-reduce of a nest, and its word: the cached 64-bit hash of the text by which ranks compare their calls."""

from __future__ import annotations

from mpistrat.groups.agreement import word_of
from mpistrat.reduction import ReduceOp
from mpistrat.structures import MAX_CACHED_STRUCTURES, ONE_LEAF, Structure

__all__ = ["OF_NESTS", "OF_ONE_ARRAY", "all_reduce_text", "word_of_nest"]


def all_reduce_text(op: ReduceOp, structure: Structure) -> str:
    """Return the text of an all-reduce of a nest of this structure."""
    return f"all_reduce({op.name}) of {structure}"


class _OfOneArray(dict[ReduceOp | str, tuple[ReduceOp, int]]):
    def __missing__(self, reduce_op: ReduceOp | str) -> tuple[ReduceOp, int]:
        op = ReduceOp.parse(reduce_op)
        found = self[reduce_op] = op, word_of(all_reduce_text(op, ONE_LEAF))
        return found


OF_ONE_ARRAY = _OfOneArray()
"""For each spelling of an operation: the operation, and the word of a call that combines one array by it."""

OF_NESTS: dict[tuple[str, int], tuple[int, Structure]] = {}
"""The words that `word_of_nest` has cached, by the name of the operation and the id of the structure, which is kept alive."""


def word_of_nest(op: ReduceOp, structure: Structure) -> int:
    """Return the word of an all-reduce of a nest, and cache it."""
    if len(OF_NESTS) >= MAX_CACHED_STRUCTURES:
        OF_NESTS.clear()
    word = word_of(all_reduce_text(op, structure))
    OF_NESTS[op._value_, id(structure)] = word, structure
    return word
