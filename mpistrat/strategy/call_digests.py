"""The text of an all-reduce of a nest, and its digest: the cached 64-bit hash by which ranks compare their calls.

One array is not a nest: its all-reduce is the same call as that of the communicator, which has no structure.
"""

from __future__ import annotations

from mpistrat.groups.agreement import digest_of
from mpistrat.reduction import ReduceOp
from mpistrat.structures import MAX_CACHED_STRUCTURES, Structure

__all__ = ["OF_NESTS", "OPERATIONS", "all_reduce_text", "digest_of_nest"]


def all_reduce_text(op: ReduceOp, structure: Structure) -> str:
    """Return the text of an all-reduce of a nest of this structure."""
    return f"all_reduce({op.name}) of {structure}"


class _Operations(dict[ReduceOp | str, ReduceOp]):
    def __missing__(self, reduce_op: ReduceOp | str) -> ReduceOp:
        op = self[reduce_op] = ReduceOp.parse(reduce_op)
        return op


OPERATIONS = _Operations()
"""For each spelling of an operation: the operation."""

OF_NESTS: dict[tuple[str, int], tuple[int, Structure]] = {}
"""The cache of `digest_of_nest`, by the name of the operation and the id of the structure, which is kept alive."""


def digest_of_nest(op: ReduceOp, structure: Structure) -> int:
    """Return the digest of an all-reduce of a nest, and cache it."""
    if len(OF_NESTS) >= MAX_CACHED_STRUCTURES:
        OF_NESTS.clear()
    digest = digest_of(all_reduce_text(op, structure))
    OF_NESTS[op._value_, id(structure)] = digest, structure
    return digest
