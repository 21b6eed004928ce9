"""Leaves of nested values: read as arrays and checked, with errors that name the leaf."""

from __future__ import annotations

from typing import Any

from mpistrat.arrays import as_operand
from mpistrat.communicator.sparse import IndexedSlices
from mpistrat.errors import MpistratError
from mpistrat.reduction import ReduceOp, check_across_replicas
from mpistrat.structures import leaf_names

__all__ = ["check_dtypes", "read_leaves"]


def read_leaves(value: Any, leaves: list[Any]) -> list[Any]:
    """Return the leaves of a value as arrays; IndexedSlices are returned as they are."""
    try:
        return [leaf if isinstance(leaf, IndexedSlices) else as_operand(leaf) for leaf in leaves]
    except MpistratError:
        for name, leaf in zip(leaf_names(value), leaves, strict=True):
            if not isinstance(leaf, IndexedSlices):
                as_operand(leaf, name)
        raise


def check_dtypes(op: ReduceOp, value: Any, arrays: list[Any]) -> None:
    """Check that `op` is defined across replicas for the dtype of each leaf of a value; the error names the leaf."""
    for name, array in zip(leaf_names(value), arrays, strict=True):
        check_across_replicas(op, array.dtype, name)
