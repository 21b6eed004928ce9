"""Deviations: what some ranks do to the sequence of calls that the others make; and how it may end, by what differs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.disagreements.calls import LOCAL, Call

Calls = list[Call]
Deviation = Callable[[Calls], Calls]

RIGHT, TOLD, REPORTED = frozenset({"right"}), frozenset({"told"}), frozenset({"reported"})
MAY_BE_RIGHT = RIGHT | TOLD  # ranks differ in what need not change a result
TOLD_OR_REPORTED = TOLD | REPORTED


def change(index: int = 0, **arguments: Any) -> Deviation:
    """Return a deviation that changes arguments of a call; a function is given the argument that others pass."""

    def deviate(calls: Calls) -> Calls:
        call = calls[index]
        changed = {name: value(getattr(call, name)) if callable(value) else value for name, value in arguments.items()}
        return [*calls[:index], replace(call, **changed), *calls[index + 1 :]]

    return deviate


def insert(index: int, *more: Call) -> Deviation:
    """Return a deviation that makes more calls."""
    return lambda calls: [*calls[:index], *more, *calls[index:]]


# by what is done with a call, and with the next one: of an index, which may be that of no call
ORDERS: dict[str, Callable[[int], Deviation]] = {
    "without": lambda index: lambda calls: [*calls[:index], *calls[index + 1 :]],
    "twice": lambda index: lambda calls: [*calls[:index], *calls[index : index + 1] * 2, *calls[index + 1 :]],
    "swapped": lambda index: lambda calls: [*calls[:index], *calls[index : index + 2][::-1], *calls[index + 2 :]],
}
_SAME_WIDTH = {"float64": "int64", "float32": "int32", "float16": "bfloat16", "int8": "uint8"}
_OTHER_WIDTH = {"float64": "float32", "float32": "float64", "int8": "int16"}
# by argument, what a call may be given instead; which leaves some calls as they are
ARGUMENTS: dict[str, dict[str, Deviation]] = {
    "shape": {
        "shorter": change(shape=lambda shape: (*(extent - max(1, extent // 5) for extent in shape[:1]), *shape[1:])),
        "longer": change(shape=lambda shape: (*(extent + max(1, extent // 5) for extent in shape[:1]), *shape[1:])),
        "longer_by_one": change(shape=lambda shape: (*(extent + 1 for extent in shape[:1]), *shape[1:])),
        "twice_as_long": change(shape=lambda shape: (*(2 * extent for extent in shape[:1]), *shape[1:])),
        "empty": change(shape=lambda shape: (0, *shape[1:])),
        "wider": change(shape=lambda shape: (*shape[:1], *(extent + 1 for extent in shape[1:]))),
        "transposed": change(shape=lambda shape: shape[::-1]),
        "one_axis_more": change(shape=lambda shape: (*shape, 1)),
    },
    "dtype": {
        "dtype_of_same_width": change(dtype=lambda dtype: _SAME_WIDTH.get(dtype, dtype)),
        "dtype_of_other_width": change(dtype=lambda dtype: _OTHER_WIDTH.get(dtype, dtype)),
        "dtype_of_same_bytes": lambda calls: (
            change(dtype="float32", shape=lambda shape: (*shape[:-1], 2 * shape[-1]))(calls)
            if calls[0].dtype == "float64" and calls[0].shape
            else calls
        ),
    },
    "op": {f"op_{op}": change(op=op) for op in ("sum", "max", "min", "mean", "prod", "unknown")},
    "place": {"place": change(place=lambda place: 1 if place == 0 else 0)},
    "layout": {f"layout_{layout}": change(layout=layout) for layout in ("strided", "misaligned", "read_only", "big_endian")},
    "thread": {"on_a_thread": change(is_on_thread=True)},
}

# Calls of these verbs are the same to other ranks, or may be.
_SAME = {"all_reduce", "into", "of_communicator"}
_ALIKE = (_SAME | {"started", "weighted", "reduce"}, {"all_gather", "gather"})


def outcomes(usual: Calls, odd: Calls) -> frozenset[str]:
    """Return how a case may end in which some ranks make the usual calls, and some make odd ones."""
    ours, theirs = ([call for call in calls if call.verb not in LOCAL] for calls in (usual, odd))
    if len(ours) != len(theirs):
        return TOLD_OR_REPORTED if any(call.verb == "strategy" for call in usual + odd) else TOLD
    found = [_outcomes_of(*pair) for pair in zip(ours, theirs, strict=True)]
    return next(kind for kind in (TOLD_OR_REPORTED, TOLD, MAY_BE_RIGHT, RIGHT) if kind is RIGHT or kind in found)


def _outcomes_of(usual: Call, odd: Call) -> frozenset[str]:
    verbs, one, other = {usual.verb, odd.verb}, _compared(usual), _compared(odd)
    differ = {name for name in vars(usual) if getattr(one, name) != getattr(other, name)}
    if differ - {"verb", "options", "layout"} or not any(verbs <= alike for alike in ({usual.verb}, *_ALIKE)):
        return TOLD_OR_REPORTED if "strategy" in differ else TOLD
    return RIGHT if not differ or (differ == {"verb"} and verbs <= _SAME) else MAY_BE_RIGHT


def _compared(call: Call) -> Call:
    """Return a call without that in which ranks may differ."""
    call = replace(call, layout="big_endian" if call.layout == "big_endian" else "")
    if call.verb in ("broadcast", "feed"):  # what is received has the shape and dtype of the root
        return replace(call, shape=(), dtype="")
    if call.verb in ("all_gather", "gather", "all_to_all") and call.shape:
        axis = 0 if call.verb == "all_to_all" else call.place or 0
        return replace(call, shape=(*call.shape[:axis], -1, *call.shape[axis + 1 :]))
    return call
