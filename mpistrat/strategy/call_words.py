"""The text of an all-reduce of a nest, and its word: the cached 64-bit hash of the text by which ranks compare their calls."""

from __future__ import annotations

from mpistrat.groups.agreement import word_of
from mpistrat.reduction import ReduceOp
from mpistrat.structures import MAX_CACHED_STRUCTURES, ONE_LEAF, Structure

__all__ = ["all_reduce_text", "op_and_word", "word_of_nest"]

_for_one_array: dict[ReduceOp | str, tuple[ReduceOp, int]] = {}
_of_nests: dict[tuple[str, int], tuple[int, Structure]] = {}


def all_reduce_text(op: ReduceOp, structure: Structure) -> str:
    """Return the text of an all-reduce of a nest of this structure."""
    return f"all_reduce({op.name}) of {structure}"


def op_and_word(reduce_op: ReduceOp | str) -> tuple[ReduceOp, int]:
    """Return the operation, and the word of an all-reduce of a single array by it; cached for each spelling."""
    found = _for_one_array.get(reduce_op)
    if found is None:
        op = ReduceOp.parse(reduce_op)
        found = _for_one_array[reduce_op] = op, word_of(all_reduce_text(op, ONE_LEAF))
    return found


def word_of_nest(op: ReduceOp, structure: Structure) -> int:
    """Return the word of an all-reduce of a nest; cached for each structure object."""
    key = op._value_, id(structure)
    found = _of_nests.get(key)
    if found is None or found[1] is not structure:
        if len(_of_nests) >= MAX_CACHED_STRUCTURES:
            _of_nests.clear()
        found = _of_nests[key] = word_of(all_reduce_text(op, structure)), structure
    return found[0]
