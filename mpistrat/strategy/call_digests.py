"""The text of an all-reduce of a nest, and its digest: the cached 64-bit hash by which ranks compare their calls."""

from __future__ import annotations

from mpistrat.groups.agreement import digest_of
from mpistrat.reduction import ReduceOp
from mpistrat.structures import MAX_CACHED_STRUCTURES, ONE_LEAF, Structure

__all__ = ["OF_NESTS", "OF_ONE_ARRAY", "all_reduce_text", "digest_of_nest"]


def all_reduce_text(op: ReduceOp, structure: Structure) -> str:
    """Return the text of an all-reduce of a nest of this structure."""
    return f"all_reduce({op.name}) of {structure}"


class _OfOneArray(dict[ReduceOp | str, tuple[ReduceOp, int]]):
    def __missing__(self, reduce_op: ReduceOp | str) -> tuple[ReduceOp, int]:
        op = ReduceOp.parse(reduce_op)
        found = self[reduce_op] = op, digest_of(all_reduce_text(op, ONE_LEAF))
        return found


OF_ONE_ARRAY = _OfOneArray()
"""For each spelling of an operation: the operation, and the digest of a call that combines one array by it."""

OF_NESTS: dict[tuple[str, int], tuple[int, Structure]] = {}
"""The cache of `digest_of_nest`, by the name of the operation and the id of the structure, which is kept alive."""


def digest_of_nest(op: ReduceOp, structure: Structure) -> int:
    """Return the digest of an all-reduce of a nest, and cache it."""
    if len(OF_NESTS) >= MAX_CACHED_STRUCTURES:
        OF_NESTS.clear()
    digest = digest_of(all_reduce_text(op, structure))
    OF_NESTS[op._value_, id(structure)] = digest, structure
    return digest
