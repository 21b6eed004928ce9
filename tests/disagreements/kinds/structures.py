"""One rank passes another nest of arrays."""

from __future__ import annotations

import numpy as np

import mpistrat
from tests.disagreements.case import Case
from tests.disagreements.kinds.registry import kind


@kind("nest")
def dict_and_list(case: Case) -> None:
    """One rank passes a list of two arrays, the others a dict."""
    a, b = case.operand(), case.operand(7)
    case.all_reduce("sum", case.pick({"a": a, "b": b}, [a, b]))


@kind("nest")
def leaf_missing(case: Case) -> None:
    """One rank's dict lacks an array."""
    a, b = case.operand(), case.operand(7)
    case.all_reduce("sum", case.pick({"a": a, "b": b}, {"a": a}))


@kind("nest")
def leaf_none(case: Case) -> None:
    """One rank has None in the place of an array."""
    a, b = case.operand(), case.operand(7)
    case.all_reduce("sum", case.pick({"a": a, "b": b}, {"a": a, "b": None}))


@kind("nest")
def leaf_more(case: Case) -> None:
    """One rank passes a list of two arrays, the others one array."""
    case.all_reduce("sum", case.pick(lambda: [case.operand()], lambda: [case.operand(), case.operand()])())


@kind("nest")
def nested_deeper(case: Case) -> None:
    """One rank's arrays are in a list of lists."""
    a, b = case.operand(), case.operand()
    case.all_reduce("sum", case.pick([a, b], [[a], [b]]))


@kind("nest")
def keys_renamed(case: Case) -> None:
    """One rank's arrays have other names."""
    a, b = case.operand(), case.operand()
    case.all_reduce("sum", case.pick({"a": a, "b": b}, {"a": a, "c": b}))


@kind("nest")
def leaves_swapped(case: Case) -> None:
    """One rank has two arrays of different lengths in the other order."""
    a, b = case.operand(), case.operand(case.count + 3)
    case.all_reduce("sum", case.pick([a, b], [b, a]))


@kind("nest")
def cut_elsewhere(case: Case) -> None:
    """One rank's two arrays have as many elements in all, but are cut elsewhere."""
    first = case.pick(case.count + 4, case.count + 2)
    case.all_reduce("sum", [case.operand(first), case.operand(2 * case.count + 8 - first)])


@kind("nest")
def many_leaves_one_longer(case: Case) -> None:
    """Among thirty arrays, one of one rank is longer."""
    counts = [max(case.count // 30, 1)] * 30
    counts[17] += case.pick(0, 5)
    case.all_reduce("sum", [case.operand(count) for count in counts])


@kind("nest")
def many_leaves_one_dtype(case: Case) -> None:
    """Among thirty arrays, one of one rank has another dtype of the same size."""
    dtypes = ["float32"] * 30
    dtypes[17] = case.pick("float32", "int32")
    case.all_reduce("sum", [case.operand(max(case.count // 30, 1), dtype) for dtype in dtypes])


def _slices(case: Case, rows: int, width: int, dense: int | None) -> mpistrat.IndexedSlices:
    return mpistrat.IndexedSlices(case.operand((rows, width)), np.arange(rows), None if dense is None else (dense, width))


def _reduce_slices(case: Case, slices: mpistrat.IndexedSlices) -> None:
    expected = case.totals("sum", slices.values)
    result = case.run(lambda context: context.all_reduce("sum", slices))
    case.look("all_reduce slices", result.values, expected)


@kind("slices")
def slices_and_dense(case: Case) -> None:
    """One rank passes the rows of a gradient, the others all of it."""
    if case.is_odd:
        _reduce_slices(case, _slices(case, case.count, 2, case.count))
    else:
        case.all_reduce("sum", case.operand((case.count, 2)))


@kind("slices")
def slices_dense_shape(case: Case) -> None:
    """One rank's rows belong to a longer dense array."""
    _reduce_slices(case, _slices(case, case.count, 2, case.count + case.pick(5, 9)))


@kind("slices")
def slices_width(case: Case) -> None:
    """One rank's rows are wider."""
    _reduce_slices(case, _slices(case, case.count, case.pick(2, 3), case.count))
